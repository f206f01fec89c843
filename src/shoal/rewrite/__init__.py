"""Puts a plan into a model, in place."""
