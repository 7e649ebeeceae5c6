"""A command reads each record once, and computes its outcome once, whatever it makes of them."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from flows.analysis import finished
from flows.cli import app
from flows.config import experiment as config
from flows.config import trials as grid
from flows.config.experiment import ExperimentConfig
from flows.execution import experiment as flow
from flows.execution.drivers import Drivers
from flows.execution.experiment import run_experiment
from flows.monitor.progress import PlainView
from flows.records import record
from tests.support.stores import with_store
from tests.support.synthetic import demo_trials, toy_events, write_events

CHAIN, NONE = "chain.kill.seed-0", "none.kill.seed-0"
SMALL = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"workers": 1, "updates": 40},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "server": {"shards": 1},
    "evaluation": {"every_seconds": 60.0},
    "cluster": {"kind": "virtual"},
    "axes": {"optimizer.learning_rate": {"slow": 0.01, "fast": 0.1}},
}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each record was read, and its outcome computed; and how often trials were made."""
    found = Counter[str]()
    lines, outcome, expand = record._lines, finished.outcome, grid.expand

    def read(path: Path) -> list[bytes]:
        found[f"read {path.parent.name}"] += 1
        return lines(path)

    def computed(events: record.Record, *args: Any) -> Any:
        assert events.started is not None
        found[f"outcome {events.started.settings['trial']}"] += 1
        return outcome(events, *args)

    def expanded(experiment: ExperimentConfig) -> Any:
        found["expand"] += 1
        return expand(experiment)

    monkeypatch.setattr(record, "_lines", read)
    monkeypatch.setattr(finished, "outcome", computed)
    monkeypatch.setattr(flow, "expand", expanded)
    return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an experiment of two trials."""
    for name in (CHAIN, NONE):
        trial = next(trial for trial in demo_trials() if trial.name == name)
        events = toy_events(trial.labels["recovery"], trial.labels["faults"], trial.seed)
        write_events(tmp_path / "results" / "demo" / name, events)
    with_store(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def once(*trials: str) -> dict[str, int]:
    return {f"{what} {trial}": 1 for trial in trials for what in ("read", "outcome")}


@pytest.mark.parametrize(
    "words",
    [
        ["results", "demo"],
        ["compare", f"demo/{CHAIN}", f"demo/{NONE}"],
        pytest.param(["report", "demo"], marks=pytest.mark.slow),
        pytest.param(["sync", "demo"], marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_a_command_reads_each_record_once(
    here: Path, counts: Counter[str], words: list[str]
) -> None:
    app(words, standalone_mode=False)
    assert counts == once(CHAIN, NONE)


@pytest.mark.slow
def test_a_run_reads_each_record_once(tmp_path: Path, counts: Counter[str]) -> None:
    with_store(tmp_path)
    experiment = ExperimentConfig.model_validate(SMALL)
    view = PlainView(Console(file=io.StringIO()))
    for _ in range(2):  # the second time, all is recorded
        with Drivers() as drivers:
            ran = run_experiment(experiment, tmp_path, view, drivers)
        assert [outcome.status for outcome in ran.outcomes] == ["valid"] * 2
        assert counts == {"expand": 1, **once("slow.seed-0", "fast.seed-0")}
        counts.clear()


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan", "run"])
def test_a_command_reads_the_configuration_and_makes_its_trials_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    calls = Counter[str]()
    read, configs = config.read_document, ExperimentConfig.trial_configs

    def counted_read(*args: Any) -> Any:
        calls["read"] += 1
        return read(*args)

    def counted_configs(self: ExperimentConfig) -> Any:
        calls["expanded"] += 1
        return configs(self)

    monkeypatch.setattr(config, "read_document", counted_read)
    monkeypatch.setattr(ExperimentConfig, "trial_configs", counted_configs)
    monkeypatch.chdir(tmp_path)
    with_store(tmp_path)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    app([command, "small.yaml"], standalone_mode=False)
    assert calls == {"read": 1, "expanded": 1}
