"""Common part of all commands: printing, JSON output with `--json`, and error reports.

A JSON document is what a command has computed: dataclasses by their fields, tables by their rows.
docs/json.md names the keys.
"""

from __future__ import annotations

import gc
import io
import os
import pwd
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from flows.metrics.outcome import Outcome
    from flows.report.study import Study

WIDTH_OFF_TERMINAL = 120
# Allocated objects until a garbage collection: Python's 700 cost a sixth of the time of imports.
GARBAGE = 50_000
AsJson = Annotated[
    bool,
    typer.Option("--json", help="Write one JSON document to stdout; other output goes to stderr."),
]


def prepare_process() -> None:
    """Let every text be printed, and let a user be nameless, before libraries ask for either.

    Garbage is collected less often, which speeds up imports.
    """
    gc.set_threshold(GARBAGE, *gc.get_threshold()[1:])
    nowhere = None if sys.stdout and sys.stderr else open(os.devnull, "w")  # noqa: SIM115
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere  # of `>&-` there is none
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # as in a container that runs as any number: MLflow asks for a home on import
        from flows.files import NO_HOME

        os.environ.setdefault("HOME", NO_HOME)
        os.environ.setdefault("USER", f"uid-{os.getuid()}")


def console() -> Console:
    """Return where tables and progress go."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH_OFF_TERMINAL
    return Console(width=width, highlight=False)


def store() -> str | None:
    """Return the URI of the tracking store that the environment names, if it names one."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def curves(experiment: str, tracked: bool) -> str:
    """Return a line with the address of an experiment's runs, or the command that uploads them."""
    from dps.errors import StoreUnavailable
    from flows.tracking.tracker import tracked_experiments
    from flows.tracking.ui_server import TRAINING_VIEW, comparison_view, served_page

    if not tracked:
        return f"Curves in MLflow, when the tracking store is back: dps sync {experiment}"
    uri, where = store() or "", "dps ui"
    if uri.startswith(("http://", "https://")):
        try:
            view = comparison_view(tracked_experiments(uri)[experiment])
        except (StoreUnavailable, KeyError):  # since a moment ago, when it had them all
            view = TRAINING_VIEW
        where = served_page(view, uri)
    return f"Curves in MLflow: {where}"


def warn(text: str) -> None:
    """Print a warning."""
    from dps.core.credentials import masked

    print(f"dps: warning: {masked(text)}", file=sys.stderr)


def exit_if_failed(outcomes: Sequence[Outcome]) -> None:
    """Print the failed trials, and exit with code 1 if there are any."""
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        print(f"dps: {outcome.identity.trial} failed: {outcome.reason}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


class JsonOutput:
    """Takes the document of a command; without `--json`, the document is discarded."""

    def __init__(self, out: IO[str] | None) -> None:
        self._out = out

    @property
    def wanted(self) -> bool:
        """Whether a document is asked for."""
        return self._out is not None

    def write(self, document: Any) -> None:
        """Write the document: what JSON knows, dataclasses, DataFrames, paths, numbers of numpy.

        A number that is unknown or infinite becomes null.
        """
        from pydantic_core import to_json

        if self._out is not None:
            text = to_json(document, indent=2, inf_nan_mode="null", fallback=_plain).decode()
            print(text, file=self._out, flush=True)


@contextmanager
def json_output(wanted: bool) -> Iterator[JsonOutput]:
    """Yield the output for the document; if one is wanted, redirect stdout to stderr until the end.

    Child processes are redirected too, unless `sys.stdout` was replaced.
    """
    if not wanted:
        yield JsonOutput(None)
        return
    own = sys.stdout
    if own is not sys.__stdout__ or own is None:
        with redirect_stdout(sys.stderr):
            yield JsonOutput(own)
        return
    own.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            yield JsonOutput(out)
        finally:
            own.flush()
            os.dup2(out.fileno(), 1)


def document_of(experiment: str, study: Study) -> dict[str, Any]:
    """Return the records of an experiment, its claims and its comparison, as plain values."""
    from flows.report.tables import claims_frame, comparison_frame

    return {
        "experiment": experiment,
        "score": study.score.key,
        "trials": [outcome.row() for outcome in study.outcomes],
        "claims": claims_frame(study.judged),
        "comparison": comparison_frame(study.compared),
    }


def _plain(value: Any) -> Any:
    """Convert what JSON does not support: tables, and numbers and arrays of numpy."""
    if hasattr(value, "to_dict"):
        return value.astype(object).where(value.notna(), None).to_dict("records")
    return value.tolist() if hasattr(value, "tolist") else str(value)
