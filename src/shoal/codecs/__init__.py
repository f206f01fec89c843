"""Codecs, which send values in fewer bytes, one a file, and exchanges that carry codes."""
