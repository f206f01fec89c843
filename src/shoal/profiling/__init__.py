"""Measures models and links."""
