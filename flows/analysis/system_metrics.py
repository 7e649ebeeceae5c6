"""What a trial's processes used over time, under the names of MLflow's own system metrics.

MLflow shows metrics of these names on a page of their own. They are made from the samples in the
record: of all processes together, and by role.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dps.events import ResourceSampled
from flows.analysis.processes import Process, deaths, process_of
from flows.analysis.series import Point
from flows.records.record import Record

MEGABYTE = 1e6
WINDOW_SECONDS = 2.0  # every process is sampled once a second


@dataclass(frozen=True, slots=True)
class Used:
    """Sums over processes: `cpu_seconds` and bytes since they started, `memory` of the living."""

    cpu_seconds: float
    memory: float
    sent: float
    received: float


def system_metrics(record: Record) -> Iterator[Point]:
    """Yield processor use, memory and traffic for every window of two seconds with samples.

    Processor use is in per cent of one core since the window before. Memory is the largest
    resident set so far of every process that lives.
    """
    previous: dict[str, tuple[float, Used]] = {}
    for t, by_role in _windows(record):
        for role, used in by_role.items():
            prefix = f"system/{role}/" if role else "system/"
            if role in previous:
                since, before = previous[role]
                busy = max(0.0, used.cpu_seconds - before.cpu_seconds) / (t - since)
                yield Point(f"{prefix}cpu_utilization_percentage", t, 100 * busy)
            yield Point(f"{prefix}system_memory_usage_megabytes", t, used.memory / MEGABYTE)
            yield Point(f"{prefix}network_transmit_megabytes", t, used.sent / MEGABYTE)
            yield Point(f"{prefix}network_receive_megabytes", t, used.received / MEGABYTE)
            previous[role] = (t, used)


def _windows(record: Record) -> Iterator[tuple[float, Mapping[str, Used]]]:
    """Yield the end of each window, and what was used until then by role; "" stands for all."""
    died = deaths(record)
    latest: dict[Process, ResourceSampled] = {}
    end: float | None = None
    for sample in sorted(record.of(ResourceSampled), key=lambda sample: sample.t):
        if end is not None and sample.t >= end:
            yield end, _by_role(latest, died, end)
            end = None
        latest[process_of(sample)] = sample
        end = end or (sample.t // WINDOW_SECONDS + 1) * WINDOW_SECONDS
    if end is not None:
        yield end, _by_role(latest, died, end)


def _by_role(
    latest: Mapping[Process, ResourceSampled], died: Mapping[Process, float], t: float
) -> dict[str, Used]:
    groups: defaultdict[str, list[ResourceSampled]] = defaultdict(list)
    for sample in latest.values():
        groups[""].append(sample)
        groups[sample.role].append(sample)
    return {
        role: Used(
            cpu_seconds=sum(s.cpu_seconds for s in samples),
            memory=sum(s.peak_bytes for s in samples if died.get(process_of(s), t) >= t),
            sent=sum(sum(s.sent.values()) for s in samples),
            received=sum(sum(s.received.values()) for s in samples),
        )
        for role, samples in groups.items()
    }
