"""The history of a training: reports of workers and scores of evaluators, in bounded memory.

Every number belongs to a series: one metric of one incarnation of a worker, or of the evaluators.
If there are too many numbers, the longest series are thinned evenly over their whole length. The
last number of a series is always kept.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dps.core.rules.rule import UpdateRule, learning_rate_at
from dps.events import Evaluated, Event, Reported

if TYPE_CHECKING:
    import pandas

LIMIT = 200_000  # numbers: about 40 MB
EVALUATOR = "evaluator"


class Number(NamedTuple):
    """One number of the history."""

    t: float  # seconds since the Unix epoch
    source: str
    incarnation: int
    metric: str
    step: int  # the mean version of the weights over the shards; -1 without weights
    value: float
    report: int  # its number in a worker's incarnation, from 1; 0 for evaluators


class _Series:
    """The numbers of one metric of one incarnation: every `stride`-th, and the last one."""

    def __init__(self) -> None:
        self.kept: list[Number] = []
        self.last: Number
        self._stride = 1
        self._seen = 0

    def add(self, number: Number) -> None:
        self.last = number
        if self._seen % self._stride == 0:
            self.kept.append(number)
        self._seen += 1

    def thin(self) -> None:
        del self.kept[1::2]
        self._stride *= 2


class History:
    """The history of one training. Thread-safe."""

    def __init__(self, rule: UpdateRule | None = None, limit: int = LIMIT) -> None:
        self._rule = rule  # for the learning rates in `frame`
        self._limit = limit  # of numbers, beside the last one of each series
        # By source, incarnation and metric.
        self._series: defaultdict[tuple[str, int, str], _Series] = defaultdict(_Series)
        self._listeners: list[Callable[[Sequence[Number]], None]] = []
        self._lock = threading.Lock()

    def add(self, event: Event) -> None:
        """Add the numbers of an event, if it has any."""
        numbers = [number._replace(value=float(number.value)) for number in numbers_of(event)]
        if not numbers:
            return
        with self._lock:
            for number in numbers:
                self._series[number[1:4]].add(number)
            series = self._series.values()
            while sum(len(each.kept) for each in series) > max(self._limit, len(series)):
                max(series, key=lambda each: len(each.kept)).thin()
            for listener in self._listeners:
                listener(numbers)

    def listen(self, listener: Callable[[Sequence[Number]], None]) -> None:
        """Pass the present and all new numbers to a function, which must not block."""
        with self._lock:
            self._listeners.append(listener)
            if known := self._numbers():
                listener(known)

    def unlisten(self, listener: Callable[[Sequence[Number]], None]) -> None:
        """Undo `listen`."""
        with self._lock:
            self._listeners.remove(listener)

    def last(self, source: str) -> dict[str, float]:
        """Return the last number of each metric of a worker."""
        with self._lock:
            own = [series.last for key, series in self._series.items() if key[0] == source]
        own.sort(key=lambda number: number.incarnation)
        return {number.metric: number.value for number in own}

    def frame(self) -> pandas.DataFrame:
        """Return a table with a row for each number, in order of time."""
        import pandas as pd  # deferred: takes a second

        with self._lock:
            rows = self._numbers()
        frame = pd.DataFrame(rows, columns=["time", *Number._fields[1:]])
        types = {"incarnation": "int64", "step": "int64", "value": "float64", "report": "int64"}
        frame = frame.astype(types)
        rule, steps = self._rule, set(frame["step"])
        known = {s: learning_rate_at(rule, int(s)) for s in steps if s >= 0} if rule else {}
        frame["learning_rate"] = frame["step"].map(known).astype("float64")
        frame["time"] = pd.to_datetime(frame["time"].astype("float64"), unit="s", utc=True)
        return frame

    def _numbers(self) -> list[Number]:
        numbers: list[Number] = []
        for series in self._series.values():
            numbers += series.kept
            if series.last is not series.kept[-1]:
                numbers.append(series.last)
        return sorted(numbers, key=lambda number: number.t)


def numbers_of(event: Event) -> list[Number]:
    """Return the numbers of an event."""
    if isinstance(event, Reported):
        versions = event.versions or (-1,) * len(event.times)
        rows = zip(event.times, versions, event.values, event.steps, strict=True)
        series = event.worker, event.incarnation, event.name
        return [Number(t, *series, version, value, report) for t, version, value, report in rows]
    if isinstance(event, Evaluated):
        step = round(event.updates)
        scores = (("loss", event.loss), ("accuracy", event.accuracy))
        return [Number(event.t, EVALUATOR, 0, metric, step, score, 0) for metric, score in scores]
    return []
