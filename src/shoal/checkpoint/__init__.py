"""Checkpoints: the format of their files, and the way in which a folder gets them whole."""
