"""Verdicts on claims that are known to be true or null, from trials by the code of `dps run`.

Learning at a rate of 0.1 is better than at a rate of 0; two strategies that are the same show no
difference. One worker, and one evaluation before the training and one after it, make the second
claim null to the last bit: a test of chance would fail by chance.
"""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from flows.config.experiment import ExperimentConfig
from flows.config.settings import ComparisonSection
from flows.execution.drivers import Drivers
from flows.execution.experiment import run_experiment
from flows.metrics.outcome import Outcome
from flows.monitor.progress import PlainView
from flows.statistics.comparison import Compared, compared

SEEDS = [0, 1, 2]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, ...]:
    rates = {"still": 0.0, "learning": 0.1, "twin": 0.1}
    experiment = {
        "experiment": "known",
        "workload": {"kind": "softmax"},
        "dataset": {"kind": "digits"},
        "training": {"workers": 1, "updates": 40, "compute_seconds": 0.01},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "server": {"shards": 1},
        "evaluation": {"every_seconds": 60.0, "target": 0.2},
        "axes": {"optimizer.learning_rate": rates},
        "cluster": {"kind": "virtual"},
        "seeds": SEEDS,
    }
    here = tmp_path_factory.mktemp("known")
    view = PlainView(Console(file=io.StringIO()))
    with Drivers() as drivers:
        return run_experiment(
            ExperimentConfig.model_validate(experiment), here, view, drivers
        ).outcomes


def row(outcomes: tuple[Outcome, ...], strategy: str, baseline: str) -> Compared:
    section = ComparisonSection(baseline=baseline, metrics=("accuracy_final", "loss_final"))
    rows = compared(outcomes, section, np.random.default_rng(0))
    (found,) = (r for r in rows if (r.strategy, r.metric) == (strategy, "accuracy_final"))
    return found


@pytest.mark.slow
def test_what_is_better_comes_out_as_better(outcomes: tuple[Outcome, ...]) -> None:
    assert [o.status for o in outcomes] == ["valid"] * 9
    assert row(outcomes, "learning", "still").reading == "higher"
    assert row(outcomes, "still", "learning").reading == "lower"


@pytest.mark.slow
def test_what_is_the_same_comes_out_as_no_difference(outcomes: tuple[Outcome, ...]) -> None:
    assert row(outcomes, "twin", "learning").sentence == "too few seeds"
