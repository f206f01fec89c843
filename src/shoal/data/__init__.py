"""What `shard` gives: each rank its own rows of any loader, none twice, none lost.

sharded    what a loop iterates over; picks the kind of source
source     a pass, and the position in it          │ kinds, a file each:
deal       who has which rows of a global batch     │   rows     rows of a sampler
shares     how many rows each rank takes            │   batches  batches of a batch_sampler, or made
order      a sampler's order, the same on all ranks │   stream   one stream, the same on every rank
parts      a part of a batch that is made already   │   streams  each rank its own stream
"""
