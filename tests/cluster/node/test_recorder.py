"""What a node records, where Dask does not take some of it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from dps.cluster.node.logs import Recorder
from dps.events import Evaluated, Event, TaskFailed, from_dict


def test_events_that_dask_refuses_are_left_out_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[Event] = []

    def log_event(topic: str, batch: list[dict[str, Any]]) -> None:
        if any(isinstance(record["loss"], complex) for record in batch):
            raise TypeError("Message must be msgpack serializable")
        sent.extend(map(from_dict, batch))

    group: Any = SimpleNamespace(name="g", labels={}, recorded=True)
    recorder = Recorder(group, log_event)
    good = [Evaluated(float(number), number, 0.5, 0.9) for number in range(120)]
    with caplog.at_level(logging.WARNING, "distributed.worker"):
        for each in good:
            recorder(each)
            recorder(Evaluated(each.t, each.updates, 1j, 0.9))  # type: ignore[arg-type]
            recorder.send()
    assert sent == good
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3
    for times, text in zip((1, 10, 100), told, strict=True):
        assert f"cannot record Evaluated ({times} so far)" in text


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
