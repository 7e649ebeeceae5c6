"""What is kept of a trial comes back as the trial, or is refused with what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dps.core.blocks import Layout
from dps.core.consistency import ASP
from dps.core.rules.rule import SGD
from dps.errors import ConfigurationError
from dps.events import TrialStarted
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.recovery import Recovery
from dps.protocol.storage.manifest import Run, Saved
from flows.config.trials import Trial
from flows.execution.replay import replay_of
from flows.execution.resume import trial_of
from flows.records.record import EVENTS_FILE, EventWriter
from flows.records.settings import settings, trial_from
from tests.support.synthetic import demo_trials

TRIAL = next(trial for trial in demo_trials() if trial.name == "checkpoint.kill.seed-0")
OTHER = "resnet.mine:build"


def kept(**changes: Any) -> dict[str, Any]:
    """What is kept of the trial, as JSON gives it back, with other values in its configuration."""
    told: dict[str, Any] = json.loads(json.dumps(settings(TRIAL, {})))
    told["config"] |= changes
    return told


def from_checkpoints(told: dict[str, Any], here: Path) -> Trial:
    recovery = Recovery(Checkpoint(path=str(here)))
    run = Run("g", 0, 1.0, Layout((), ()), SGD(0.1), ASP(), recovery, json.dumps(told))
    return trial_of(Saved(run, ()), str(here))


def from_record(told: dict[str, Any], here: Path) -> Trial:
    with EventWriter(here / "t" / EVENTS_FILE) as write:
        write(TrialStarted(1.0, TRIAL.name, told, {}))
    return replay_of(str(here / "t" / EVENTS_FILE), here).trial


Reader = Callable[[dict[str, Any], Path], Trial]
both = pytest.mark.parametrize("read", [from_checkpoints, from_record])


def test_a_trial_comes_back() -> None:
    assert trial_from(kept(), "here") == TRIAL


@both
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speed": 3}, "config.speed: unknown key"),
        ({"seed": -1}, "config.seed: expected at least 0, got -1"),
        ({"workload": {"kind": "torch", "module": OTHER}}, "config.workload.module: "),
    ],
)
def test_a_configuration_that_cannot_run_here_is_refused(
    read: Reader, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read(kept(**changes), tmp_path)
    *lines, advice = str(refused.value).splitlines()
    assert all(line.startswith(str(tmp_path)) for line in lines)
    assert message in lines[0]
    assert advice.startswith("this trial cannot run here; use the version of dps that it is of")


@both
def test_what_is_kept_only_in_part_is_refused(read: Reader, tmp_path: Path) -> None:
    told = kept()
    del told["labels"]
    with pytest.raises(ConfigurationError, match="of this version of dps: 'labels' is missing"):
        read(told, tmp_path)
