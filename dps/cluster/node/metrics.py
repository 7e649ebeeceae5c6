"""The metrics of shards for Prometheus, on the endpoint where Dask serves its own: `/metrics`.

They are read off when somebody asks. Without the package prometheus_client there are none, of Dask
neither.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dps.cluster.platform import made_once, platform_of, state_of
from dps.protocol.server.metrics import STALENESS_BOUNDS, ReplicaMetrics

if TYPE_CHECKING:
    import distributed

NAME = "dps-metrics"
BOUNDS = (*map(str, STALENESS_BOUNDS), "+Inf")
GAUGES = {
    "version": "Updates that are in the state of the shard.",
    "epoch": "Number of the present configuration of the shard's replicas.",
    "head": "Whether clients push to this replica.",
    "waiting": "Pushes that have come and are not acknowledged.",
    "uncommitted": "Operations applied here that whoever comes after has not acknowledged.",
}
COUNTERS = {
    "updates": "Updates that this replica has applied.",
    "duplicates": "Pushes that this replica has refused because it had them.",
}
STALENESS = "Versions that the applied updates had missed."


@dataclass(frozen=True, slots=True)
class _Source:
    labels: Mapping[str, str]
    figures: Callable[[], Sequence[ReplicaMetrics]]


class ShardMetrics:
    """The metrics of all replicas on one Dask worker; a collector for prometheus_client."""

    def __init__(self) -> None:
        self._sources: list[_Source] = []

    def describe(self) -> Sequence[Any]:
        """Nothing: which there are depends on what is here when somebody asks."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, as prometheus_client wants them."""
        from prometheus_client import core

        rows = [(s.labels, figures) for s in list(self._sources) for figures in s.figures()]
        if not rows:
            return
        names = (*sorted({name for labels, _ in rows for name in labels}), "shard")
        for what, told in {**GAUGES, **COUNTERS}.items():
            make = core.GaugeMetricFamily if what in GAUGES else core.CounterMetricFamily
            family = make(f"dps_shard_{what}", told, labels=names)
            for labels, figures in rows:
                family.add_metric(_values(names, labels, figures), float(getattr(figures, what)))
            yield family
        staleness = core.HistogramMetricFamily("dps_shard_staleness", STALENESS, labels=names)
        for labels, figures in rows:
            buckets = list(zip(BOUNDS, accumulate(figures.staleness), strict=True))
            values = _values(names, labels, figures)
            staleness.add_metric(values, buckets, float(figures.staleness_sum))
        yield staleness

    def add(self, source: _Source) -> None:
        """Take in the replicas of one host."""
        self._sources.append(source)

    def remove(self, source: _Source) -> bool:
        """Leave a host's out again; return whether it was the last one."""
        if source not in self._sources:
            return False
        self._sources.remove(source)
        return not self._sources


def publish(
    dask_worker: distributed.Worker,
    labels: Mapping[str, str],
    figures: Callable[[], Sequence[ReplicaMetrics]],
) -> Callable[[], None]:
    """Have a host's replicas among the metrics of its Dask worker; return what ends that."""
    if not platform_of(dask_worker).serves_metrics or find_spec("prometheus_client") is None:
        return lambda: None
    from prometheus_client import REGISTRY

    def registered() -> ShardMetrics:
        metrics = ShardMetrics()
        REGISTRY.register(metrics)
        return metrics

    metrics = made_once(dask_worker, NAME, registered)
    source = _Source(labels, figures)
    metrics.add(source)

    def withdraw() -> None:
        if metrics.remove(source):
            del state_of(dask_worker)[NAME]
            REGISTRY.unregister(metrics)

    return withdraw


def _values(
    names: Sequence[str], labels: Mapping[str, str], figures: ReplicaMetrics
) -> tuple[str, ...]:
    known = {**labels, "shard": str(figures.shard)}
    return tuple(known.get(name, "") for name in names)
