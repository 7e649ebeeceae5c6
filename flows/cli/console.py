"""What commands share: the terminal, the tracking store, and how they tell what went wrong."""

from __future__ import annotations

import codecs
import io
import os
import pwd
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from flows.quoting import visible

if TYPE_CHECKING:
    from rich.console import Console

    from flows.analysis.outcome import Outcome

WIDTH_OFF_TERMINAL = 120
ASCII = dict(zip("−–—×·…“”’→≤≥", '---x*.""\'><>', strict=True))


def prepare_process() -> None:
    """Let every text be printed, and let a user be nameless, before libraries ask for either.

    What the encoding of a stream lacks is printed as ASCII of the same width: a minus as -, most
    others as ?.
    """
    codecs.register_error("dps.ascii", _as_ascii)
    nowhere = None if sys.stdout and sys.stderr else open(os.devnull, "w")  # noqa: SIM115
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere  # of `>&-` there is none
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="dps.ascii")
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:  # as in a container that runs as any number: MLflow asks for a home on import
        from flows.files import NO_HOME

        os.environ.setdefault("HOME", NO_HOME)
        os.environ.setdefault("USER", f"uid-{os.getuid()}")


def _as_ascii(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(ASCII.get(char, "?") for char in lacking), error.end


def console() -> Console:
    """Return where tables and progress go."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH_OFF_TERMINAL
    return Console(width=width, highlight=False)


def store() -> str | None:
    """Return the URI of the tracking store that the environment names, if it names one."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None


def curves(experiment: str, tracked: bool) -> str:
    """Say in a line where the runs of an experiment are, or how they get there."""
    if not tracked:
        return f"Every run, with its curves, when the tracking store is back: dps sync {experiment}"
    uri = store() or ""
    served = uri.startswith(("http://", "https://"))
    return f"Every run, with its curves: {_trials_of(experiment, uri) if served else 'dps ui'}"


def _trials_of(experiment: str, uri: str) -> str:
    """The page of a server that shows the trials of an experiment; else, the one of all."""
    from dps.errors import StoreUnavailable
    from flows.tracking.server import TRAINING_VIEW, served_page, trials_view
    from flows.tracking.tracker import tracked_experiments

    try:
        number = tracked_experiments(uri).get(experiment)
    except StoreUnavailable:  # since a moment ago, when it had them all
        number = None
    return served_page(TRAINING_VIEW if number is None else trials_view(number), uri)


def warn(text: str) -> None:
    """Tell of something that ends no command."""
    from dps.core.credentials import masked

    print(f"dps: warning: {visible(masked(text))}", file=sys.stderr)


def exit_if_failed(outcomes: Sequence[Outcome]) -> None:
    """Name those trials that failed, and end the command with 1 if there are any."""
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        failure = visible(f"{outcome.identity.trial} failed: {outcome.reason}")
        print(f"dps: {failure}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)
