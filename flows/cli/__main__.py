"""Run the command line with `python -m flows.cli`."""

from flows.cli import main

main()
