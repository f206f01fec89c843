"""Commands of `shoal`, a file each, and the work that their ranks do."""
