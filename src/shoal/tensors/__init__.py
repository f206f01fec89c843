"""Tensors that stand for what is elsewhere: parameters and outputs of layers cut over ranks."""
