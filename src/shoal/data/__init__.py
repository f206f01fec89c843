"""What `shard` gives: each rank its own rows of any loader, none twice, none lost.

sharded    what a loop iterates over; picks the kind of source
source     a pass, and the position in it          │ kinds, a file each:
deal       who has which rows of a global batch     │   rows     of a sampler or batch_sampler
shares     how many rows each rank takes            │   stream   one stream, the same on every rank
order      a sampler's order, the same on all ranks │   streams  each rank its own stream
parts      a part of a batch that is made already   │
"""
