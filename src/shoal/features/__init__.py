"""Features of training, one in a file: contracts/feature.py says what each has to do."""
