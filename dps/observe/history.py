"""What workers report and evaluators score, kept in bounded memory: the history of a training.

Every number belongs to a series: one metric of one incarnation of a worker, or of the evaluators.
When there are too many numbers the longest series are thinned, evenly over their whole length, so
that what is left still shows the training from its beginning. The last number is always there.
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

LIMIT = 500_000  # numbers: some 16 MB
EVALUATOR = "evaluator"


class Number(NamedTuple):
    """One number of the history.

    `t` is in seconds since the Unix epoch; `step` the version of the weights that it is about, on
    the mean of the shards, or -1 if there were none; `report` which report of a worker's
    incarnation it is from, or 0.
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
        """Take a number in, or only as the last one if it is none of the `stride`-th."""
        # Whole or not at all: a column that is shorter than others could never be read again.
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
        """All that is kept, in the order in which it came."""
        kept: list[_Row] = list(zip(*self._columns, strict=True))
        left_out = (self._seen - 1) % self._stride != 0
        return [*kept, self.last] if left_out else kept


class History:
    """The history of one training. Thread-safe.

    Parameters
    ----------
    rule
        The update rule, which the learning rate is of.
    limit
        How many numbers are kept at most, but for the last one of each series.
    """

    def __init__(self, rule: UpdateRule | None = None, limit: int = LIMIT) -> None:
        self._rule = rule
        self._limit = limit
        self._kept = 0
        self._series: dict[_Key, _Series] = {}
        self._listeners: list[Callable[[Sequence[Number]], None]] = []
        self._lock = threading.Lock()

    def add(self, event: Event) -> None:
        """Take in what an event holds of numbers; most hold none."""
        numbers = numbers_of(event)
        if not numbers:
            return
        with self._lock:
            for number in numbers:
                self._add(number)
            for listener in self._listeners:
                listener(numbers)

    def listen(self, listener: Callable[[Sequence[Number]], None]) -> None:
        """Have numbers passed on, beginning with those that are known; it must not block."""
        with self._lock:
            self._listeners.append(listener)
            if known := self._numbers():
                listener(known)

    def unlisten(self, listener: Callable[[Sequence[Number]], None]) -> None:
        """Undo `listen`."""
        with self._lock:
            self._listeners.remove(listener)

    def last(self, source: str) -> dict[str, float]:
        """The last number of each metric of a worker, of its last incarnation that has any."""
        with self._lock:
            own = [(key, series) for key, series in self._series.items() if key[0] == source]
        own.sort(key=lambda each: each[0][1])
        return {metric: series.last[2] for (_, _, metric), series in own}

    def frame(self) -> pandas.DataFrame:
        """All that is kept as a table, in the order of time: a row for each number.

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
            self._make_room()

    def _make_room(self) -> None:
        longest = max(self._series.values(), key=len)
        before = len(longest)
        longest.thin()
        self._kept -= before - len(longest)
        if len(longest) == before:  # of one number, as all are: metrics that come once
            self._kept -= len(self._series.pop(next(iter(self._series))))

    def _numbers(self) -> list[Number]:
        rows = [
            Number(t, *key, step, value, report)
            for key, series in self._series.items()
            for t, step, value, report in series.rows()
        ]
        return sorted(rows, key=lambda number: number.t)


def numbers_of(event: Event) -> list[Number]:
    """What an event says of the course of a training, number by number."""
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
