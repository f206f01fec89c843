"""`python -m shoal` is the command line."""

from shoal.cli import main

main(prog_name="shoal")
