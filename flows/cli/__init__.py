"""The `dps` command: its subcommands, and how errors end them.

Only light modules are imported here and by the modules of commands: MLflow, Dask, pydantic and
numpy take up to seconds, and `dps` brings in numpy, so each command imports what it needs.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Annotated, NoReturn

import typer

from flows.cli.advise import advise
from flows.cli.calibrate import calibrate
from flows.cli.console import prepare_process
from flows.cli.doctor import doctor
from flows.cli.experiments import compare, export, list_experiments, plan, report, results, schema
from flows.cli.new import new
from flows.cli.runs import rerun, run
from flows.cli.top import status, top
from flows.cli.tracking import sync, ui

PRIVATE = 0o077  # umask: only the user may access new files
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Inject failures into a parameter server, and measure the cost of each recovery strategy.",
)
# The groups of the help, with their commands in the order in which a user meets them.
GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Experiments": (new, plan, run, results, compare, report, export, rerun, schema),
    "Trainings and clusters": (top, status, advise, doctor, calibrate),
    "MLflow": (ui, sync),
}
app.command(name="list", rich_help_panel="Experiments")(list_experiments)
for _group, _commands in GROUPS.items():
    for _command in _commands:
        app.command(rich_help_panel=_group)(_command)


def main() -> None:
    """Run the command; print the message of an expected error, and exit with code 2.

    Only the user may read files that it and its child processes write, regardless of the umask of
    the shell.
    """
    os.umask(PRIVATE)
    prepare_process()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        app(prog_name="dps")
    except Exception as error:
        message = _message_of(error)
        if message is None:
            raise
        for line in message.splitlines():
            print(f"dps: {line}", file=sys.stderr)
        sys.exit(2)
    finally:
        gc.freeze()  # otherwise the interpreter takes up to a second to take modules apart


def _message_of(error: Exception) -> str | None:
    """Return the message of an error of dps or of an unwritable disk; None: a defect."""
    from dps.core.credentials import masked
    from dps.errors import DpsError

    if isinstance(error, DpsError):
        return masked(str(error))
    if isinstance(error, OSError) and error.errno in (*NO_ROOM, *NO_RIGHT):
        where = f" for {masked(str(error.filename))}" if error.filename else ""
        advice = "Make room" if error.errno in NO_ROOM else "Change its permissions"
        return f"{error.strerror}{where}. {advice}, and run it again"
    return None


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """End by the same way as Ctrl-C, so that every process that was started is stopped."""
    raise KeyboardInterrupt


def _version(wanted: bool) -> None:
    if wanted:
        from dps import __version__

        print(f"dps {__version__}")
        raise typer.Exit


@app.callback()
def _dps(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass
