"""The expansion of an experiment into trials: their names, labels, digests and order.

Trials run in randomised complete blocks, one for each seed, so that changes of the machine's speed
(heat, other jobs) affect all combinations alike.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dps.errors import ConfigurationError
from flows.config.document import Document
from flows.config.experiment import ExperimentConfig, TrialConfig, read_experiment
from flows.config.own_data import OwnDataSection
from flows.config.workload import PythonSection
from flows.quoting import quoted

LONGEST_PART = 48
DIGEST_LENGTH = 12


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a training under one configuration and seed.

    Attributes
    ----------
    name
        Readable, unique in its experiment, and a safe name for a folder.
    labels
        For each axis of the experiment, the label of this trial's value.
    digest
        Of the resolved configuration: equal digests mean that the same thing is measured.
    """

    name: str
    experiment: str
    labels: dict[str, str]
    seed: int
    config: TrialConfig
    digest: str


def load_trials(
    source: str | Document, overrides: Sequence[str] = ()
) -> tuple[ExperimentConfig, tuple[Trial, ...]]:
    """Read an experiment and its trials (see `flows.config.experiment.read_experiment`)."""
    experiment = read_experiment(source, overrides)
    return experiment, expand(experiment)


def expand(experiment: ExperimentConfig) -> tuple[Trial, ...]:
    """Return the trials of an experiment: every combination of the axes with every seed.

    Raises `ConfigurationError` if values on the axes are incompatible, or two labels differ only in
    punctuation.
    """
    trials = tuple(
        Trial(
            name=trial_name(labels, config.seed),
            experiment=experiment.experiment,
            labels=labels,
            seed=config.seed,
            config=config,
            digest=digest(config),
        )
        for labels, config in experiment.trial_configs()
    )
    for name, count in Counter(trial.name for trial in trials).items():
        if count > 1:
            raise ConfigurationError(
                f"{count} trials would be named {quoted(name)}; choose labels on the axes whose "
                f"letters or digits differ within the first {LONGEST_PART}"
            )
    return trials


def in_blocks(experiment: ExperimentConfig, trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return trials in the order in which they run.

    All trials of a seed run consecutively, in an order drawn from `order_seed` for each seed.
    """
    block = {seed: number for number, seed in enumerate(experiment.seeds)}
    lot = experiment.order_seed
    return tuple(sorted(trials, key=lambda trial: (block[trial.seed], _lot(trial.name, lot))))


def _lot(name: str, order_seed: int) -> bytes:
    # By a hash and not by shuffling: trials that are added later leave the others in their order.
    return hashlib.sha256(f"{order_seed}/{name}".encode()).digest()


def trial_name(labels: Mapping[str, str], seed: int) -> str:
    """Return a readable folder name such as "chain.kill.seed-0"."""
    parts = [_part(axis, label) for axis, label in labels.items()]
    return ".".join([*parts, f"seed-{seed}"])


def digest(config: TrialConfig) -> str:
    """Return a short SHA-256 of the resolved settings on which a trial's results depend."""
    text = json.dumps(decisive_settings(config), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def decisive_settings(config: TrialConfig) -> dict[str, Any]:
    """Return the settings that a trial's results depend on, without such as paths of files."""
    written = config.model_dump(mode="json")
    workload, dataset = written["workload"], written["dataset"]
    if isinstance(config.workload, PythonSection):
        del workload["path"]
    if isinstance(config.dataset, OwnDataSection):
        del dataset["target_deviation"]
        dataset.pop("path", None)
    for fault in written["faults"]:
        fault.pop("csv", None)  # of a trace, whose rows are there
    return {**written, "cluster": config.cluster.decisive(written["cluster"])}


def _part(axis: str, label: str) -> str:
    text = re.sub(r"[^A-Za-z0-9._=]+", "-", label).strip("-.")
    # A bare number is ambiguous: prefix it with the last word of its axis, as in "tau-4".
    named = text if text[:1].isalpha() else f"{axis.rpartition('.')[2]}-{text}"
    return named[:LONGEST_PART].rstrip("-.")


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names; lists of mappings are numbered."""
    by_name: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, (list, tuple)) and any(isinstance(v, Mapping) for v in value):
            value = {str(i): entry for i, entry in enumerate(value)}
        if isinstance(value, Mapping) and value:
            by_name.update(flat(value, f"{name}."))
        else:
            by_name[name] = value
    return by_name
