"""Trials with local steps: a worker's own rule between updates, at a share of the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dps.events import Reported
from flows.records.events import Audited
from tests.support.virtual_trials import virtual_trial

H = 5
UPDATES = 16
INNER = {"kind": "momentum", "learning_rate": 0.05, "momentum": 0.5}


def losses(done: Any) -> list[float]:
    events = [event for event in done.record.of(Reported) if event.name == "loss"]
    return [value for event in events for value in event.values]


def test_one_worker_with_local_steps_computes_what_it_would_without(tmp_path: Path) -> None:
    plain = virtual_trial(
        tmp_path / "plain", training={"workers": 1, "updates": H * UPDATES}, optimizer=INNER
    )
    local = virtual_trial(
        tmp_path / "local",
        training={"workers": 1, "updates": UPDATES, "local_steps": H, "inner": INNER},
        optimizer={"kind": "sgd", "learning_rate": 1.0},
    )
    assert [audited.version for audited in local.record.of(Audited)] == [UPDATES, UPDATES]
    expected = np.reshape(losses(plain), (UPDATES, H)).mean(axis=1)
    np.testing.assert_allclose(losses(local), expected, rtol=1e-4)
