"""Runs a rewritten model: the engine, the session, the data."""
