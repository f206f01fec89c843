"""The tail hosts' own side: ranks that run the end of a model."""
