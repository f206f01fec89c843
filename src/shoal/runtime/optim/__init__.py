"""What parallelize adds to an optimizer: parts, each for the parameters that somebody else has."""
