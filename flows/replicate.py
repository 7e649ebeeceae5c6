"""Owns `dps replicate`: one command for each paper whose experiments are repeated."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from flows.terminal import console, store

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
    print(f"Page: {page}\nThe text above, for docs/findings.md: {folder / TEXT}")
