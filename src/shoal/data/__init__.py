"""Give each rank its own rows of any loader, none twice, none lost: `shard`.

sharded    the loader of a loop; picks the kind     │ kinds of source, a file each:
source     a pass, and the position in it           │   rows     of a sampler or batch_sampler
deal       the rows of each rank in a global batch  │   stream   one stream, the same on every rank
shares     how many rows each rank takes            │   streams  each rank its own: own_stream, ends
order      a sampler's order, piece by piece        │
samplers   samplers made for several ranks          │ draws      random numbers of their own
parts      a part of a batch that is already made   │ workers    seeds for each batch: worker_info
told       a dataset that is told of each pass      │
"""
