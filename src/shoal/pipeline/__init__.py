"""Pipelines: a model's layers on several ranks, fed by the rows of all of them."""
