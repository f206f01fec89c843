"""Fault injection and counting, for tests: wrappers around a `Comm`."""
