"""`shoal doctor`: what is wrong with hosts and the network between them, and what mends it.

facts     what a host says of itself          │  plain sockets: it works where gloo
wire      what passes between two hosts       │  and the rendezvous do not
boards    how all learn what each has found
examine   the course of an examination, which ends whatever happens
checks_*  findings, from all that was found: functions of plain data
show      what people read
"""
