"""The metrics of shards for Prometheus, on the endpoint where Dask serves its own: `/metrics`.

They are computed when they are requested. Without the package prometheus_client neither dps nor
Dask has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dps.cluster.platform import made_once, platform_of, state_of
from dps.protocol.server.metrics import STALENESS_BOUNDS
from dps.protocol.server.replica import Replica

if TYPE_CHECKING:
    import distributed

NAME = "dps-metrics"
BOUNDS = (*map(str, STALENESS_BOUNDS), "+Inf")
GAUGES: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "version": ("Updates that are in the state of the shard.", lambda r: r.state.version),
    "epoch": ("Number of the present configuration of the shard's replicas.", lambda r: r.epoch),
    "head": ("Whether clients push to this replica.", lambda r: r.is_head),
    "waiting": (
        "Pushes that have arrived and are not acknowledged.",
        lambda r: r.ledger.waiting,
    ),
    "uncommitted": (
        "Operations applied here that the next replica or store has not acknowledged.",
        lambda r: r.uncommitted,
    ),
}
COUNTERS: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "updates": ("Updates that this replica has applied.", lambda r: r.ledger.updates),
    "duplicates": (
        "Pushes that this replica has refused because it had them.",
        lambda r: r.ledger.duplicates,
    ),
}
STALENESS = "Versions that the applied updates had missed."

Replicas = Callable[[], Sequence[Replica]]


class ShardMetrics:
    """The metrics of all replicas on one Dask worker; a collector for prometheus_client."""

    def __init__(self) -> None:
        self.hosts: list[tuple[Mapping[str, str], Replicas]] = []  # the labels of each

    def describe(self) -> Sequence[Any]:
        """Return nothing: which metrics there are is known when they are requested."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        from prometheus_client import core

        rows = [
            ({**labels, "shard": str(each.shard)}, each)
            for labels, replicas in list(self.hosts)
            for each in replicas()
        ]
        if not rows:
            return
        names = sorted({name for labels, _ in rows for name in labels})

        def values(labels: Mapping[str, str]) -> list[str]:
            return [labels.get(name, "") for name in names]

        for metric, (text, value) in {**GAUGES, **COUNTERS}.items():
            make = core.GaugeMetricFamily if metric in GAUGES else core.CounterMetricFamily
            family = make(f"dps_shard_{metric}", text, labels=names)
            for labels, replica in rows:
                family.add_metric(values(labels), float(value(replica)))
            yield family
        staleness = core.HistogramMetricFamily("dps_shard_staleness", STALENESS, labels=names)
        for labels, replica in rows:
            buckets = list(zip(BOUNDS, accumulate(replica.ledger.staleness), strict=True))
            staleness.add_metric(values(labels), buckets, float(replica.ledger.staleness_sum))
        yield staleness


def publish(
    dask_worker: distributed.Worker, labels: Mapping[str, str], replicas: Replicas
) -> Callable[[], None]:
    """Add a host's replicas to the metrics of its Dask worker; return what removes them."""
    if not platform_of(dask_worker).serves_metrics or find_spec("prometheus_client") is None:
        return lambda: None
    from prometheus_client import REGISTRY

    def registered() -> ShardMetrics:
        metrics = ShardMetrics()
        REGISTRY.register(metrics)
        return metrics

    metrics = made_once(dask_worker, NAME, registered)
    host = labels, replicas
    metrics.hosts.append(host)

    def withdraw() -> None:
        metrics.hosts.remove(host)
        if not metrics.hosts:
            del state_of(dask_worker)[NAME]
            REGISTRY.unregister(metrics)

    return withdraw
