"""Small trials on virtual time, for tests of what a configuration does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flows.config.experiment import TrialConfig
from flows.config.trials import Trial, digest
from flows.execution.trial import run_trial
from flows.metrics.prices import load_prices
from flows.records.record import EVENTS_FILE
from flows.statistics.finished import Finished, read_finished

BASE: dict[str, Any] = {
    "experiment": "virtual",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"workers": 2, "updates": 120, "compute_seconds": 0.01},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "server": {"shards": 2},
    "recovery": "none",
    "evaluation": {"every_seconds": 0.2},
    "cluster": {"kind": "virtual"},
    "seed": 3,
}


def virtual_trial(folder: Path, **changes: Any) -> Finished:
    """Run a trial on virtual time and return what became of it; sections are replaced whole."""
    config = TrialConfig.model_validate({**BASE, **changes})
    folder.mkdir(parents=True)
    trial = Trial("a-trial", "virtual", {}, config.seed, config, digest(config))
    run_trial(trial, folder, lambda event: None)
    return read_finished(folder / EVENTS_FILE, load_prices())
