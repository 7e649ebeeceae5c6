"""The command of the simulator: `python -m tests.simulator`.

What runs in processes of its own cannot be in this module, which they do not import.
"""

from __future__ import annotations

import re
import signal
import sys
from typing import Annotated

import typer

from dps.errors import ConfigurationError
from flows.cli.console import console
from tests.simulator.runner import run_again, run_many, run_mutants

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    schedules: Annotated[int, typer.Option(min=1, help="Schedules, over all strategies.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Series of schedules.")] = 0,
    replay: Annotated[
        str, typer.Option(metavar="CASE:SEED", help="Repeat one schedule, as in 'chain(2):12'.")
    ] = "",
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Find every deliberately broken variant.")
    ] = False,
    fresh: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Take the series of a commit, given its hash."),
    ] = None,
) -> None:
    """Run the protocol on virtual time under random faults; every promise must hold."""
    if fresh is not None:
        seed = _series_of(fresh)
        print(f"series {seed}; again: make simulate SCHEDULES={schedules} SEED={seed}")
    if replay:
        good = run_again(replay)
    elif mutants:
        good = run_mutants(console())
    else:
        good = run_many(schedules, seed, console())
    raise typer.Exit(0 if good else 1)


def _series_of(commit: str) -> int:
    """The series of schedules that a commit stands for, another one for each."""
    if re.fullmatch("[0-9a-f]{8,64}", commit) is None:
        raise ConfigurationError(
            f"--fresh {commit!r}: expected the hash of a commit, as `git rev-parse HEAD` prints it"
        )
    return int(commit[:8], 16)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it stops its processes then
    try:
        app(prog_name="python -m tests.simulator")
    except ConfigurationError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
