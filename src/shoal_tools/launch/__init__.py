"""How a command gets to run once a rank: one file each."""
