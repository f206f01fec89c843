"""The contracts that the rest of Shoal is made of, one in each file. Classes below them are final.

comm       point-to-point and collectives among ranks: the only door to the network
exchange   how the sum of one bucket gets to every rank, and the bytes that takes
transfer   something that crosses the network: a strategy hands it to the engine
strategy   how one site (a layer, or a bucket of layers) is served, its cost, and its refusals
launcher   how a command is started once for each rank
"""
