"""The commands that run trials: `dps run`, `dps resume` and `dps replay`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import completion
from flows.cli.arguments import Config, Settings, Yes, tell_of_claims_left_out
from flows.cli.console import console as _console
from flows.cli.console import curves as _curves
from flows.cli.console import exit_if_failed as _exit_if_failed
from flows.cli.console import store as _store
from flows.cli.console import warn as _warn
from flows.cli.documents import AsJson
from flows.cli.documents import json_output as _json_output
from flows.cli.replicate import run_replication

if TYPE_CHECKING:
    from flows.cli.documents import JsonOutput
    from flows.config.yaml_document import Document


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
    no_resume: Annotated[
        bool,
        typer.Option(
            "--no-resume",
            help="Have a trial that was interrupted start again, never go on from checkpoints.",
        ),
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
            _run_experiment(
                config, document, settings, parallel, retry_invalid, no_resume, yes, out
            )


def _run_experiment(
    config: str,
    document: Document,
    settings: Sequence[str],
    parallel: int | None,
    retry_invalid: bool,
    no_resume: bool,
    yes: bool,
    out: JsonOutput,
) -> None:
    from numpy.random import default_rng

    from flows.analysis.comparison import compared
    from flows.analysis.finished import RESULTS, print_comparison, print_remedies
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
    tell_of_claims_left_out(document, settings, experiment)
    check_models(trials)
    at_once = check_deployments(trials, parallel, _warn)
    console = _console()
    if at_once > 1 and any(trial.config.cluster.shares_cores for trial in trials):
        print(
            f"dps: warning: {at_once} trials at once disturb each other's timings: compare times "
            "and costs only between trials that ran alone",
            file=sys.stderr,
        )
    command = _command(config, settings, parallel, yes)
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
                resume=not no_resume,
                written=as_written(document, settings),
                command=command,
            )
    except KeyboardInterrupt:
        again = command + " --retry-invalid" * retry_invalid + " --no-resume" * no_resume
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
    print_remedies(Path.cwd() / RESULTS / experiment.experiment, done.outcomes, console)
    print_exploratory(rows, console, done.outcomes[0].score)
    print(f"\nReport: {done.report}\n{_curves(experiment.experiment, done.tracked)}")
    _exit_if_failed(done.outcomes)


def _command(config: str, settings: Sequence[str], parallel: int | None, yes: bool) -> str:
    """The command line that runs an experiment, without options for one run."""
    return shlex.join(
        [
            *("dps", "run", config, *(w for text in settings for w in ("--set", text))),
            *(("--parallel", str(parallel)) if parallel else ()),
            *(("--yes",) if yes else ()),
        ]
    )


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
