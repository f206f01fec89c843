"""`shoal doctor`: finds faults of hosts and of their network, and the commands that mend them.

facts     reports of each host about itself         │  plain sockets: they work where gloo
wire      requests and answers between two hosts    │  and the rendezvous do not
boards    how all hosts learn the findings of each
examine   the course of an examination, which ends whatever happens
checks_*  findings, from all facts: functions of plain data
show      the text for people
"""
