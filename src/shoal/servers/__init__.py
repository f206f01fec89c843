"""The servers' own side: ranks that own parameters and train nothing."""
