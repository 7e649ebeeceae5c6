"""What a node records, where Dask does not take some of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dps.cluster.node.logs import Recorder
from dps.events import TaskFailed


def test_a_task_that_fails_is_in_the_log_of_the_node_whether_events_are_recorded_or_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    group: Any = SimpleNamespace(name="g", labels={}, recorded=False)
    recorder = Recorder(group, lambda topic, batch: None)
    for _ in range(20):
        recorder(TaskFailed(0.0, "server-0", "KeyError: 'x'", "where it was raised"))
    told = [r.getMessage() for r in caplog.records if r.name == "distributed.worker.dps"]
    assert len(told) == 2
    assert "a background task of server-0 failed: where it was raised" in told[0]
