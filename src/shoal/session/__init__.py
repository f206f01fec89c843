"""This process among the ranks, and what it keeps of each parallelised model."""
