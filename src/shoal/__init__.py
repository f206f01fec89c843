"""Shoal trains any PyTorch model on several machines joined by ordinary networks."""
