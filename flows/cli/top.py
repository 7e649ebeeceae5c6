"""`dps top`: a view of trainings that run, in the terminal, like that of processes by htop."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import completion, documents
from flows.cli.console import console
from flows.cli.documents import AsJson, json_output

if TYPE_CHECKING:
    from flows.monitor.top import Picture, Source

_ADDRESS = re.compile(r"[\w.\-\[\]:]+:[0-9]+")  # of a host, without the protocol

app = typer.Typer()


@app.command()
def top(
    training: Annotated[
        str | None,
        typer.Argument(
            metavar="[ADDRESS|NAME|FOLDER]",
            help="The address of a Dask scheduler (tcp://10.0.0.1:8786, tls://…), whose groups are "
            "shown; or an experiment that runs here, by its name; or a folder of records. Without: "
            "the experiment that runs here.",
            autocompletion=completion.experiments,
        ),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture, as without a terminal.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.2, max=3600, help="Seconds from one picture to the next.")
    ] = 1.0,
    tls_ca_file: Annotated[
        Path | None, typer.Option(help="The certificates of the authority, as for dask scheduler.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Your certificate.")] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Its private key, unless that is in the same file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show trainings as they run: shards, workers, and what was lost lately. Ctrl-C ends it.

    It only reads, so it may be used beside any training.
    """
    from flows.monitor.top import look_twice, shown

    with (
        _source(training, tls_ca_file, tls_cert, tls_key) as source,
        json_output(as_json) as out,
    ):
        if once or as_json or not console().is_terminal:
            pictures = look_twice(source)
            if not out.wanted:
                console().print(shown(pictures))
            out.write(documents.top(pictures))
        else:
            _show(source, every)


def _show(source: Source, every: float) -> None:
    """Show pictures until Ctrl-C, or until what is shown has ended."""
    from rich.live import Live

    from flows.monitor.top import Ended, shown

    terminal = console()
    pictures: list[Picture] = []
    try:
        pictures = source.look()
        with Live(console=terminal, screen=True, auto_refresh=False) as live:
            while True:
                live.update(shown(pictures), refresh=True)
                time.sleep(every)
                pictures = source.look()
    except KeyboardInterrupt:
        raise typer.Exit from None
    except Ended as ended:
        if pictures:
            terminal.print(shown(pictures))
        terminal.print(str(ended), highlight=False, markup=False)


@contextmanager
def _source(
    training: str | None, ca_file: Path | None, cert: Path | None, key: Path | None
) -> Iterator[Source]:
    from dps.errors import ConfigurationError
    from flows.monitor.status import running
    from flows.monitor.top import SchedulerSource, source_of

    given = [str(path) for path in (ca_file, cert, key) if path is not None]
    if training is not None and "://" in training:
        if given and (ca_file is None or cert is None):
            raise ConfigurationError("--tls-ca-file and --tls-cert: expected both, or neither")
        from dps.cluster.backends.existing import WITH_TLS, connected
        from dps.cluster.backends.tls import from_files

        security = from_files(*given) if given else None
        try:
            client = connected(training, security)
        except ConfigurationError as error:
            if given or training.partition("://")[0] not in WITH_TLS:
                raise
            raise ConfigurationError(
                f"{error}. With dps top: --tls-ca-file FILE --tls-cert FILE"
            ) from error
        with client:
            yield SchedulerSource(client)
        return
    if given:
        raise ConfigurationError("--tls-…: only for the address of a scheduler, such as tls://…")
    try:
        source = source_of(training or running(Path.cwd())[0].experiment, Path.cwd())
    except ConfigurationError as error:
        if training is None or not _ADDRESS.fullmatch(training):
            raise
        raise ConfigurationError(
            f"{error}. A scheduler is shown by its whole address: dps top tcp://{training}"
        ) from error
    yield source
