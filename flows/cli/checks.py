"""The command that checks the protocol itself: `dps simulate`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import documents
from flows.cli.console import console
from flows.cli.documents import AsJson, json_output

if TYPE_CHECKING:
    from flows.verification.simulate import Hunt, Repeated, Simulated

app = typer.Typer()


@app.command()
def simulate(
    schedules: Annotated[int, typer.Option(min=1, help="How many, over all strategies.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Which series of schedules.")] = 0,
    replay: Annotated[
        str, typer.Option(metavar="CASE:SEED", help="Repeat one schedule, as in 'chain(2):12'.")
    ] = "",
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Have every deliberately broken variant caught.")
    ] = False,
    fresh: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Take the series of a commit, given its hash."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the protocol on virtual time under random faults; every promise must hold."""
    from flows.verification import simulate as simulation

    with json_output(as_json) as out:
        if fresh is not None:
            seed = _series_of(fresh)
            print(f"series {seed}; again: dps simulate --schedules {schedules} --seed {seed}")
        done: Simulated | Hunt | Repeated
        if replay:
            done = simulation.replay(replay, console())
        elif mutants:
            done = simulation.run_mutants(console())
        else:
            done = simulation.run_many(schedules, seed, console())
        out.write(documents.simulated(done))
    if not done.good:
        raise typer.Exit(1)


def _series_of(commit: str) -> int:
    """The series of schedules that a commit stands for, another one for each."""
    if re.fullmatch("[0-9a-f]{8,64}", commit) is None:
        raise typer.BadParameter(
            f"--fresh {commit!r}: expected the hash of a commit, as `git rev-parse HEAD` prints it"
        )
    return int(commit[:8], 16)
