"""The commands that run trials: `dps run` and `dps rerun`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from flows.cli.arguments import (
    RESULTS,
    Config,
    Seeds,
    Settings,
    Virtual,
    runs,
    warn_of_claims_left_out,
    with_options,
)
from flows.cli.console import AsJson, curves, document_of, exit_if_failed, json_output, store, warn
from flows.cli.console import console as _console

if TYPE_CHECKING:
    from flows.config.document import Document
    from flows.config.experiment import ExperimentConfig
    from flows.config.trials import Trial
    from flows.execution.experiment import Ran
    from flows.report.study import Study


def run(
    config: Config,
    settings: Settings = [],  # noqa: B006 (typer makes its own list)
    seeds: Seeds = None,
    virtual: Virtual = False,
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Number of trials at once; default: 1, or one per core on virtual time.",
        ),
    ] = None,
    retry_invalid: Annotated[
        bool,
        typer.Option("--retry-invalid", help="Rerun trials whose planned fault did not happen."),
    ] = False,
    no_resume: Annotated[
        bool,
        typer.Option(
            "--no-resume",
            help="Restart interrupted trials instead of resuming them from checkpoints.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the missing trials of an experiment, then compare its strategies."""
    from flows.config.experiment import find_document

    document = find_document(config)
    settings = with_options(document, settings, seeds, virtual)
    with json_output(as_json) as out:
        ran = run_missing(config, document, settings, parallel, retry_invalid, no_resume)
        if out.wanted:
            out.write(ran.document)
        else:
            from flows.report.terminal import print_study

            name = ran.experiment.experiment
            _console().print()
            print_study(ran.study, Path.cwd() / RESULTS / name, _console())
            print(f"\nReport: {ran.done.report}\n{curves(name, ran.done.tracked)}")
        exit_if_failed(ran.done.outcomes)


class Run(NamedTuple):
    """An experiment that was run, with its trials and results."""

    experiment: ExperimentConfig
    trials: Sequence[Trial]
    done: Ran

    @property
    def study(self) -> Study:
        """The results as its report has them."""
        from flows.report.study import Study

        return Study(self.done.outcomes, (), self.experiment.claims, self.experiment.comparison)

    @property
    def document(self) -> dict[str, Any]:
        """The results as JSON has them."""
        return {
            **document_of(self.experiment.experiment, self.study),
            "report": self.done.report,
            "tracked": self.done.tracked,
            "refused_by_tracking": self.done.refused,
        }


def run_missing(
    config: str,
    document: Document,
    settings: Sequence[str] = (),
    parallel: int | None = None,
    retry_invalid: bool = False,
    no_resume: bool = False,
) -> Run:
    """Run the missing trials of a configuration, and show their progress.

    Ctrl-C ends the command and prints the command line that resumes it, which contains `config`.
    """
    from flows.config.document import as_written
    from flows.config.trials import load_trials
    from flows.execution.drivers import Drivers
    from flows.execution.experiment import run_experiment
    from flows.execution.preflight import check_deployments, check_models
    from flows.monitor.progress import PlainView

    experiment, trials = load_trials(document, settings)
    warn_of_claims_left_out(document, settings, experiment)
    check_models(trials)
    at_once = check_deployments(trials, parallel, warn)
    if at_once > 1 and any(trial.config.cluster.shares_cores for trial in trials):
        warn(
            f"{at_once} trials at once disturb each other's timings: compare times and costs only "
            "between trials that ran alone"
        )
    words = ["dps", "run", config, *(f"--set={text}" for text in settings)]
    command = shlex.join(words + [f"--parallel={parallel}"] * bool(parallel))
    try:
        with Drivers(at_once) as drivers:
            done = run_experiment(
                experiment,
                Path.cwd(),
                PlainView(_console()),
                drivers,
                store(),
                trials=trials,
                retry_invalid=retry_invalid,
                resume=not no_resume,
                written=as_written(document, settings),
                command=command,
            )
    except KeyboardInterrupt:
        again = command + " --retry-invalid" * retry_invalid + " --no-resume" * no_resume
        print(
            f"dps: interrupted; records are kept. To run the missing trials: {again}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    return Run(experiment, trials, done)


def rerun(
    trial: Annotated[
        str,
        typer.Argument(
            metavar="TRIAL",
            help="Recorded trial, such as demo/chain.kill.seed-0, or its folder.",
            autocompletion=runs,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Repeat a recorded trial with its recorded faults, and show both results."""
    from flows.execution.rerun import rerun_of
    from flows.monitor.progress import PlainView
    from flows.report.compare import two_trials
    from flows.report.terminal import print_table

    again = rerun_of(trial, Path.cwd())
    with json_output(as_json) as out:
        console = _console()
        with PlainView(console) as view:
            before, after = again.run(view)
        names = before.identity.trial, after.identity.trial
        print_table(two_trials(names, before, after), console)
        out.write({"original": before.row(), "rerun": after.row()})
    exit_if_failed([after])
