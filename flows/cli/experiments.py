"""The commands that run nothing: list, plan, schema, results, compare, report and export."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.arguments import (
    RESULTS,
    Config,
    Experiment,
    Seeds,
    Settings,
    Virtual,
    experiments,
    runs,
    warn_of_claims_left_out,
    with_options,
)
from flows.cli.console import AsJson, console, document_of, json_output, warn
from flows.configs import packaged_names, question_of

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from flows.config.experiment import ExperimentConfig
    from flows.config.trials import Trial
    from flows.report.study import Study

TITLES = {
    "": "Experiments, by `dps run NAME`",
    "replicate": "Replications of published papers",
    "studies": "Studies behind the documentation",
}
TableForm = StrEnum("TableForm", ["csv", "latex"])
FigureForm = StrEnum("FigureForm", ["svg", "pdf", "png"])


def list_experiments(as_json: AsJson = False) -> None:
    """List the packaged experiments, and those that are recorded in this directory."""
    from rich.table import Table

    packaged = [{"name": name, "question": question_of(name)} for name in packaged_names()]
    recorded = experiments("")
    with json_output(as_json) as out:
        for group in dict.fromkeys(each["name"].rpartition("/")[0] for each in packaged):
            table = Table(
                title=TITLES.get(group, group), title_justify="left", box=None, show_header=False
            )
            table.add_column(no_wrap=True)
            table.add_column()
            for each in packaged:
                if each["name"].rpartition("/")[0] == group:
                    table.add_row(each["name"], each["question"])
            console().print(table, "")
        print(f"Recorded in {Path(RESULTS).resolve()}:\n  {', '.join(recorded) or 'nothing'}")
        out.write({"packaged": packaged, "recorded": recorded})


def plan(
    config: Config,
    settings: Settings = [],  # noqa: B006 (typer makes its own list)
    seeds: Seeds = None,
    virtual: Virtual = False,
    job_script: Annotated[
        bool,
        typer.Option("--job-script", help="Print the job script of each group of nodes instead."),
    ] = False,
    pilot: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Recorded experiment, or folder of records, from which to estimate the variance "
            "between seeds, such as this experiment run with --virtual; default: this experiment.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the trials of an experiment, their nodes and time, and the power of its claims."""
    from numpy.random import default_rng

    from dps.errors import ConfigurationError
    from flows.config.experiment import find_document
    from flows.config.trials import in_blocks, load_trials
    from flows.execution.plan import find_pilot, job_scripts
    from flows.execution.preflight import check_models
    from flows.metrics.prices import load_prices
    from flows.metrics.score import score_of
    from flows.report.terminal import print_plan
    from flows.statistics.claims import planned

    if job_script and as_json:
        raise ConfigurationError("--job-script and --json: scripts are no JSON; leave out one")
    document = find_document(config)
    settings = with_options(document, settings, seeds, virtual)
    experiment, expanded = load_trials(document, settings)
    trials = in_blocks(experiment, expanded)
    if job_script:
        print(job_scripts(trials[0]))
        return
    models = check_models(trials)
    with json_output(as_json) as out:
        recorded, grid = _show_grid(experiment, trials, models)
        warn_of_claims_left_out(document, settings, experiment)
        outcomes, name = find_pilot(pilot, experiment, trials, Path.cwd(), load_prices(), warn)
        score, count = score_of(trials[0].config.model_dump(mode="json")), len(experiment.seeds)
        resolved = planned(experiment.claims, count, outcomes, default_rng(0), score)
        print()
        print_plan(resolved, count, name, console())
        if out.wanted:
            out.write(
                {
                    "experiment": experiment.experiment,
                    "trials": [_planned(trial, trial.name in recorded) for trial in trials],
                    **grid,
                    "claims": resolved,
                }
            )


def _show_grid(
    experiment: ExperimentConfig, trials: Sequence[Trial], models: Sequence[str]
) -> tuple[Container[str], dict[str, Any]]:
    """Show the trials and what they need; return which are recorded, the time, and warnings."""
    from flows.execution import plan
    from flows.execution.preflight import at_once_by_default, recorded_in
    from flows.monitor.estimate import Durations, trials_text

    folder, durations = Path.cwd() / RESULTS / experiment.experiment, Durations()
    recorded = {name for name, _ in recorded_in(folder, trials, durations, plan.BULK)}
    to_run = [trial for trial in trials if trial.name not in recorded]
    console().print(plan.plan_table(trials, recorded))
    needed = plan.nodes_needed(trials)
    print(f"\n{trials_text(len(trials))}, {len(to_run)} to run. {needed}")
    print(plan.time_needed(to_run, durations))
    told = (*plan.queue_needs(to_run, durations), *plan.data_lines(trials), *models)
    for line in (*told, *plan.fault_plans(trials)):
        print(line)
    warnings = plan.warnings(trials)
    for text in warnings:
        print(f"dps: warning: {text}", file=sys.stderr)
    seconds = durations.total(to_run, at_once_by_default(to_run)) if to_run else 0.0
    return recorded, {"seconds": seconds, "warnings": warnings}


def _planned(trial: Trial, recorded: bool) -> dict[str, Any]:
    from flows.execution.plan import numbered

    return {
        "trial": trial.name,
        "labels": trial.labels,
        "seed": trial.seed,
        "digest": trial.digest,
        "nodes": trial.config.node_names,
        "faults": numbered(trial.config.fault_plan),
        "recorded": recorded,
    }


def schema() -> None:
    """Print the JSON schema of configurations, with which editors complete and check YAML.

    Write it beside your file (dps schema > schema.json), and name it in the file's first line: #
    yaml-language-server: $schema=schema.json
    """
    import json

    from flows.config.experiment import schema as of_experiments

    print(json.dumps(of_experiments(), indent=1))


def _study(experiment: str) -> tuple[Path, Study]:
    from flows.metrics.prices import load_prices
    from flows.report.html import open_study
    from flows.statistics.finished import experiment_folder

    folder = experiment_folder(experiment, Path.cwd())
    study, unusable = open_study(folder, load_prices())
    for text in unusable:
        warn(text)
    return folder, study


def results(experiment: Experiment, as_json: AsJson = False) -> None:
    """Print the claims, trials and comparison of a recorded experiment."""
    from flows.report.terminal import print_results

    folder, study = _study(experiment)
    with json_output(as_json) as out:
        if out.wanted:
            out.write(document_of(experiment, study))
        else:
            print_results(study, folder, console())


def compare(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Experiments or trials: demo, demo/chain, demo/chain.kill, "
            "demo/chain.kill.seed-0; in another directory, their path: ../before/results/demo. "
            "The others are compared with the first.",
            autocompletion=runs,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Compare recorded runs: settings and versions that differ, then metrics."""
    from flows.metrics.prices import load_prices
    from flows.report.compare import check_comparable, document, find_run, print_side_by_side

    prices = load_prices()
    found = [find_run(name, Path.cwd(), prices, warn) for name in names]
    check_comparable(found)
    with json_output(as_json) as out:
        if out.wanted:
            out.write(document(found))
        else:
            print_side_by_side(found, console())


def report(
    experiment: Experiment,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The HTML file; default: in the folder of records."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the report of a recorded experiment: one self-contained HTML file."""
    from flows.report.html import write_report
    from flows.statistics.finished import REPORT, experiment_folder

    folder, left_out = experiment_folder(experiment, Path.cwd()), list[str]()
    path = write_report(folder, output or folder / REPORT, warn=left_out.append)
    for text in left_out:
        warn(text)
    with json_output(as_json) as out:
        print(path)
        out.write({"experiment": experiment, "report": path, "left_out": left_out})


def export(
    experiment: Experiment,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The folder; default: EXPERIMENT-export."),
    ] = None,
    tables: Annotated[
        list[TableForm], typer.Option("--table", "-t", help="Format of tables; repeatable.")
    ] = [TableForm.csv],  # noqa: B006 (typer makes its own list)
    figures: Annotated[
        list[FigureForm], typer.Option("--figure", "-f", help="Format of figures; repeatable.")
    ] = [FigureForm.svg],  # noqa: B006
) -> None:
    """Write tables and figures of a recorded experiment as files, with the data of each figure.

    CSV tables contain plain numbers, LaTeX tables those of the report.
    """
    from flows.report.export import export as write

    _, study = _study(experiment)
    folder = output or Path(f"{experiment}-export")
    written = write(study, folder, tables, figures)
    print(f"{len(written)} files in {folder}")
