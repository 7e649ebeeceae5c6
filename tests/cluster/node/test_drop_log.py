"""What a node says of a worker's updates that were dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import dps
from dps.cluster.node.drop_log import DropLog, drop_topic
from dps.core.blocks import Layout
from dps.protocol.group import Group
from dps.sim.world import COORDINATOR
from tests.support.training import params

GROUP = Group(
    "g",
    Layout.of(params(), 1),
    dps.SGD(1.0),
    dps.SSP(1),
    dps.Recovery(),
    COORDINATOR,
    dps.Timings(lease=2.0, patience=3.0),
)


@pytest.mark.parametrize("on_loss", ["warn", "raise", "ignore"])
def test_it_is_said_once_of_each_worker(on_loss: str, caplog: pytest.LogCaptureFixture) -> None:
    said: list[tuple[str, Any]] = []
    for worker in ("worker-0", "worker-1"):
        log = DropLog(replace(GROUP, on_loss=on_loss), worker, lambda *event: said.append(event))
        for outcome in ("applied", "duplicate", "buffered", "dropped", "dropped"):
            log.note(outcome)
    told = [] if on_loss == "ignore" else ["worker-0", "worker-1"]
    assert said == [(drop_topic("g"), worker) for worker in told]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(told)
    for worker, line in zip(told, lines, strict=True):
        assert line.startswith(f"dps: updates of {worker} were dropped, not applied")
        assert "longer than its lease (2 s), or busy for longer than its patience (3 s)" in line
        assert "timings=dps.Timings(patience=30)" in line
