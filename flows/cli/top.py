"""The commands that watch trainings: `dps top`, like htop for processes, and `dps status`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.arguments import RESULTS, experiments
from flows.cli.console import AsJson, console, json_output

if TYPE_CHECKING:
    from dps.observe.views import TrainingView
    from flows.monitor.top import Source


def status(
    experiment: Annotated[
        str | None,
        typer.Argument(
            metavar="EXPERIMENT",
            help="Name of an experiment; default: all that are recorded in this directory.",
            autocompletion=experiments,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the finished, running, waiting, missing and damaged trials of experiments.

    It only reads files, so it also runs on another host with the same file system.
    """
    from flows.monitor.status import show, statuses

    found = statuses(Path.cwd(), experiment)
    with json_output(as_json) as out:
        if not out.wanted:
            show(found, console())
            if not found:
                print(f"no experiment is recorded in {Path(RESULTS).resolve()}")
        out.write(found)


def top(
    training: Annotated[
        str | None,
        typer.Argument(
            metavar="ADDRESS|NAME|FOLDER",
            help="Address of a Dask scheduler (10.0.0.1:8786, tls://…), name of an experiment, or "
            "folder of records; default: the experiment that runs in this directory.",
            autocompletion=experiments,
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit; default without a terminal.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds between updates of the display.")
    ] = 1.0,
    tls_ca_file: Annotated[
        Path | None, typer.Option(help="Certificates of the authority, as for `dask scheduler`.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Your certificate.")] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Your private key, unless it is in the same file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show running trainings live: shards, workers and recent losses. Ctrl-C ends it.

    It only reads, so it does not disturb a training.
    """
    from flows.monitor.top import look_twice

    with (
        _source(training, tls_ca_file, tls_cert, tls_key) as source,
        json_output(as_json) as out,
    ):
        if once or as_json or not console().is_terminal:
            views = look_twice(source)
            if not out.wanted:
                console().print(_shown(views))
            out.write(views)
        else:
            _show(source, every)


def _drawn(view: TrainingView) -> Any:
    """Return a renderable of rich with progress, shards, workers and recent events."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from dps.observe.views import progress

    def moment(t: float) -> str:
        return datetime.fromtimestamp(t).strftime("%H:%M:%S")

    parts: list[Any] = [Text(f"{view.name}: {view.state}  ({moment(view.t)})", style="bold")]
    parts.append(progress(view))
    for views in (view.shards, view.workers):
        columns, rows = views.table()
        table = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for row in rows:
            table.add_row(*map(Text, row))
        parts.append(table)
    parts += [Text(f"{moment(t)}  {text}", style="yellow") for t, text in view.recent]
    return Group(*parts, Text())


def _shown(views: list[TrainingView]) -> Any:
    from rich.console import Group
    from rich.text import Text

    if not views:
        return Text("no training is running", style="dim")
    return Group(*map(_drawn, views))


def _show(source: Source, every: float) -> None:
    """Show views until Ctrl-C, or until what is shown has ended."""
    from rich.live import Live

    from flows.monitor.top import Ended

    terminal = console()
    views: list[TrainingView] = []
    try:
        with Live(console=terminal, screen=True, auto_refresh=False) as live:
            while True:
                views = source.look()
                live.update(_shown(views), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        raise typer.Exit from None
    except Ended as ended:
        if views:
            terminal.print(_shown(views))
        print(ended)


@contextmanager
def _source(
    training: str | None, ca_file: Path | None, cert: Path | None, key: Path | None
) -> Iterator[Source]:
    from dps.errors import ConfigurationError
    from flows.monitor.status import running
    from flows.monitor.top import SchedulerSource, source_of

    given = [str(path) for path in (ca_file, cert, key) if path is not None]
    if given and (ca_file is None or cert is None):
        raise ConfigurationError("--tls-ca-file and --tls-cert: expected both, or neither")
    if training is None or re.fullmatch(r"\w+://.+|[\w.\-\[\]:]+:\d+", training) is None:
        if given:
            raise ConfigurationError("--tls-…: only for the address of a scheduler, as tls://…")
        yield source_of(training or running(Path.cwd())[0].experiment, Path.cwd())
        return
    from dps.cluster.backends.existing import WITH_TLS, connected
    from flows.config.cluster import from_files

    security = from_files(*given) if given else None
    try:
        client = connected(training if "://" in training else f"tcp://{training}", security)
    except ConfigurationError as error:
        if given or not training.startswith(WITH_TLS):
            raise
        raise ConfigurationError(f"{error}. Here: --tls-ca-file FILE --tls-cert FILE") from error
    with client:
        yield SchedulerSource(client)
