"""Chooses a strategy and an exchange for each layer, and says why."""
