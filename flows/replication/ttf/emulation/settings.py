"""What a trial of the emulation depends on: the configuration, and the cells of the study.

Every time is the paper's, in its seconds; a trial divides each of them by `scale`.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from flows.config.base import SafeName, Section
from flows.config.errors import complaints, placed
from flows.config.trials import DIGEST_LENGTH
from flows.config.workload import DatasetSection, WorkloadSection
from flows.config.yaml_document import read_document

# The configurations of the paper, and the mechanics of each. With one worker, as in every
# published run, the two of a pair are one algorithm: they share out the seeds.
CONFIGURATIONS = {
    "sync checkpoint": "checkpoint",
    "async checkpoint": "checkpoint",
    "sync chain": "chain",
    "async chain": "chain",
    "stateless": "stateless",
}
KILLS = (0, 1, 2)
AS_PUBLISHED = "as published"


class PublishedConfig(Section):
    """The published experiment.

    `seconds` is how long a trial takes, `kill_after` the time from each (re)start of the server to
    the next kill, `recovery` and `session` the times until it is replaced, or its successor takes
    over. The state is copied every `copy_every` updates; accuracy is measured inside the server,
    every `evaluate_every` updates, by the stateless server at most every `evaluate_gap` seconds;
    `target` is the accuracy whose time is measured.
    More than `long_queue` queued gradients are applied with a tenth of the learning rate.
    """

    emulation: SafeName
    workload: WorkloadSection
    dataset: DatasetSection
    batch_size: PositiveInt = 32
    learning_rate: PositiveFloat = 0.01
    scale: PositiveFloat
    seconds: PositiveFloat = 175.0
    kill_after: PositiveFloat = 30.0
    recovery: PositiveFloat = 20.0
    session: PositiveFloat = 10.0
    copy_every: PositiveInt = 100
    evaluate_every: PositiveInt = 10
    evaluate_gap: PositiveFloat = 1.0
    target: PositiveFloat = 0.7
    long_queue: PositiveInt = 50
    repeats: PositiveInt

    def scaled(self, seconds: float) -> float:
        """Return how long something that took so many seconds in the paper takes here."""
        return seconds / self.scale


@dataclass(frozen=True, slots=True)
class PublishedTrial:
    """One run: a configuration of the paper, a number of kills and a seed."""

    configuration: str
    kills: NonNegativeInt
    seed: int
    config: PublishedConfig

    @property
    def mechanics(self) -> str:
        """Which of the three algorithms it runs: "checkpoint", "chain" or "stateless"."""
        return CONFIGURATIONS[self.configuration]

    @property
    def name(self) -> str:
        """Readable, unique in the experiment, and a safe name for a folder."""
        return f"{self.configuration.replace(' ', '-')}.kills-{self.kills}.seed-{self.seed}"

    @property
    def digest(self) -> str:
        """Short SHA-256 of all that the trial depends on."""
        text = json.dumps(self._settings(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]

    def settings(self) -> dict[str, Any]:
        """What the trial is, for its record."""
        return {**self._settings(), "digest": self.digest}

    def _settings(self) -> dict[str, Any]:
        # How often a trial is repeated is no part of it.
        config = self.config.model_dump(mode="json", exclude={"repeats", "emulation"})
        kinds = {"checkpoint": "wait", "chain": "wait", "stateless": "continue"}
        return {
            "trial": self.name,
            "experiment": self.config.emulation,
            "labels": {"recovery": self.configuration, "kills": f"k={self.kills}"},
            "seed": self.seed,
            "config": {
                **config,
                "emulation": AS_PUBLISHED,
                "evaluation": {"target": self.config.target},
                "training": {"workers": 1},
                "recovery": {
                    "name": "custom",
                    "durability": {"kind": self.mechanics, "every": self.config.copy_every},
                    "outage": {"kind": kinds[self.mechanics]},
                },
                "kills": self.kills,
                "seed": self.seed,
            },
        }


def is_emulated(config: Mapping[str, Any]) -> bool:
    """Tell by the configuration in a record whether it is of the emulation."""
    return config.get("emulation") == AS_PUBLISHED


def load_published(path: Path) -> PublishedConfig:
    """Read and check the configuration of the emulation.

    Raises
    ------
    ConfigurationError
        Anything in it that cannot work, with the place and what was expected.
    """
    document = read_document(path)
    try:
        return PublishedConfig.model_validate(document.data)
    except ValidationError as error:
        raise placed(complaints(error, document.data), document) from error


def cells(config: PublishedConfig) -> tuple[PublishedTrial, ...]:
    """Return the trials: a block for each seed, shuffled, so that drift falls on all strategies."""
    trials = []
    for seed in range(config.repeats):
        half = ("sync", "async")[seed % 2]
        chosen = (f"{half} checkpoint", f"{half} chain", "stateless")
        block = [PublishedTrial(name, k, seed, config) for k in KILLS for name in chosen]
        random.Random(seed).shuffle(block)
        trials += block
    return tuple(trials)
