"""`dps new`: writes a commented configuration, of built-in data or of a user's file.

What is written is checked as `dps plan` checks it before there is a file, so it can be run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from flows.cli.console import AsJson, json_output

if TYPE_CHECKING:
    from flows.cli.data_file import DataFile

Task = Literal["classification", "regression"]
Recovery = Literal["none", "checkpoint", "chain", "stateless"]
FaultKind = Literal["none", "kill", "pause", "slow", "cut", "delay"]

WHAT_HAPPENS = {
    "none": "to be prepared for a loss, if nothing fails",
    "kill": "that a server is killed",
    "pause": "that a server is paused",
    "slow": "that a server gets slow",
    "cut": "that a server is cut off",
    "delay": "that a server is reached late",
}
WHAT_SCORES_ARE = {
    "accuracy": "the share of the rows that are right",
    "auc": "area under the ROC curve: 0.5 by chance, 1 at best",
    "rmse": "in the unit of the target: less is better",
}
TEXT = """\
# What does it cost {happens}? Recovery: {strategies}.
#
# Written by `dps new`; `dps schema` lists every key.
#
#   dps plan FILE     the trials, and what the seeds can resolve
#   dps run FILE      runs the missing trials; afterwards: dps report {name}

experiment: {name}

# The model and its data.
workload: {workload}
{dataset}
training:
  workers: 2
  updates: 800           # gradients of all workers together
  batch_size: {batch_size}
  compute_seconds: 0.01  # least time of a gradient: stands for a heavier model
optimizer: {{kind: sgd, learning_rate: {learning_rate}}}
consistency: {{kind: asp}}     # or bsp, or {{kind: ssp, tau: 4}}: who waits for whom
server: {{shards: 2, spares: 0}}
evaluation: {{every_seconds: 0.25{score}
time_limit: 80           # seconds after which a trial has failed

# Processes on this machine, fresh for each trial. Or virtual: simulated, fast, and the same each
# time; or slurm: a job for each node.
cluster: {{kind: local}}

# The comparison: every combination of the labels runs with every seed.
axes:
  recovery:
{recovery}\
{faults}\
seeds: {seeds}
"""
FAULTS = """\
  faults:  # {effect}
    # Drawn by each seed, so that no strategy is lucky with the moment. Or always after as much:
    # at_updates: 300, at_seconds: 2; or again and again: every: {{updates: 200, until: 800}}
    no fault: []           # the control: effects are differences to it, seed by seed
    {kind}: [{{kind: {kind}, target: server-0, at_updates: {{between: [240, 360]}}, {numbers}}}]
"""
CLAIMS = """
# The expected results, fixed before anything runs: at the end each claim holds, does not hold, or
# is not resolved. `smallest` is the smallest difference of interest.
claims:
"""


def new(
    name: Annotated[str, typer.Argument(help="Experiment name; the file is NAME.yaml.")],
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own data: csv, parquet, npz or svmlight."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Target column (with --data).")
    ] = None,
    task: Annotated[
        Task | None, typer.Option(help="Classes or numbers (with --data); default: by the target.")
    ] = None,
    recovery: Annotated[
        list[str],
        typer.Option(help=f"Strategy to compare, repeatable: {', '.join(get_args(Recovery))}."),
    ] = ["none", "checkpoint", "chain"],  # noqa: B006
    fault: Annotated[FaultKind, typer.Option(help="Fault of a server.")] = "kill",
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds per trial.")] = 5,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Another file than NAME.yaml.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented configuration for a question of your own, ready for dps plan and dps run.

    An existing file is never replaced.
    """
    from dps.errors import ConfigurationError
    from flows.config.document import parse_document
    from flows.config.errors import suggest
    from flows.config.trials import load_trials

    known = get_args(Recovery)
    for strategy in recovery:
        if strategy not in known:
            raise ConfigurationError(f"--recovery {strategy}: {suggest(strategy, known)}")
    path = output or Path(f"{name}.yaml")
    if not path.parent.is_dir():
        raise ConfigurationError(f"{path} cannot be written: no folder {path.parent} exists")
    own = None
    if data is not None:
        from flows.cli.data_file import data_file

        own = data_file(data, target, task, path.parent)
    elif target is not None or task is not None:
        raise ConfigurationError("--target and --task are for your own data: give --data as well")
    text = written(name, list(dict.fromkeys(recovery)), fault, seeds, own)
    document = parse_document(text, f"dps new {name}", path.parent)
    trials = len(load_trials(document)[1])
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigurationError(
            f"{path}: exists; nothing is replaced. Take another name"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror or error}") from error
    with json_output(as_json) as out:
        if own:
            print(own.text())
        print(f"{path}: {trials} trials. dps plan {path} shows them, dps run {path} runs them")
        dataset = {**own.section, "left_out": own.left_out, "metric": own.score} if own else None
        out.write({"experiment": name, "file": path, "trials": trials, "dataset": dataset})


def written(
    name: str,
    recovery: Sequence[str] = ("none", "checkpoint", "chain"),
    fault: str = "kill",
    seeds: int = 5,
    data: DataFile | None = None,
) -> str:
    """Return the configuration, with a comment on every choice."""
    workload = "{kind: mlp, hidden: [32]}  # or softmax"
    if data and data.data.regression:
        workload = "{kind: mlp, hidden: []}  # a linear model; hidden: [32] is a network"
    presets = {"checkpoint": "{preset: checkpoint, durability: {every: 100}}  # updates of a shard"}
    text = TEXT.format(
        happens=WHAT_HAPPENS[fault],
        strategies=", ".join(recovery),
        name=name,
        workload=workload,
        dataset=data.text() if data else "dataset: {kind: digits}",
        batch_size=min(32, len(data.data.y_train)) if data else 32,
        learning_rate=data.learning_rate if data else 0.1,
        score=f", metric: {data.score}}}  # {WHAT_SCORES_ARE[data.score]}" if data else "}",
        recovery="".join(f"    {each}: {presets.get(each, each)}\n" for each in recovery),
        faults="" if fault == "none" else _faults(fault),
        seeds=list(range(seeds)),
    )
    claims = _claims(recovery, fault, data)
    return text + CLAIMS + claims if claims else text


def _faults(kind: str) -> str:
    from dps.faults import KINDS

    cls = next(each for each in KINDS if each.kind == kind)
    numbers = [each for each in fields(cls) if isinstance(each.default, float)]
    return FAULTS.format(
        kind=kind,
        effect=(cls.__doc__ or "").partition("\n")[0],
        numbers=", ".join(f"{each.name}: {each.default:g}" for each in numbers),
    )


def _claims(recovery: Sequence[str], fault: str, data: DataFile | None) -> str:
    """Return the expected results; empty if nothing is compared."""
    base = "none" if "none" in recovery else recovery[0]
    regression = data is not None and data.data.regression
    unit = (data.target_deviation if data else None) or 1.0
    claims = []
    for name in (each for each in recovery if each != base):
        versus = f"strategy: {name}, against: {base}"
        if fault == "none":
            smallest = _rounded(0.02 * unit)
            claims.append(
                f"metric: accuracy_final, {versus}, direction: equivalent, smallest: {smallest}"
            )
            continue
        versus += f", condition: {fault}, direction"
        better, smallest = "less" if regression else "more", _rounded(0.01 * unit)
        claims.append(f"metric: effect_time_mean, {versus}: {better}, smallest: {smallest}")
        if (base, fault) == ("none", "kill"):
            claims.append(f"metric: updates_lost, {versus}: less, smallest: 1")
    return "".join(f"  - {{{claim}}}\n" for claim in claims)


def _rounded(number: float) -> str:
    return f"{float(f'{number:.1g}'):g}"
