"""`dps new`: writes a commented configuration for a question of one's own.

What is written is checked as `dps plan` checks it before there is a file, so whatever can be chosen
can be run. Data are those of dps, or a file of one's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from flows.cli.data_file import DataFile, Task, data_file, found_columns
from flows.cli.data_file import section as data_section
from flows.cli.data_file import told as data_told
from flows.cli.documents import AsJson, json_output

Workload = Literal["softmax", "mlp", "logistic", "linear", "rica"]
Dataset = Literal["digits", "fashion_mnist", "patches"]
Recovery = Literal["none", "checkpoint", "chain", "stateless"]
FaultKind = Literal["none", "kill", "pause", "slow", "cut", "delay"]
Role = Literal["server", "worker"]
When = Literal["drawn", "updates", "seconds", "repeated"]
Cluster = Literal["local", "virtual", "slurm"]

WORKLOADS: tuple[Workload, ...] = get_args(Workload)
DATASETS: tuple[Dataset, ...] = get_args(Dataset)
RECOVERIES: tuple[Recovery, ...] = get_args(Recovery)
FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)
ROLES: tuple[Role, ...] = get_args(Role)
MOMENTS: tuple[When, ...] = get_args(When)
CLUSTER_KINDS: tuple[Cluster, ...] = get_args(Cluster)

BATCH = 32
COMPUTE_SECONDS = 0.01  # of a gradient: stands for a heavier model
SUFFIX = ".yaml"
OWN = "For a model or a function of your own see docs/howto/own-data.md"
MOST_SEEDS = 1000

app = typer.Typer()


@dataclass(frozen=True, slots=True)
class Choices:
    """What the question is: what is trained, what happens to it, and what is compared."""

    workload: Workload = "mlp"
    dataset: Dataset | DataFile = "digits"
    recovery: tuple[Recovery, ...] = ("none", "checkpoint", "chain")
    fault: FaultKind = "kill"
    role: Role = "server"
    when: When = "drawn"
    updates: int = 800
    workers: int = 2
    seeds: int = 5
    cluster: Cluster = "local"
    claims: bool = True


@app.command()
def new(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Of the experiment; it is written to NAME.yaml.")],
    workload: Annotated[Workload | None, typer.Option(help="The model.")] = None,
    dataset: Annotated[Dataset | None, typer.Option(help="What it is trained on.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Your own data instead: csv, parquet, npz or svmlight."),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Of --data: what is to be predicted."),
    ] = None,
    task: Annotated[
        Task | None, typer.Option(help="Of --data: classes or numbers; by default, by the target.")
    ] = None,
    recovery: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join(RECOVERIES), help="A strategy to compare; may be given again."
        ),
    ] = None,
    fault: Annotated[FaultKind | None, typer.Option(help="What happens to a node.")] = None,
    role: Annotated[Role | None, typer.Option(help="To which kind of node.")] = None,
    when: Annotated[
        When | None,
        typer.Option(
            help="drawn: by each seed; updates, seconds: always then; repeated: again and again."
        ),
    ] = None,
    updates: Annotated[
        int | None, typer.Option(min=20, max=1_000_000, help="Gradients of a trial.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, max=256, help="How many.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=MOST_SEEDS, help="How often each trial is repeated.")
    ] = None,
    cluster: Annotated[Cluster | None, typer.Option(help="Where it runs.")] = None,
    claims: Annotated[
        bool | None,
        typer.Option("--claims/--no-claims", help="Say beforehand what is to be shown."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Another file than NAME.yaml.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented configuration for a question of your own, ready for dps plan and dps run.

    Without flags every choice is the default. A file that is there is never replaced.
    """
    path = output or Path(f"{name}{SUFFIX}")
    _must_be_free(path)
    own = _own_data(data, target, task, dataset, path.parent)
    given: dict[str, Any] = {
        "workload": workload or _usual(own),
        "dataset": own or dataset or ("patches" if workload == "rica" else None),
        "recovery": _strategies(recovery) if recovery else None,
        "fault": fault,
        "role": role,
        "when": when,
        "updates": updates,
        "workers": workers,
        "seeds": seeds,
        "cluster": cluster,
        "claims": claims,
    }
    chosen = {key: value for key, value in given.items() if value is not None}
    choices = Choices(**chosen)
    _must_fit(choices)
    text = written(name, choices)
    trials = _checked(name, text, path.parent)
    _create(path, text)
    with json_output(as_json) as out:
        if isinstance(choices.dataset, DataFile):
            print(*data_told(choices.dataset), sep="\n")
        print(f"{path}: {trials} trials. dps plan {path} shows them, dps run {path} runs them")
        if not chosen:
            print(f"All choices are defaults. Edit the file, or choose by {_flags(context)}")
        out.write(
            {"experiment": name, "file": path, "trials": trials, "choices": _document(choices)}
        )


def _flags(context: typer.Context) -> str:
    """List the flags that choose what is written."""
    others = ("name", "output", "as_json")
    return ", ".join(each.opts[0] for each in context.command.params if each.name not in others)


def _own_data(
    data: Path | None,
    target: str | None,
    task: Task | None,
    dataset: Dataset | None,
    folder: Path,
) -> DataFile | None:
    """Return what the flags say of data of one's own; None if nothing."""
    from dps.errors import ConfigurationError

    if data is None:
        flag = "--target" if target is not None else "--task"
        if target is not None or task is not None:
            raise ConfigurationError(f"{flag} is of data of your own: give --data FILE as well")
        return None
    if dataset is not None:
        raise ConfigurationError(f"--data and --dataset {dataset}: leave out one of them")
    return data_file(found_columns(data), target, task, folder)


def _usual(data: DataFile | None) -> str | None:
    """The model that is usual for data of one's own."""
    return None if data is None else data.models[0]


def _document(choices: Choices) -> dict[str, Any]:
    dataset = choices.dataset
    named = dataset.document() if isinstance(dataset, DataFile) else dataset
    return asdict(choices) | {"dataset": named}


def _strategies(names: Sequence[str]) -> tuple[Recovery, ...]:
    from dps.errors import ConfigurationError
    from flows.config.errors import suggest

    for name in names:
        if name not in RECOVERIES:
            raise ConfigurationError(f"--recovery {name}: {suggest(name, RECOVERIES)}")
    return tuple(strategy for strategy in RECOVERIES if strategy in names)


def fits(workload: Workload, dataset: Dataset | DataFile) -> bool:
    """Whether a model can be trained on these data.

    Of those of dps, rica on patches and nothing else on them; linear predicts numbers, which none
    of them has.
    """
    if isinstance(dataset, DataFile):
        return workload in dataset.models
    return workload != "linear" and (workload == "rica") == (dataset == "patches")


def written(name: str, choices: Choices) -> str:
    """Return the configuration, with a comment on every choice."""
    parts = [_head(name, choices), _training(choices), _axes(choices), _claims(choices)]
    return "\n".join(filter(None, parts))


# -- the text --------------------------------------------------------------------------------------


WHAT_FAULTS_DO = {
    "kill": ("back_after: 1.5", "SIGKILL; 1.5 s later a fresh node takes its place"),
    "pause": ("seconds: 2", "SIGSTOP for 2 s: long enough to be given up for lost"),
    "slow": ("seconds: 2, factor: 4", "computes at a quarter of its speed for 2 s"),
    "cut": ("seconds: 2", "nothing reaches it, and nothing of it gets out, for 2 s"),
    "delay": ("seconds: 2, delay_seconds: 0.05", "each of its messages is 50 ms late, for 2 s"),
}
WHAT_HAPPENS = {
    "none": "to be prepared for a loss, if nothing fails",
    "kill": "that a {} is killed",
    "pause": "that a {} is paused",
    "slow": "that a {} gets slow",
    "cut": "that a {} is cut off",
    "delay": "that a {} is reached late",
}
WHAT_WHEN_MEANS = {
    "drawn": "drawn by each seed, so that no strategy is lucky with the moment",
    "updates": "always at the same update",
    "seconds": "always so many seconds after the start",
    "repeated": "again and again, with random gaps of this mean",
}
WHAT_SCORES_ARE = {
    "accuracy": "the share of the rows that are right",
    "auc": "area under the ROC curve: 0.5 by chance, 1 at best",
    "rmse": "in the unit of the target: less is better",
}
CLUSTERS = {
    "local": "{kind: local}         # processes on this machine, fresh for each trial",
    "virtual": "{kind: virtual}       # simulated on virtual time: fast, and the same each time",
    "slurm": "{kind: slurm}         # a job for each node; queue, memory, …: docs/clusters.md",
}


def _head(name: str, choices: Choices) -> str:
    strategies = ", ".join(choices.recovery)
    happens = WHAT_HAPPENS[choices.fault].format(choices.role)
    return f"""\
# What does it cost {happens}? Recovery: {strategies}.
#
# Written by `dps new`; docs/experiments.md has every key.
#
#   dps plan FILE     the trials, and what the seeds can resolve
#   dps run FILE      runs what is not recorded yet; afterwards: dps report {name}

experiment: {name}
"""


def _training(choices: Choices) -> str:
    workload = {"mlp": "{kind: mlp, hidden: [32]}"}.get(
        choices.workload, f"{{kind: {choices.workload}}}"
    )
    own = choices.dataset if isinstance(choices.dataset, DataFile) else None
    rate = own.learning_rate if own else 0.01 if choices.workload == "rica" else 0.1
    return f"""\
# What is trained, and on what. {OWN}.
workload: {workload}
{data_section(own) if own else f"dataset: {{kind: {choices.dataset}}}"}
training:
  workers: {choices.workers}
  updates: {choices.updates}           # gradients in all, by all workers together
  batch_size: {own.batch_size if own else BATCH}
  compute_seconds: {COMPUTE_SECONDS}  # least time of a gradient: stands for a heavier model
optimizer: {{kind: sgd, learning_rate: {rate}}}
consistency: {{kind: asp}}     # or bsp, or {{kind: ssp, tau: 4}}: who waits for whom
server: {{shards: 2, spares: 0}}
evaluation: {_evaluation(own)}
time_limit: {_time_limit(choices)}           # seconds after which a trial has failed

# Where it runs.
cluster: {CLUSTERS[choices.cluster]}
"""


def _evaluation(own: DataFile | None) -> str:
    if own is None:
        return "{every_seconds: 0.25}"
    return f"{{every_seconds: 0.25, metric: {own.score}}}  # {WHAT_SCORES_ARE[own.score]}"


def _time_limit(choices: Choices) -> int:
    return max(60, round(20 * choices.updates * COMPUTE_SECONDS / choices.workers))


def _axes(choices: Choices) -> str:
    lines = [
        "# What is compared: every combination of the labels runs with every seed.",
        "axes:",
        "  recovery:",
        *(f"    {name}: {_strategy(name)}" for name in choices.recovery),
    ]
    if choices.fault != "none":
        how, meaning = WHAT_FAULTS_DO[choices.fault]
        fault = f"{{kind: {choices.fault}, target: {choices.role}-0, {_moment(choices)}, {how}}}"
        lines += [
            f"  faults:  # {meaning};",
            f"    # {WHAT_WHEN_MEANS[choices.when]}",
            "    no fault: []           # the control: effects are differences to it, seed by seed",
            f"    {choices.fault}: [{fault}]",
        ]
    seeds = ", ".join(map(str, range(choices.seeds)))
    return "\n".join([*lines, f"seeds: [{seeds}]", ""])


def _strategy(name: Recovery) -> str:
    if name == "checkpoint":
        return "{preset: checkpoint, durability: {every: 100}}  # updates of a shard"
    return name


def _moment(choices: Choices) -> str:
    updates = choices.updates
    if choices.when == "drawn":
        return f"at_updates: {{between: [{updates * 3 // 10}, {updates * 9 // 20}]}}"
    if choices.when == "updates":
        return f"at_updates: {updates * 3 // 8}"
    if choices.when == "seconds":
        return f"at_seconds: {max(0.1, round(updates * COMPUTE_SECONDS / choices.workers / 2, 1))}"
    return f"every: {{updates: {updates // 4}, until: {updates}}}"


def _claims(choices: Choices) -> str:
    """What is to be shown, fixed before anything runs; nothing if there is nothing to compare."""
    first = choices.recovery[0]
    base = "none" if "none" in choices.recovery else first
    others = [name for name in choices.recovery if name != base]
    condition = "" if choices.fault == "none" else f"    condition: {choices.fault}\n"
    final, better, unit = _scored(choices.dataset)
    little, much = _rounded(0.01 * unit), _rounded(0.02 * unit)
    told: list[str] = []
    for name in others:
        if not condition:
            told.append(_claim(name, base, condition, final, "equivalent", much))
            continue
        told.append(_claim(name, base, condition, "effect_time_mean", better, little))
        if base == "none" and (choices.fault, choices.role) == ("kill", "server"):
            told.append(_claim(name, base, condition, "updates_lost", "less", "1"))
    if not others and condition:
        told.append(_claim(first, "none-given", condition, "effect_time_mean", "equivalent", much))
    if not choices.claims or not told:
        return ""
    return "\n".join(
        [
            "# What is to be shown, fixed before anything runs: at the end each claim holds, does",
            "# not hold or is not resolved. Say what you expect, and how much would matter",
            "# (`smallest`).",
            "claims:",
            *told,
            "",
        ]
    )


def _scored(dataset: Dataset | DataFile) -> tuple[str, str, float]:
    """The figure of the last score, which way it is better, and what 1 is of it."""
    if isinstance(dataset, DataFile) and dataset.task == "regression":
        return "rmse_final", "less", dataset.deviation
    return "accuracy_final", "more", 1.0


def _rounded(number: float) -> str:
    return f"{float(f'{number:.1g}'):g}"


def _claim(
    strategy: str, against: str, condition: str, metric: str, direction: str, smallest: str
) -> str:
    return (
        f"  - metric: {metric}\n"
        f"    strategy: {strategy}\n"
        f"    against: {against}\n"
        f"{condition}"
        f"    direction: {direction}\n"
        f"    smallest: {smallest}"
    )


# -- the file --------------------------------------------------------------------------------------


def _must_be_free(path: Path) -> None:
    from dps.errors import ConfigurationError

    if not path.parent.is_dir():
        raise ConfigurationError(f"{path}: cannot be written: there is no folder {path.parent}")
    if os.path.lexists(path):
        raise ConfigurationError(
            f"{path}: is there already; nothing is replaced. Take another name"
        )


def _must_fit(choices: Choices) -> None:
    from dps.errors import ConfigurationError

    model, dataset = choices.workload, choices.dataset
    if fits(model, dataset):
        return
    if isinstance(dataset, DataFile):
        raise ConfigurationError(
            f"--workload {model}: for {dataset.told} expected {' or '.join(dataset.models)}"
        )
    wanted = [each for each in DATASETS if fits(model, each)]
    if not wanted:
        raise ConfigurationError(f"--workload {model} predicts numbers; give them with --data FILE")
    raise ConfigurationError(
        f"--workload {model}: expected --dataset {' or '.join(wanted)}, got {dataset}"
    )


def _checked(name: str, text: str, folder: Path) -> int:
    """Check what is to be written into a folder, and return how many trials it has.

    Raises
    ------
    ConfigurationError
        It cannot work.
    """
    from flows.config.trials import load_trials
    from flows.config.yaml_document import parse_document

    document = parse_document(text.encode(), f"dps new {name}")
    return len(load_trials(replace(document, folder=folder))[1])


def _create(path: Path, text: str) -> None:
    from dps.errors import ConfigurationError

    try:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink()
                raise
    except FileExistsError:
        _must_be_free(path)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror or error}") from error
