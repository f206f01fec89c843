"""The calls of a script: init, shard, parallelize, unparallelize."""
