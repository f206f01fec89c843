"""How the sum of a bucket gets to every rank: one file a scheme."""
