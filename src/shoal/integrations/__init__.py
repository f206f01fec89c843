"""Shoal inside other systems, each in a package of its own that only who asks for it imports."""
