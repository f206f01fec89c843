"""This process among the ranks, and its record of each parallelised model."""
