"""`python -m shoal` is the command line."""

from shoal_tools.cli import main

main(prog_name="shoal")
