"""`dps new`: write a commented configuration, for built-in data or a user's file.

The text is checked as by `dps plan` before the file is written.
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

QUESTIONS = {
    "none": "the cost of each recovery strategy without faults",
    "kill": "the cost of a killed server",
    "pause": "the cost of a paused server",
    "slow": "the cost of a slow server",
    "cut": "the cost of a server that the network cuts off",
    "delay": "the cost of delayed messages to a server",
}
SCORES = {
    "accuracy": "share of rows that are predicted correctly",
    "auc": "area under the ROC curve: 0.5 by chance, 1 at best",
    "rmse": "in the unit of the target; lower is better",
}
TEXT = """\
# Measure {question}. Recovery: {strategies}.
#
# Written by `dps new`; `dps schema` lists every key.
#
#   dps plan FILE     lists the trials, and the power of the claims
#   dps run FILE      runs the missing trials; then: dps report {name}

experiment: {name}

# Model and data.
workload: {workload}
{dataset}
training:
  workers: 2
  updates: 800           # gradients of all workers, in total
  batch_size: {batch_size}
  compute_seconds: 0.01  # minimum seconds per gradient, to imitate a larger model
optimizer: {{kind: sgd, learning_rate: {learning_rate}}}
consistency: {{kind: asp}}     # or bsp, or {{kind: ssp, tau: 4}}
server: {{shards: 2, spares: 0}}
evaluation: {{every_seconds: 0.25{score}
time_limit: 80           # seconds until a trial fails

# local: fresh processes on this machine for each trial; virtual: simulated, fast and repeatable;
# slurm: one job per node.
cluster: {{kind: local}}

# Every combination of labels runs with every seed.
axes:
  recovery:
{recovery}\
{faults}\
seeds: {seeds}
"""
FAULTS = """\
  faults:  # {effect}
    # At a random moment (per seed), the same for all strategies. Or at a fixed one:
    # at_updates: 300, at_seconds: 2. Or repeatedly: every: {{updates: 200, until: 800}}
    no fault: []           # control: effects are differences from it, per seed
    {kind}: [{{kind: {kind}, target: server-0, at_updates: {{between: [240, 360]}}, {numbers}}}]
"""
CLAIMS = """
# Expected results, fixed before the experiment runs. Each claim holds, does not hold, or is not
# resolved. `smallest` is the smallest difference of interest.
claims:
"""


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Experiment name; writes NAME.yaml.")],
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your data file: csv, parquet, npz or svmlight."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Target column (with --data).")
    ] = None,
    task: Annotated[
        Task | None, typer.Option(help="Task (with --data); default: guessed from the target.")
    ] = None,
    recovery: Annotated[
        list[str],
        typer.Option(help=f"Strategy to compare, repeatable: {', '.join(get_args(Recovery))}."),
    ] = ["none", "checkpoint", "chain"],  # noqa: B006
    fault: Annotated[FaultKind, typer.Option(help="Fault that hits a server.")] = "kill",
    # A claim about counts, such as lost updates, takes at least 8 seeds.
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Number of seeds.")] = 8,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default: NAME.yaml.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented configuration for your own question, ready for dps plan and dps run.

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
        raise ConfigurationError("--target and --task need --data")
    text = written(name, list(dict.fromkeys(recovery)), fault, seeds, own)
    document = parse_document(text, f"dps new {name}", path.parent)
    trials = len(load_trials(document)[1])
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise ConfigurationError(
            f"{path}: exists, and is not replaced. Choose another name"
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
    seeds: int = 8,
    data: DataFile | None = None,
) -> str:
    """Return the configuration, with a comment on every choice."""
    workload = "{kind: mlp, hidden: [32]}  # or softmax"
    if data and data.data.regression:
        workload = "{kind: mlp, hidden: []}  # a linear model; hidden: [32] is a network"
    presets = {"checkpoint": "{preset: checkpoint, durability: {every: 100}}  # updates per shard"}
    text = TEXT.format(
        question=QUESTIONS[fault],
        strategies=", ".join(recovery),
        name=name,
        workload=workload,
        dataset=data.text() if data else "dataset: {kind: digits}",
        batch_size=min(32, len(data.data.y_train)) if data else 32,
        learning_rate=data.learning_rate if data else 0.1,
        score=f", metric: {data.score}}}  # {SCORES[data.score]}" if data else "}",
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
    """Return the claims as YAML; "" without a comparison."""
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
