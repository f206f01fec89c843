"""Additions of `parallelize` to an optimizer: parts, one for each way of holding its parameters."""
