"""The time series of a trial: loss, accuracy, staleness, versions, learning rates and idleness.

Beside each evaluation stand the gradients and samples pushed until then, so that accuracy and loss
can be drawn against them as well as against time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from dps.core.rules.rule import UpdateRule, learning_rate_at
from dps.errors import ConfigurationError
from dps.events import Reported
from flows.analysis.learning import course
from flows.analysis.ledger import Row, applied_rows
from flows.analysis.statistics import nearest_rank
from flows.analysis.throughput import COMPUTE, computing
from flows.config.optimizer import OptimizerSection
from flows.metrics.score import score_of
from flows.records.record import Record

WINDOW_SECONDS = 0.5
LEARNING_RATE = "server/learning_rate"
SAME_RATE = 0.01  # shards are some updates apart: rates that differ by no more are one

T = TypeVar("T")


class Point(NamedTuple):
    """One value of one series; `t` in seconds since the Unix epoch."""

    name: str
    t: float
    value: float


def series(record: Record) -> list[Point]:
    """Return all series of a trial, in order of time.

    Per-step values are kept as they are; staleness and versions are summed up over windows of half
    a second.
    """
    points = [
        *_training(record),
        *_evaluation(record),
        *_applied(record),
        *_idle(record),
    ]
    return sorted(points, key=lambda point: point.t)


def _training(record: Record) -> Iterator[Point]:
    for event in record.of(Reported):
        if event.name != COMPUTE:
            for t, value in zip(event.times, event.values, strict=True):
                yield Point(f"train/{event.name}", t, value)


def _evaluation(record: Record) -> Iterator[Point]:
    score = score_of(record.config)
    for step in course(record):
        yield Point("eval/loss", step.t, step.loss)
        if score.key != "loss":
            yield Point(f"eval/{score.key}", step.t, step.accuracy)
        if step.objective is not None:
            yield Point("eval/objective", step.t, step.objective)
        if step.stationarity is not None:
            yield Point("eval/stationarity", step.t, step.stationarity)
        yield Point("eval/gradients", step.t, step.gradients)
        yield Point("eval/samples", step.t, step.samples)


def _idle(record: Record) -> Iterator[Point]:
    steps = [(end, (end - began, computed)) for began, end, computed in computing(record)]
    for end, window in _windows(steps):
        there, computed = (sum(column) for column in zip(*window, strict=True))
        if there > 0:
            yield Point("train/idle_share", end, max(0.0, 1 - computed / there))


def _applied(record: Record) -> Iterator[Point]:
    versions: dict[int, int] = {}
    rule = _scheduled_rule(record)
    heads = [row for row in applied_rows(record) if row.head]
    for end, rows in _windows([(row.t, row) for row in heads]):
        versions.update({row.shard: row.version for row in sorted(rows, key=lambda row: row.t)})
        yield Point("server/updates", end, sum(versions.values()) / len(versions))
        yield from _staleness(end, rows)
        if rule is not None:
            yield from _learning_rates(end, rule, versions)


def _staleness(end: float, rows: Sequence[Row]) -> Iterator[Point]:
    stale = [row.staleness for row in rows]
    seconds = [row.staleness_seconds for row in rows]
    for name, value in (
        ("median", nearest_rank(stale, 0.5)),
        ("p99", nearest_rank(stale, 0.99)),
        ("max", max(stale)),
        ("seconds_p99", nearest_rank(seconds, 0.99)),
    ):
        if value is not None:
            yield Point(f"staleness/{name}", end, value)


def _learning_rates(end: float, rule: UpdateRule, versions: Mapping[int, int]) -> Iterator[Point]:
    """The rates of the shards' last steps: their mean, and where they differ, those of each."""
    found = {shard: learning_rate_at(rule, version - 1) for shard, version in versions.items()}
    rates = {shard: rate for shard, rate in found.items() if rate is not None}
    if not rates:
        return
    yield Point(LEARNING_RATE, end, sum(rates.values()) / len(rates))
    if max(rates.values()) > (1 + SAME_RATE) * min(rates.values()):
        for shard, rate in sorted(rates.items()):
            yield Point(f"{LEARNING_RATE}/shard-{shard}", end, rate)


def _scheduled_rule(record: Record) -> UpdateRule | None:
    """The update rule of a trial whose learning rate follows a schedule; None: it has none."""
    section = record.config.get("optimizer")
    if not isinstance(section, dict) or section.get("schedule") is None:
        return None
    try:
        rule: UpdateRule = TypeAdapter(OptimizerSection).validate_python(section).build()
    except (ValidationError, ConfigurationError):  # a rule of a package that is not installed here
        return None
    return rule


def _windows(timed: Iterable[tuple[float, T]]) -> list[tuple[float, list[T]]]:
    """Group by window of time; each window goes by the time of its last entry."""
    windows: defaultdict[int, list[tuple[float, T]]] = defaultdict(list)
    for t, entry in timed:
        windows[int(t // WINDOW_SECONDS)].append((t, entry))
    return [
        (max(t for t, _ in entries), [entry for _, entry in entries])
        for _, entries in sorted(windows.items())
    ]
