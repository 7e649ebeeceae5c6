"""By what the nodes of a trial sent each other arrays, as it was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from dps.events import Connected
from flows.records.record import Record

NAMES = {"shared_memory": "shared memory", "stream": "streams", "dask": "Dask"}


def transports(record: Record) -> dict[str, int]:
    """Return transport → how often a node has found that its messages get to another by it.

    The most frequent comes first.
    """
    found = Counter(event.transport for event in record.of(Connected))
    return dict(found.most_common())


def described(found: Iterable[Mapping[str, int]]) -> str:
    """Return in words what `transports` returned for some trials; empty if nothing was recorded."""
    total: Counter[str] = Counter()
    for counts in found:
        total.update(counts)
    return ", ".join(NAMES.get(name, name) for name, _ in total.most_common())
