"""The only door to the network."""
