"""`dps replicate`: one command for each paper whose experiments are repeated."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.console import console, exit_if_failed, store, warn

if TYPE_CHECKING:
    from flows.analysis.outcome import Outcome
    from flows.replication.config import ReplicationConfig

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
    from flows.monitor.progress import view_for
    from flows.replication.findings import TEXT
    from flows.replication.ftps import run as replicate_ftps

    here = Path.cwd()
    try:
        view_of = partial(view_for, console())
        findings, failed = replicate_ftps.replicate(full, here, view_of, store())
    except KeyboardInterrupt:
        raise _interrupted("ftps", *_full(full)) from None
    folder = replicate_ftps.folder(full, here)
    page = findings.write(folder)
    print(findings.markdown())
    print(f"Page: {page}\nThe text above: {folder / TEXT}")
    exit_if_failed(failed)


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
    from flows.monitor.progress import view_for
    from flows.replication.ttf import run as replicate_ttf
    from flows.replication.ttf.findings import TEXT

    here = Path.cwd()
    failed: Sequence[Outcome] = ()
    try:
        if not records:
            view = view_for(console())
            failed = replicate_ttf.run(full, here, view, store(), published)
        text = replicate_ttf.findings(full, here, published, warn)
    except KeyboardInterrupt:
        curves = ["--published", str(published)] if published is not None else []
        no_runs = ["--records"] if records else []
        raise _interrupted("ttf", *_full(full), *curves, *no_runs) from None
    print(text)
    written = replicate_ttf.folder(full, here) / TEXT
    print(f"The text above, with its figures: {written}")
    exit_if_failed(failed)


def run_replication(config: ReplicationConfig) -> None:
    """Run what a configuration of `dps run` asks for."""
    match config.replication:
        case "ttf":
            ttf(config.full, config.curves)
        case "ftps":
            ftps(config.full)


def _full(full: bool) -> list[str]:
    return ["--full"] if full else []


def _interrupted(*words: str) -> typer.Exit:
    """Say with which words the same goes on, and return the end of the command."""
    again = shlex.join(["dps", "replicate", *words])
    print(f"dps: interrupted; what was recorded is kept. To go on: {again}", file=sys.stderr)
    return typer.Exit(130)
