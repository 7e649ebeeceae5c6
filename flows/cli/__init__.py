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
import shlex
import signal
import sys
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from flows.cli import completion
from flows.cli.advise import app as _advice
from flows.cli.checks import app as checks
from flows.cli.console import console as _console
from flows.cli.console import curves as _curves
from flows.cli.console import exit_if_failed as _exit_if_failed
from flows.cli.console import store as _store
from flows.cli.console import warn as _warn
from flows.cli.documents import AsJson
from flows.cli.documents import json_output as _json_output
from flows.cli.examples import app as _examples
from flows.cli.new import app as _new
from flows.cli.replicate import app as _replicate
from flows.cli.replicate import run_replication
from flows.cli.results import Experiment
from flows.cli.results import app as _results
from flows.cli.top import app as _top
from flows.config.limits import LONGEST_WORD
from flows.quoting import quoted, screenful, shown

if TYPE_CHECKING:
    from flows.cli.documents import JsonOutput
    from flows.config.experiment import ExperimentConfig
    from flows.config.yaml_document import Document

PRIVATE = 0o077  # what nobody but the user may do with a file that is made
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
# Objects between two collections of garbage: with Python's 700, looking through modules again and
# again while more are imported would take a third of a short command's time.
GARBAGE = 100_000

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Break a parameter server on purpose, and measure what each way to recover costs.",
)
app.add_typer(_replicate, name="replicate")
app.add_typer(_new)
app.add_typer(_top)
app.add_typer(_advice)
app.add_typer(checks)
app.add_typer(_examples)
app.add_typer(_results)

Config = Annotated[
    str,
    typer.Argument(
        help="A YAML file, or the name of a packaged one: demo, fashion, or of a replication, as "
        "replicate/ttf (an unknown name lists them all).",
        autocompletion=completion.configurations,
    ),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, as in training.updates=400."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask about a very large grid.")]


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
    """What is said of an error that dps raises on purpose, or of a full disk; None: a defect."""
    from dps.core.credentials import masked
    from dps.errors import DpsError

    if isinstance(error, DpsError):
        return screenful(masked(str(error)))
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        where = f" for {masked(str(error.filename))}" if error.filename else ""
        return f"{error.strerror}{where}. Make room, and run it again"
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
def run(
    config: Config,
    settings: Settings = [],  # noqa: B006 (typer makes its own list)
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Run so many trials at once; without: 1, or one for each core on virtual time.",
        ),
    ] = None,
    retry_invalid: Annotated[
        bool, typer.Option("--retry-invalid", help="Run again what did not go by its fault plan.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment: the trials that are not recorded yet, then compare all of them.

    A configuration of `replicate/` may be a whole replication, which ends with a paper's claims.
    """
    from dps.errors import ConfigurationError
    from flows.config.experiment import find_document
    from flows.replication.config import load_replication

    document = find_document(config)
    if (replication := load_replication(document, settings)) is not None:
        if (parallel or 1) > 1 or retry_invalid or as_json:
            raise ConfigurationError(
                "--parallel, --retry-invalid and --json: not for a replication, which compares "
                "times, tries nothing twice, and ends with a page; leave them out"
            )
        run_replication(replication)
    else:
        with _json_output(as_json) as out:
            _run_experiment(config, document, settings, parallel, retry_invalid, yes, out)


def _run_experiment(
    config: str,
    document: Document,
    settings: Sequence[str],
    parallel: int | None,
    retry_invalid: bool,
    yes: bool,
    out: JsonOutput,
) -> None:
    from numpy.random import default_rng

    from flows.analysis.comparison import compared
    from flows.analysis.finished import print_comparison
    from flows.analysis.statistics.claims import judge
    from flows.cli import documents
    from flows.config.trials import load_trials
    from flows.config.yaml_document import as_written
    from flows.execution.drivers import Drivers
    from flows.execution.experiment import run_experiment
    from flows.execution.plan import confirm_many
    from flows.execution.preflight import check_deployments, check_models
    from flows.monitor.progress import view_for
    from flows.report.claims import print_claims
    from flows.report.terminal import print_exploratory

    experiment, trials = load_trials(document, settings, None if yes else confirm_many)
    _tell_of_claims_left_out(document, settings, experiment)
    check_models(trials)
    at_once = check_deployments(trials, parallel, _warn)
    console = _console()
    if at_once > 1 and any(trial.config.cluster.shares_cores for trial in trials):
        print(
            f"dps: warning: {at_once} trials at once disturb each other's timings: compare times "
            "and costs only between trials that ran alone",
            file=sys.stderr,
        )
    try:
        with Drivers(at_once) as drivers:
            done = run_experiment(
                experiment,
                Path.cwd(),
                view_for(console),
                drivers,
                _store(),
                trials=trials,
                retry_invalid=retry_invalid,
                written=as_written(document, settings),
            )
    except KeyboardInterrupt:
        again = shlex.join(
            [
                *("dps", "run", config, *(w for text in settings for w in ("--set", text))),
                *(("--parallel", str(parallel)) if parallel else ()),
                *(("--yes",) if yes else ()),
                *(("--retry-invalid",) if retry_invalid else ()),
            ]
        )
        print(
            "dps: interrupted; what was recorded is kept. To go on with the trials that are "
            f"missing: {again}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    judged = judge(done.outcomes, experiment.claims, default_rng(0))
    rows = compared(done.outcomes, experiment.comparison, default_rng(0))
    if out.wanted:
        out.write(documents.run(experiment.experiment, done, judged, rows))
        _exit_if_failed(done.outcomes)
        return
    print_claims(judged, console)
    console.print()
    print_comparison(done.outcomes, console)
    print_exploratory(rows, console, done.outcomes[0].score)
    print(f"\nReport: {done.report}\n{_curves(experiment.experiment, done.tracked)}")
    _exit_if_failed(done.outcomes)


def _tell_of_claims_left_out(
    document: Document, settings: Sequence[str], experiment: ExperimentConfig
) -> None:
    """Say how many of the written claims are not of this grid, as --set has changed it."""
    if any(text.startswith("claims") for text in settings):
        return
    written = document.data.get("claims") or ()
    if (left_out := len(written) - len(experiment.claims)) > 0:
        _warn(
            f"{left_out} of the {len(written)} claims in {document.name} are left out: the grid, "
            "as --set has changed it, does not have what they compare"
        )


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
def resume(
    trial: Annotated[
        str,
        typer.Argument(
            help="A trial that was interrupted, as in demo/checkpoint.kill.seed-0, its folder, or "
            "the path of its checkpoints.",
            autocompletion=completion.trials,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Go on with a trial from its checkpoints alone, on this machine, and record it."""
    from flows.analysis.finished import print_comparison
    from flows.execution.attempt import failures
    from flows.execution.experiment import exclusive
    from flows.execution.resume import (
        checkpoints_of,
        keep_record,
        must_not_have_ended,
        saved_in,
        trial_folder,
        trial_of,
    )
    from flows.execution.single import run_alone
    from flows.monitor.progress import view_for
    from flows.records.record import FAILED_ATTEMPTS

    path = checkpoints_of(trial, Path.cwd())
    again = trial_of(saved_in(path), path)
    folder = trial_folder(again, path, Path.cwd())
    with _json_output(as_json) as out:
        console = _console()
        with exclusive(folder.parent), view_for(console) as view:
            must_not_have_ended(folder)
            keep_record(folder)
            circumstances = {FAILED_ATTEMPTS: len(failures(again, folder))}
            outcome = run_alone(again, folder, view, path, circumstances=circumstances)
        print_comparison((outcome,), console)
        out.write({"trial": outcome.row()})
    _exit_if_failed([outcome])


@app.command()
def replay(
    trial: Annotated[
        str,
        typer.Argument(
            help="A recorded trial, as in demo/chain.kill.seed-0, or its folder.",
            autocompletion=completion.trials,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Run a recorded trial again under the faults that it met, and show both outcomes."""
    from flows.analysis.finished import finished
    from flows.analysis.prices import load_prices
    from flows.execution.replay import replay_of
    from flows.execution.single import run_alone
    from flows.monitor.progress import view_for
    from flows.report.compare import figures_of_two

    again = replay_of(trial, Path.cwd())
    with _json_output(as_json) as out:
        console = _console()
        with view_for(console) as view:
            outcome = run_alone(again.trial, again.folder, view, plan=again.plan)
        original = finished(again.events_file, again.record, load_prices()).outcome
        names = original.identity.trial, outcome.identity.trial
        console.print(figures_of_two(names, original, outcome))
        out.write({"original": original.row(), "replay": outcome.row()})
    _exit_if_failed([outcome])


@app.command()
def plan(
    config: Config,
    settings: Settings = [],  # noqa: B006 (typer makes its own list)
    yes: Yes = False,
    job_script: Annotated[
        bool, typer.Option("--job-script", help="Show the job script of each group instead.")
    ] = False,
    pilot: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="What tells how much seeds differ: an experiment recorded here, a folder of "
            "records, or 'virtual', which runs a few seeds on virtual time; without, what is "
            "recorded of this one.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the trials of an experiment, what they need, and what its seeds can resolve.

    It runs nothing, but for a pilot on virtual time that is asked for.
    """
    from numpy.random import default_rng

    from dps.errors import ConfigurationError
    from flows.analysis.finished import RESULTS
    from flows.analysis.prices import load_prices
    from flows.analysis.statistics.claims import planned
    from flows.cli import documents
    from flows.config.experiment import find_document
    from flows.config.trials import in_blocks, load_trials
    from flows.execution.pilot import PROFILE, VIRTUAL, find_pilot, run_pilot
    from flows.execution.plan import (
        at_once_by_default,
        budgets_told,
        confirm_many,
        data_told,
        fault_plans,
        job_scripts,
        nodes_needed,
        order_told,
        plan_table,
        recorded_in,
        time_needed,
        warnings,
    )
    from flows.execution.preflight import check_models
    from flows.metrics.score import score_of
    from flows.monitor.estimate import trials_told
    from flows.monitor.progress import view_for
    from flows.report.claims import print_plan

    if job_script and as_json:
        raise ConfigurationError("--job-script and --json: scripts are no JSON; leave out one")
    document = find_document(config)
    experiment, expanded = load_trials(document, settings, None if yes else confirm_many)
    trials = in_blocks(experiment, expanded)
    if job_script:
        print(job_scripts(trials[0]))
        return
    models = check_models(trials)
    with _json_output(as_json) as out:
        console = _console()
        recorded, durations = recorded_in(Path.cwd() / RESULTS / experiment.experiment, trials)
        to_run = [trial for trial in trials if trial.name not in recorded]
        console.print(plan_table(trials, recorded))
        print(f"\n{trials_told(len(trials))}, {len(to_run)} to run. {nodes_needed(trials)}")
        print(order_told(experiment), time_needed(to_run, durations))
        for line in (*data_told(trials), *models, *budgets_told(trials), *fault_plans(trials)):
            print(line)
        objections = warnings(trials)
        for warning in objections:
            print(f"dps: warning: {warning}", file=sys.stderr)
        _tell_of_claims_left_out(document, settings, experiment)
        if pilot == VIRTUAL:
            view = view_for(console)
            outcomes = run_pilot(document, settings, experiment, Path.cwd(), view, _store())
            name = f"a pilot on virtual time (profile {PROFILE})"
        else:
            outcomes, name = find_pilot(pilot, experiment, Path.cwd(), load_prices(), _warn)
        print()
        seeds = len(experiment.seeds)
        score = score_of(trials[0].config.model_dump(mode="json"))
        resolved = planned(experiment.claims, seeds, outcomes, default_rng(0), score)
        print_plan(resolved, seeds, name, console)
        seconds = durations.total(to_run, at_once_by_default(to_run)) if to_run else 0.0
        out.write(
            documents.plan(experiment.experiment, trials, recorded, seconds, objections, resolved)
        )


@app.command()
def status(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="One experiment; without, all that run here.",
            autocompletion=completion.experiments,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how far experiments are that are running: what is done, running and waiting.

    It reads their files only, so it may run on another host that sees them.
    """
    from flows.cli import documents
    from flows.monitor.status import running, show

    found = running(Path.cwd(), experiment)
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
    public: Annotated[
        bool,
        typer.Option(
            "--public",
            help="Write a page for others: readable by everybody (mode 644), without paths, "
            "addresses and the names of hosts and users.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write the report, and each figure as SVG, PDF, PNG and CSV, from an experiment's records."""
    from flows.analysis.comparison import read_comparison
    from flows.analysis.finished import (
        PUBLIC_REPORT,
        REPORT,
        experiment_folder,
        read_experiment,
    )
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
        output or folder / (PUBLIC_REPORT if public else REPORT),
        figures=folder / FIGURES,
        warn=_warn,
        recorded=recorded,
        left_out=damaged,
        width=widths[figures],
        public=public,
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
