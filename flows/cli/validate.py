"""The flow behind `dps validate`: both experiments, one after the other, and what they agree in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from flows.analysis.outcome import Outcome
    from flows.cli.documents import JsonOutput
    from flows.config.experiment import ExperimentConfig
    from flows.config.trials import Trial
    from flows.config.yaml_document import Document


def validate(
    document: Document,
    settings: Sequence[str],
    profile: str,
    store: str | None,
    console: Console,
    warn: Callable[[str], None],
    confirm: Callable[[int], None] | None,
    out: JsonOutput,
) -> list[Outcome]:
    """Run an experiment and its twin on virtual time, and show the table; return all outcomes.

    The twin is first: it takes seconds, and what is wrong with the settings is found there.

    Raises
    ------
    ConfigurationError
        The experiment is on virtual time already, or cannot be.
    """
    from numpy.random import default_rng

    from flows.cli import documents
    from flows.config.trials import load_trials
    from flows.execution.preflight import check_deployments, check_models
    from flows.verification.validate import agreement, crowded, table, twin, verdict

    both = None if confirm is None else lambda count: confirm(2 * count)
    experiment, trials = load_trials(document, settings, both)
    check_models(trials)
    other, twins = twin(document, settings, profile)
    check_models(trials)
    at_once = [check_deployments(each, None, warn) for each in (trials, twins)]
    virtual = _run(other, twins, at_once[1], store, console)
    real = _run(experiment, trials, at_once[0], store, console)
    found = agreement(real, virtual, experiment, default_rng(0))
    console.print()
    if found.pairs:
        console.print(table(found))
        console.print()
    said = [*verdict(found), *crowded(trials)]
    for line in said:
        console.print(line, highlight=False, markup=False)
    out.write(
        {
            "experiment": experiment.experiment,
            "virtual": other.experiment,
            **documents.agreement(found, said),
        }
    )
    return [*real, *virtual]


def _run(
    experiment: ExperimentConfig,
    trials: Sequence[Trial],
    at_once: int,
    store: str | None,
    console: Console,
) -> tuple[Outcome, ...]:
    from flows.execution.drivers import Drivers
    from flows.execution.experiment import run_experiment
    from flows.monitor.progress import view_for

    with Drivers(at_once) as drivers:
        ran = run_experiment(
            experiment, Path.cwd(), view_for(console), drivers, store, trials=trials
        )
    console.print(f"Report: {ran.report}", highlight=False, markup=False)
    return ran.outcomes
