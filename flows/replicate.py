"""Owns `dps replicate`: one command for each paper whose experiments are repeated."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.terminal import console, store

if TYPE_CHECKING:
    from flows.replications import ReplicationConfig

app = typer.Typer(
    no_args_is_help=True, help="Repeat the experiments of a paper, and judge its claims."
)

Full = Annotated[
    bool, typer.Option("--full", help="The whole replication, not the short version of it.")
]


@app.callback()
def _replicate() -> None:
    pass


@app.command()
def ftps(full: Full = False) -> None:
    """Pampari and Patel: ring balance, servers × workers, and the loss of a server."""
    from flows import replicate_ftps
    from flows.findings import TEXT
    from flows.progress import view_for

    here = Path.cwd()
    try:
        findings = replicate_ftps.replicate(full, here, partial(view_for, console()), store())
    except KeyboardInterrupt:
        again = "dps replicate ftps --full" if full else "dps replicate ftps"
        print(f"dps: interrupted; what was recorded is kept. To go on: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    folder = replicate_ftps.folder(full, here)
    page = findings.write(folder)
    print(findings.markdown())
    print(f"Page: {page}\nThe text above: {folder / TEXT}")


@app.command()
def ttf(
    full: Full = False,
    published: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="The published accuracy curves, to be drawn beside ours."),
    ] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Run nothing: go by what is recorded here.")
    ] = False,
) -> None:
    """Cao, Luo, Gan and Jinesh, "Training Through Failure": as published, and on the real dps."""
    from flows import replicate_ttf
    from flows.progress import view_for
    from flows.ttf.findings import TEXT

    here = Path.cwd()
    try:
        if records:
            text = replicate_ttf.findings(full, here, published)
        else:
            text = replicate_ttf.replicate(full, here, view_for(console()), store(), published)
    except KeyboardInterrupt:
        again = "dps replicate ttf --full" if full else "dps replicate ttf"
        print(f"dps: interrupted; what was recorded is kept. To go on: {again}", file=sys.stderr)
        raise typer.Exit(130) from None
    print(text)
    written = replicate_ttf.folder(here) / TEXT
    print(f"The text above, with its figures: {written}")


def run_replication(config: ReplicationConfig) -> None:
    """Run what a configuration of `dps run` asks for."""
    match config.replication:
        case "ttf":
            ttf(config.full, config.curves)
        case "ftps":
            ftps(config.full)
