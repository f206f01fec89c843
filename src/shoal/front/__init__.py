"""What a script calls: init, shard, parallelize, unparallelize."""
