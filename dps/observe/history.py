"""The history of a training: reports of workers and scores of evaluators, in bounded memory.

Every number belongs to a series: one metric of one incarnation of a worker, or of the evaluators.
If there are too many numbers, the longest series are thinned evenly over their whole length. The
last number of a series is always kept.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dps.core.rules.rule import UpdateRule, learning_rate_at
from dps.errors import ConfigurationError
from dps.events import Evaluated, Event, Reported

if TYPE_CHECKING:
    import pandas

LIMIT = 500_000  # numbers: about 16 MB
EVALUATOR = "evaluator"


class Number(NamedTuple):
    """One number of the history.

    `t` is in seconds since the Unix epoch; `step` is the mean version of the weights over the
    shards, or -1 without weights; `report` counts those of a worker's incarnation from 1, else 0.
    """

    t: float
    source: str
    incarnation: int
    metric: str
    step: int
    value: float
    report: int


_Key = tuple[str, int, str]  # source, incarnation, metric
_Row = tuple[float, int, float, int]  # t, step, value, report


class _Series:
    """The numbers of one metric of one incarnation: every `stride`-th, and the last one."""

    def __init__(self) -> None:
        self._columns: list[array[Any]] = [array(kind) for kind in "dqdq"]  # as in `_Row`
        self.last: _Row = (0.0, 0, 0.0, -1)
        self._stride = 1
        self._seen = 0

    def __len__(self) -> int:
        return len(self._columns[0])

    def add(self, number: Number) -> None:
        # Convert before anything is appended: columns must have equal lengths.
        self.last = number.t, number.step, float(number.value), number.report
        if self._seen % self._stride == 0:
            for column, entry in zip(self._columns, self.last, strict=True):
                column.append(entry)
        self._seen += 1

    def thin(self) -> None:
        """Keep every other number."""
        self._columns = [column[::2] for column in self._columns]
        self._stride *= 2

    def rows(self) -> list[_Row]:
        """All that is kept, in order."""
        kept: list[_Row] = list(zip(*self._columns, strict=True))
        left_out = (self._seen - 1) % self._stride != 0
        return [*kept, self.last] if left_out else kept


class History:
    """The history of one training. Thread-safe.

    Parameters
    ----------
    rule
        The update rule, for the learning rate.
    limit
        The largest number of numbers, besides the last one of each series.
    """

    def __init__(self, rule: UpdateRule | None = None, limit: int = LIMIT) -> None:
        self._rule = rule
        self._limit = limit
        self._kept = 0
        self._series: dict[_Key, _Series] = {}
        self._listeners: list[Callable[[Sequence[Number]], None]] = []
        self._lock = threading.Lock()

    def add(self, event: Event) -> None:
        """Add the numbers of an event, if it has any."""
        numbers = numbers_of(event)
        if not numbers:
            return
        with self._lock:
            for number in numbers:
                self._add(number)
            for listener in self._listeners:
                listener(numbers)

    def listen(self, listener: Callable[[Sequence[Number]], None]) -> None:
        """Pass known numbers and new ones to a function that must not block."""
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
            own = [(key, series) for key, series in self._series.items() if key[0] == source]
        own.sort(key=lambda each: each[0][1])
        return {metric: series.last[2] for (_, _, metric), series in own}

    def frame(self) -> pandas.DataFrame:
        """Return a table with a row for each number, in order of time.

        Raises
        ------
        ConfigurationError
            The package pandas is not installed.
        """
        try:
            import pandas as pd  # deferred: takes a second
        except ImportError as error:
            raise ConfigurationError(
                "the history is a table of pandas, which is not installed: pip install pandas"
            ) from error

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

    def _add(self, number: Number) -> None:
        series = self._series.setdefault(number[1:4], _Series())
        before = len(series)
        series.add(number)
        self._kept += len(series) - before
        while self._kept > self._limit:
            longest = max(self._series.values(), key=len)
            before = len(longest)
            longest.thin()
            self._kept -= before - len(longest)
            if len(longest) == before:  # all series have one number
                self._kept -= len(self._series.pop(next(iter(self._series))))

    def _numbers(self) -> list[Number]:
        rows = [
            Number(t, *key, step, value, report)
            for key, series in self._series.items()
            for t, step, value, report in series.rows()
        ]
        return sorted(rows, key=lambda number: number.t)


def numbers_of(event: Event) -> list[Number]:
    """Return the numbers of an event."""
    if isinstance(event, Reported):
        versions = event.versions or (-1,) * len(event.times)
        rows = zip(event.times, versions, event.values, event.steps, strict=True)
        who = event.worker, event.incarnation, event.name
        return [Number(t, *who, version, value, report) for t, version, value, report in rows]
    if isinstance(event, Evaluated):
        step = round(event.updates)
        scores = (("loss", event.loss), ("accuracy", event.accuracy))
        return [Number(event.t, EVALUATOR, 0, metric, step, score, 0) for metric, score in scores]
    return []
