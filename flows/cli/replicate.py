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
    from flows.replication.verdicts import Verdicts
    from flows.replication.version import Version

app = typer.Typer(
    no_args_is_help=True, help="Repeat the experiments of a paper, and judge its claims."
)

Full = Annotated[
    bool, typer.Option("--full", help="The whole replication, not the short version of it.")
]

Virtual = Annotated[
    bool,
    typer.Option("--virtual", help="On virtual time, beside the verdicts of real processes."),
]
Beside = Annotated[
    Path | None,
    typer.Option(
        metavar="JSON",
        help="With --virtual: the verdicts.json of real processes to compare with, in place of "
        "what is recorded here.",
    ),
]


@app.callback()
def _replicate() -> None:
    pass


@app.command()
def ftps(full: Full = False, virtual: Virtual = False, beside: Beside = None) -> None:
    """Pampari and Patel: ring balance, servers × workers, and the loss of a server."""
    from flows.monitor.progress import view_for
    from flows.replication.findings import TEXT
    from flows.replication.ftps import run as replicate_ftps
    from flows.replication.version import Version

    here, version = Path.cwd(), Version(full, virtual)
    real = _real("ftps", version, beside, here)
    try:
        view_of = partial(view_for, console())
        findings, failed = replicate_ftps.replicate(version, here, view_of, store(), real)
    except KeyboardInterrupt:
        raise _interrupted("ftps", *version.options, *_path("--beside", beside)) from None
    folder = version.folder("ftps", here)
    page = findings.write(folder)
    print(findings.markdown())
    print(f"Page: {page}\nThe text above: {folder / TEXT}")
    exit_if_failed(failed)


@app.command()
def ttf(
    full: Full = False,
    virtual: Virtual = False,
    published: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="The published accuracy curves, to be drawn beside ours."),
    ] = None,
    records: Annotated[
        bool, typer.Option("--records", help="Run nothing: go by what is recorded here.")
    ] = False,
    beside: Beside = None,
) -> None:
    """Cao, Luo, Gan and Jinesh, "Training Through Failure": as published, and on the real dps."""
    from flows.monitor.progress import view_for
    from flows.replication.ttf import run as replicate_ttf
    from flows.replication.ttf.findings import TEXT
    from flows.replication.version import Version

    here, version = Path.cwd(), Version(full, virtual)
    real = _real("ttf", version, beside, here)
    failed: Sequence[Outcome] = ()
    try:
        if not records:
            view = view_for(console())
            failed = replicate_ttf.run(version, here, view, store(), published)
        text = replicate_ttf.findings(version, here, published, warn, real)
    except KeyboardInterrupt:
        paths = [*_path("--published", published), *_path("--beside", beside)]
        no_runs = ["--records"] if records else []
        raise _interrupted("ttf", *version.options, *paths, *no_runs) from None
    print(text)
    written = version.folder("ttf", here) / TEXT
    print(f"The text above, with its figures: {written}")
    exit_if_failed(failed)


def run_replication(config: ReplicationConfig) -> None:
    """Run what a configuration of `dps run` asks for."""
    match config.replication:
        case "ttf":
            ttf(config.full, config.virtual, config.curves)
        case "ftps":
            ftps(config.full, config.virtual)


def _real(paper: str, version: Version, beside: Path | None, here: Path) -> Verdicts | None:
    """The verdicts of real processes to set beside those of virtual time; None: there are none."""
    from dps.errors import ConfigurationError
    from flows.replication.verdicts import VERDICTS, read_verdicts
    from flows.replication.version import Version

    if beside is not None:
        if not version.virtual:
            raise ConfigurationError(
                "--beside: verdicts of real processes are set beside those of virtual time; "
                "expected --virtual with it"
            )
        return read_verdicts(beside, paper)
    folders = (Version(full).folder(paper, here) for full in (True, False))
    found = next((f / VERDICTS for f in folders if (f / VERDICTS).exists()), None)
    return None if found is None or not version.virtual else read_verdicts(found, paper)


def _path(option: str, path: Path | None) -> list[str]:
    return [] if path is None else [option, str(path)]


def _interrupted(*words: str) -> typer.Exit:
    """Say with which words the same goes on, and return the end of the command."""
    again = shlex.join(["dps", "replicate", *words])
    print(f"dps: interrupted; what was recorded is kept. To go on: {again}", file=sys.stderr)
    return typer.Exit(130)
