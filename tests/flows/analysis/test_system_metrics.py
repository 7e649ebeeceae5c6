"""What processes used over time, as MLflow shows it: by window, of the living, by role."""

from __future__ import annotations

import pytest

from dps.events import ResourceSampled
from flows.analysis.system_metrics import system_metrics
from flows.records.record import Record


def sample(t: float, cpu: float) -> ResourceSampled:
    return ResourceSampled(t, "server-0", "server", 1, cpu, 5_000_000, {}, {}, 0)


def test_processor_use_is_over_the_time_since_the_window_before() -> None:
    """Also where there are windows without samples, as of a node that was paused."""
    record = Record((sample(0.5, 1.0), sample(3.0, 2.0), sample(9.0, 5.0)))
    used = [
        (point.t, point.value)
        for point in system_metrics(record)
        if point.name == "system/server/cpu_utilization_percentage"
    ]
    assert used == [(4.0, pytest.approx(50.0)), (10.0, pytest.approx(50.0))]
