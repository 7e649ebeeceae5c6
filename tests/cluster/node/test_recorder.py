"""What a node records, where Dask does not take some of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dps.cluster.node.recorder import Recorder
from dps.events import Evaluated, Event, from_dict


def test_events_that_dask_refuses_are_left_out_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[Event] = []

    def log_event(topic: str, batch: list[dict[str, Any]]) -> None:
        if any(isinstance(record["loss"], complex) for record in batch):
            raise TypeError("Message must be msgpack serializable")
        sent.extend(map(from_dict, batch))

    recorder = Recorder("g", log_event)
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
        assert f"Evaluated is not recorded ({times} until now)" in text
