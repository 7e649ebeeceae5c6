"""The command `dps plan`: the trials of an experiment, their needs, what its seeds can resolve."""

from __future__ import annotations

import sys
from collections.abc import Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import documents
from flows.cli.arguments import Config, Settings, Yes, tell_of_claims_left_out
from flows.cli.console import console as _console
from flows.cli.console import store as _store
from flows.cli.console import warn as _warn
from flows.cli.documents import AsJson
from flows.cli.documents import json_output as _json_output

if TYPE_CHECKING:
    from flows.analysis.statistics.claims import PlannedClaim
    from flows.config.experiment import ExperimentConfig
    from flows.config.trials import Trial
    from flows.config.yaml_document import Document
    from flows.metrics.score import Score


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
    from dps.errors import ConfigurationError
    from flows.config.experiment import find_document
    from flows.config.trials import in_blocks, load_trials
    from flows.execution.plan import confirm_many, job_scripts
    from flows.execution.preflight import check_models
    from flows.metrics.score import score_of

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
        grid = _show_grid(experiment, trials, models)
        tell_of_claims_left_out(document, settings, experiment)
        score = score_of(trials[0].config.model_dump(mode="json"))
        resolved = _show_resolution(document, settings, experiment, trials, pilot, score)
        if out.wanted:
            out.write(documents.plan(experiment.experiment, trials, *grid, resolved))


def _show_grid(
    experiment: ExperimentConfig, trials: Sequence[Trial], models: Sequence[str]
) -> tuple[Container[str], float, Sequence[str]]:
    """Show the trials and what they need; return which are recorded, the time, and objections."""
    from flows.analysis.finished import RESULTS
    from flows.execution.plan import (
        BULK,
        at_once_by_default,
        budgets_told,
        claims_without_faults,
        data_told,
        fault_plans,
        nodes_needed,
        order_told,
        plan_table,
        recorded_in,
        time_needed,
        warnings,
    )
    from flows.monitor.estimate import Durations, trials_told

    folder, durations = Path.cwd() / RESULTS / experiment.experiment, Durations()
    recorded = {name for name, _ in recorded_in(folder, trials, durations, BULK)}
    to_run = [trial for trial in trials if trial.name not in recorded]
    _console().print(plan_table(trials, recorded))
    print(f"\n{trials_told(len(trials))}, {len(to_run)} to run. {nodes_needed(trials)}")
    print(order_told(experiment), time_needed(to_run, durations))
    for line in (*data_told(trials), *models, *budgets_told(trials), *fault_plans(trials)):
        print(line)
    objections = [*warnings(trials), *claims_without_faults(experiment, trials)]
    for objection in objections:
        print(f"dps: warning: {objection}", file=sys.stderr)
    seconds = durations.total(to_run, at_once_by_default(to_run)) if to_run else 0.0
    return recorded, seconds, objections


def _show_resolution(
    document: Document,
    settings: Sequence[str],
    experiment: ExperimentConfig,
    trials: Sequence[Trial],
    pilot: str | None,
    score: Score,
) -> tuple[PlannedClaim, ...]:
    """Show what the claims can find with the seeds of the experiment, going by a pilot."""
    from numpy.random import default_rng

    from flows.analysis.prices import load_prices
    from flows.analysis.statistics.claims import planned
    from flows.execution.pilot import VIRTUAL, find_pilot, run_pilot
    from flows.monitor.progress import view_for
    from flows.report.claims import print_plan

    console = _console()
    if pilot == VIRTUAL:
        view = view_for(console)
        outcomes, name = run_pilot(document, settings, experiment, Path.cwd(), view, _store())
    else:
        outcomes, name = find_pilot(pilot, experiment, trials, Path.cwd(), load_prices(), _warn)
    print()
    resolved = planned(experiment.claims, len(experiment.seeds), outcomes, default_rng(0), score)
    print_plan(resolved, len(experiment.seeds), name, console)
    return resolved
