"""Tensors with values elsewhere: parameters and outputs of layers that are cut over the ranks."""
