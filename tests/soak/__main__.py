"""The command of the soak: `python -m tests.soak`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dps.errors import ConfigurationError
from tests.soak.soak import soak

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    minutes: Annotated[float, typer.Option(min=0, help="Duration; each strategy runs once.")] = 30,
    seed: Annotated[int, typer.Option(help="Random seed of the faults.")] = 0,
    first: Annotated[int, typer.Option(help="Number of the first round.")] = 1,
    faults: Annotated[int, typer.Option(min=1, help="Faults per round.")] = 8,
    only: Annotated[list[str], typer.Option(help="Run this strategy only; repeatable.")] = [],  # noqa: B006
) -> None:
    """Kill and pause nodes of all strategies at random, and check every promise."""
    raise typer.Exit(soak(minutes, seed, first, faults, only))


if __name__ == "__main__":
    try:
        app(prog_name="python -m tests.soak")
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
