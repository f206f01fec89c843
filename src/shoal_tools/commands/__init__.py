"""What the command line runs: train, plan, check, probe, bench."""
