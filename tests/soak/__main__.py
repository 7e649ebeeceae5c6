"""The commands of the soak: `python -m tests.soak rounds` and `python -m tests.soak returns`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from dps.errors import ConfigurationError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def rounds(
    minutes: Annotated[float, typer.Option(min=0, help="Duration; each strategy runs once.")] = 30,
    seed: Annotated[int, typer.Option(help="Random seed of the faults.")] = 0,
    first: Annotated[int, typer.Option(help="Number of the first round.")] = 1,
    faults: Annotated[int, typer.Option(min=1, help="Faults per round.")] = 8,
    only: Annotated[list[str], typer.Option(help="Run this strategy only; repeatable.")] = [],  # noqa: B006
) -> None:
    """Kill and pause nodes of all strategies at random, and check every promise."""
    from tests.soak.soak import soak

    raise typer.Exit(soak(minutes, seed, first, faults, only))


@app.command()
def returns(
    victims: Annotated[list[str], typer.Argument(help="driver, scheduler, or both.")],
    times: Annotated[int, typer.Option(min=1, help="Kills of each victim.")] = 20,
    seed: Annotated[int, typer.Option(help="Random seed of the moments of the kills.")] = 0,
    every: Annotated[int, typer.Option(min=1, help="Updates between checkpoints.")] = 100,
    standby: Annotated[bool, typer.Option("--standby", help="Keep the next driver ready.")] = False,
    layered: Annotated[
        bool, typer.Option("--layered", help="Write checkpoints below a chain.")
    ] = False,
) -> None:
    """Kill drivers and schedulers of supervised trainings, which must continue by themselves."""
    from tests.soak.returns import Setting, run_returns

    raise typer.Exit(run_returns(victims, times, seed, Setting(every, standby, layered)))


if __name__ == "__main__":
    try:
        app(prog_name="python -m tests.soak")
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
