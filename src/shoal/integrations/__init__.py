"""Shoal inside other systems. `shoal.integrations.spark` is `shoal_tools.spark` (moved.py)."""
