"""What processes used over time, as MLflow shows it: by window, of the living, by role."""

from __future__ import annotations

import pytest

from dps.events import Killed, NodeJoined, ResourceSampled
from flows.analysis.system_metrics import system_metrics
from flows.records.record import Record


def sample(t: float, cpu: float, pid: int = 1) -> ResourceSampled:
    return ResourceSampled(t, "server-0", "server", pid, cpu, 5_000_000, {}, {}, 0, "host", 0.0)


def values(record: Record, name: str) -> list[tuple[float, float]]:
    return [(p.t, p.value) for p in system_metrics(record) if p.name == f"system/server/{name}"]


def test_processor_use_is_over_the_time_since_the_window_before() -> None:
    """Also where there are windows without samples, as of a node that was paused."""
    record = Record((sample(0.5, 1.0), sample(3.0, 2.0), sample(9.0, 5.0)))
    used = values(record, "cpu_utilization_percentage")
    assert used == [(4.0, pytest.approx(50.0)), (10.0, pytest.approx(50.0))]


def test_memory_is_that_of_processes_that_live() -> None:
    joined = NodeJoined(0.0, "server-0", "server", 1, "host", 0.0)
    killed = Killed(2.5, 0, "server-0", 1, 10, True)
    record = Record((joined, sample(0.5, 1.0), killed, sample(3.0, 1.0, pid=2)))
    assert values(record, "system_memory_usage_megabytes") == [(2.0, 5.0), (4.0, 5.0)]
