"""The contracts that the rest of Shoal is made of, one a file. What stands below them is final.

comm       point-to-point and collectives among ranks: the only door to the network
exchange   how the sum of one bucket gets to every rank, and the bytes that takes
transfer   what a strategy hands to the engine: something that crosses the network
strategy   how one site (a layer, or a bucket of layers) is served, its cost, and whom it refuses
launcher   how a command gets to run once a rank
"""
