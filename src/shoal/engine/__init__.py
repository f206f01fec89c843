"""Order of the work: rounds, lanes, and the way by which backward enters and is weighed."""
