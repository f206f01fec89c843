"""Commands of `shoal`, one a file, and the work that their ranks do."""
