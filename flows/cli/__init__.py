"""The `dps` command: what each subcommand is called and takes, and how errors end it.

Only light modules are imported here and by the other modules of commands: MLflow, Dask, pydantic
and numpy take up to seconds, and `dps` brings in numpy, so each command imports what it needs.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from flows.cli import completion
from flows.cli.advise import app as _advice
from flows.cli.arguments import Config, Settings, Yes
from flows.cli.checks import app as checks
from flows.cli.console import console as _console
from flows.cli.console import curves as _curves
from flows.cli.console import exit_if_failed as _exit_if_failed
from flows.cli.console import prepare_process
from flows.cli.console import store as _store
from flows.cli.console import warn as _warn
from flows.cli.documents import AsJson
from flows.cli.documents import json_output as _json_output
from flows.cli.new import app as _new
from flows.cli.planning import plan
from flows.cli.replicate import app as _replicate
from flows.cli.results import Experiment
from flows.cli.results import app as _results
from flows.cli.runs import replay, resume, run
from flows.cli.top import app as _top
from flows.config.limits import LONGEST_WORD
from flows.quoting import quoted, screenful, shown

PRIVATE = 0o077  # what nobody but the user may do with a file that is made
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NO_RIGHT = (errno.EACCES, errno.EPERM, errno.EROFS)
# Objects between two collections of garbage: with Python's 700, looking through modules again and
# again while more are imported would take a third of a short command's time.
GARBAGE = 100_000

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Break a parameter server on purpose, and measure what each way to recover costs.",
)
for _command in (run, plan, resume, replay):
    app.command()(_command)
app.add_typer(_replicate, name="replicate")
app.add_typer(_new)
app.add_typer(_top)
app.add_typer(_advice)
app.add_typer(checks)
app.add_typer(_results)


class Widths(StrEnum):
    """How wide `dps report` makes the files of figures."""

    each = "each"
    single = "single"
    double = "double"


def main() -> None:
    """Run the command; an error that dps raises on purpose ends it with a message and code 2.

    Whatever it or a process that it starts writes is for the user alone to read, whatever the
    umask of the shell.
    """
    os.umask(PRIVATE)
    prepare_process()
    signal.signal(signal.SIGTERM, _interrupt)
    gc.set_threshold(GARBAGE, 10, 10)
    atexit.register(gc.freeze)  # what is left then ends with the process: nothing to be found in it
    try:
        _refuse_odd(sys.argv[1:])
        app(prog_name="dps")
    except Exception as error:
        message = _told(error)
        if message is None:
            raise
        for line in message.splitlines():
            print(f"dps: {line}", file=sys.stderr)
        sys.exit(2)


def _told(error: Exception) -> str | None:
    """Return the message of an error of dps or of an unwritable disk; None: a defect."""
    from dps.core.credentials import masked
    from dps.errors import DpsError

    if isinstance(error, DpsError):
        return screenful(masked(str(error)))
    if isinstance(error, OSError) and error.errno in (*NO_ROOM, *NO_RIGHT):
        where = f" for {masked(str(error.filename))}" if error.filename else ""
        advice = "Make room" if error.errno in NO_ROOM else "Change its permissions"
        return f"{error.strerror}{where}. {advice}, and run it again"
    return None


def _refuse_odd(words: Sequence[str]) -> None:
    """Refuse words of the command line that would fill the screen in whatever is said of them.

    Those of --set are judged by who reads them.
    """
    for before, word in pairwise(["", *words]):
        if before == "--set" or word.startswith("--set="):
            continue
        if len(word) > LONGEST_WORD or shown(word, LONGEST_WORD) != word:
            from dps.errors import ConfigurationError

            raise ConfigurationError(
                f"{quoted(word)}: expected {LONGEST_WORD:,} characters at most, and none that "
                "cannot be seen"
            )


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


@app.command()
def validate(
    config: Config,
    settings: Settings = [],  # noqa: B006 (typer makes its own list)
    profile: Annotated[
        str, typer.Option(help="What costs time on virtual nodes: a profile's name, or its file.")
    ] = "laptop",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment on real nodes and on virtual time, and show how far the two differ.

    What is recorded of either is not run again. The one on virtual time is NAME-virtual.
    """
    from flows.cli.validate import validate as compare_both
    from flows.config.experiment import find_document
    from flows.execution.plan import confirm_many

    document = find_document(config)
    confirm = None if yes else confirm_many
    try:
        with _json_output(as_json) as out:
            done = compare_both(
                document, settings, profile, _store(), _console(), _warn, confirm, out
            )
    except KeyboardInterrupt:
        print(
            "dps: interrupted; what was recorded is kept, and the same command goes on with the "
            "trials that are missing",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    _exit_if_failed(done)


@app.command()
def calibrate(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A configuration: its cluster is measured, and its gradients are; without, this "
            "machine.",
            autocompletion=completion.configurations,
        ),
    ] = None,
    settings: Settings = [],  # noqa: B006 (typer makes its own list)
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the profile.")
    ] = Path("calibrated.yaml"),
    folder: Annotated[
        str | None,
        typer.Option(help="Where the server's node writes; its temporary folder if not given."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what costs time on a cluster, and write it down as a profile for virtual time."""
    from flows.cli.calibrate import calibrate as measure

    with _json_output(as_json) as out:
        measure(config, settings, output, folder, _console(), _warn, out)


@app.command()
def status(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="One experiment; without, all that are recorded here.",
            autocompletion=completion.experiments,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the finished, running, waiting, missing and damaged trials of experiments.

    It reads their files only, so it may run on another host that sees them.
    """
    from flows.cli import documents
    from flows.monitor.status import show, statuses

    found = statuses(Path.cwd(), experiment)
    with _json_output(as_json) as out:
        if not out.wanted:
            show(found, _console())
        out.write(documents.status(found))


@app.command()
def report(
    experiment: Experiment,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the HTML file.")
    ] = None,
    figures: Annotated[
        Widths,
        typer.Option(
            help="How wide the files of figures are: one column of a page (3.3 inches), two (7), "
            "or for each what suits it."
        ),
    ] = Widths.each,
    latex: Annotated[
        Path | None,
        typer.Option(help="Also write the comparison tables as LaTeX, into this folder."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report, and each figure as SVG, PDF, PNG and CSV, from an experiment's records."""
    from flows.analysis.comparison import read_comparison
    from flows.analysis.finished import REPORT, experiment_folder, read_experiment
    from flows.analysis.prices import load_prices
    from flows.analysis.statistics.claims import read_claims
    from flows.report.figures.figure import Width
    from flows.report.html import FIGURES, write_report
    from flows.report.latex import write_latex

    widths: dict[Widths, Width | None] = {
        Widths.each: None,
        Widths.single: "single",
        Widths.double: "double",
    }
    folder, damaged = experiment_folder(experiment, Path.cwd()), list[str]()
    recorded = read_experiment(folder, load_prices(), damaged.append)
    path = write_report(
        folder,
        output or folder / REPORT,
        figures=folder / FIGURES,
        warn=_warn,
        recorded=recorded,
        left_out=damaged,
        width=widths[figures],
    )
    tables: list[Path] = []
    if latex is not None:
        begun = [each.outcome for each in recorded if each.record.started]
        claims = read_claims(folder)
        tables += write_latex(begun, read_comparison(folder), claims, latex)
    with _json_output(as_json) as out:
        print(*tables, path, sep="\n")
        files = {"report": path, "figures": folder / FIGURES, "tables": tables}
        out.write({"experiment": experiment, **files, "left_out": damaged})


@app.command()
def sync(
    experiments: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT",
            help="Experiments recorded here; all, if none is named.",
            autocompletion=completion.experiments,
        ),
    ] = [],  # noqa: B006 (typer makes its own list)
) -> None:
    """Enter into MLflow what is recorded here and not in it, as after an outage of its server."""
    from flows.cli.sync import sync as deliver

    for name in deliver(experiments, Path.cwd(), _store(), print, _warn):
        print(f"{name}: {_curves(name, True)}")


@app.command()
def ui(
    port: Annotated[int, typer.Option(help="The port on 127.0.0.1.")] = 5000,
) -> None:
    """Show every tracked run in the MLflow UI, to you alone on this machine, until Ctrl-C."""
    from flows.tracking.server import TRAINING_VIEW, child, page, trials_view, ui_command
    from flows.tracking.store import default_uri
    from flows.tracking.tracker import tracked_experiments

    token = secrets.token_urlsafe(24)  # which nobody can guess
    command, environment = ui_command(Path.cwd(), _store(), port, token)
    print(f"MLflow UI: {page(TRAINING_VIEW, port, token)} (Ctrl-C ends it)", flush=True)
    with child(command, environment) as process:
        for name, number in tracked_experiments(_store() or default_uri(Path.cwd())).items():
            print(f"Trials of {name}: {page(trials_view(number), port, token)}", flush=True)
        code = process.wait()
    raise typer.Exit(code)


@app.command()
def doctor(
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="Check the cluster of this configuration instead, by a small job that is run on "
            "it.",
            autocompletion=completion.configurations,
        ),
    ] = None,
    settings: Settings = [],  # noqa: B006 (typer makes its own list)
    limit: Annotated[
        float, typer.Option(min=1, help="Seconds within which nodes of the cluster must start.")
    ] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, cores, memory, data sets, results folder and store.

    With --cluster, for each that it names: do nodes start, with the same versions; do they share
    the folder of checkpoints, reach each other, and end?
    """
    from flows.cli import documents
    from flows.cli.doctor import as_table, examine, examine_cluster

    with _json_output(as_json) as out:
        if cluster is not None:
            findings = examine_cluster(cluster, settings, limit, Path.cwd(), _console(), _warn)
        else:
            findings = examine(Path.cwd(), _store())
            _console().print(as_table(findings))
        out.write(documents.doctor(findings))
    if not all(finding.good for finding in findings):
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
