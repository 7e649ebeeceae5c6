"""The Dask actor that hosts shards, or the state store, on one node, and its metrics.

Its methods are coroutines, so Dask runs them on the node's event loop; steps of the update rule on
large shards go to threads (`dps.protocol.executor`), so that heartbeats are not held up.

The metrics are for Prometheus, on the endpoint where Dask serves its own: `/metrics`. They are
computed when they are requested. Without the package prometheus_client there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.cluster.node.member import Member
from dps.cluster.platform import SYSTEM, made_once, platform_of, state_of
from dps.cluster.transport.calls import Meter, answer
from dps.core.shard import ShardState
from dps.protocol import wire
from dps.protocol.executor import Cores
from dps.protocol.group import Group
from dps.protocol.server.metrics import STALENESS_BOUNDS, ReplicaMetrics
from dps.protocol.server.node import ServerNode
from dps.protocol.server.shard_server import ShardServer
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    import distributed

METRICS = "dps-metrics"
BOUNDS = (*map(str, STALENESS_BOUNDS), "+Inf")
GAUGES = {
    "version": "Updates that are in the state of the shard.",
    "epoch": "Number of the present configuration of the shard's replicas.",
    "head": "Whether clients push to this replica.",
    "waiting": "Pushes that have come and are not acknowledged.",
    "uncommitted": "Operations applied here that the next replica or store has not acknowledged.",
}
COUNTERS = {
    "updates": "Updates that this replica has applied.",
    "duplicates": "Pushes that this replica has refused because it had them.",
}
STALENESS = "Versions that the applied updates had missed."

Figures = Callable[[], Sequence[ReplicaMetrics]]


class HostActor:
    """A `ShardServer` as a Dask actor; made by the driver, called by `ClusterTransport`."""

    def __init__(self, group: Group, node: str, role: str, key: str) -> None:
        self._group = group
        self._key = key
        self._finished = False
        self._member = member = Member(group, node, role, Meter())
        self._links, self._meter = member.links, member.meter
        self._cores = Cores()
        server_node = ServerNode(
            group=group,
            name=node,
            me=Endpoint(member.dask_worker.address, key),
            transport=member.transport,
            clock=member.clock,
            emit=member.recorder,
            each=self._cores.each,
            watched=lambda: member.presence.watched,
        )
        self._host = ShardServer(server_node)
        member.stored = lambda: self._host.stored_bytes
        labels = {**group.labels, "group": group.name, "node": node}
        self._withdraw_metrics = publish(member.dask_worker, labels, self._host.figures)
        member.dask_worker.loop.add_callback(self._start)

    async def handle(self, link: str, *frames: np.ndarray) -> wire.Frames:
        """Carry out one message; returns the frames of its reply, which may carry an error."""
        if self._links.disturbed:
            await self._links.passage("in")
        reply = await answer(self._host.handle, self._meter, link, list(frames))
        if self._links.disturbed:
            await self._links.passage("out")
        return reply

    def states(self) -> dict[int, ShardState]:
        """Return the state of each replica on this node, for checks."""
        return self._host.states()

    async def finish(self) -> None:
        """Stop serving and send the last events; the actor is of no use afterwards."""
        if self._finished:
            return
        self._finished = True
        self._withdraw_metrics()
        await self._member.tasks.close()
        await self._host.close()
        self._cores.close()
        self._member.port.withdraw(self._key)
        await self._member.exit()

    def _start(self) -> None:
        self._member.enter()
        self._member.port.serve(self._key, self.handle)
        self._member.tasks.start(self._begin())
        self._member.tasks.start(self._member.finish_when_released(self._key, self.finish))
        if self._group.recorded:
            self._member.record(self._host.flush)

    async def _begin(self) -> None:
        await self._member.presence.registered()
        self._host.start()


class ShardMetrics:
    """The metrics of all replicas on one Dask worker; a collector for prometheus_client."""

    def __init__(self) -> None:
        self.hosts: list[tuple[Mapping[str, str], Figures]] = []  # the labels of each

    def describe(self) -> Sequence[Any]:
        """Return nothing: which metrics there are is known when they are requested."""
        return ()

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        from prometheus_client import core

        rows = [
            ({**labels, "shard": str(each.shard)}, each)
            for labels, figures in list(self.hosts)
            for each in figures()
        ]
        if not rows:
            return
        names = sorted({name for labels, _ in rows for name in labels})
        values = [[labels.get(name, "") for name in names] for labels, _ in rows]
        for metric, text in {**GAUGES, **COUNTERS}.items():
            make = core.GaugeMetricFamily if metric in GAUGES else core.CounterMetricFamily
            family = make(f"dps_shard_{metric}", text, labels=names)
            for of_row, (_, figures) in zip(values, rows, strict=True):
                family.add_metric(of_row, float(getattr(figures, metric)))
            yield family
        staleness = core.HistogramMetricFamily("dps_shard_staleness", STALENESS, labels=names)
        for of_row, (_, figures) in zip(values, rows, strict=True):
            buckets = list(zip(BOUNDS, accumulate(figures.staleness), strict=True))
            staleness.add_metric(of_row, buckets, float(figures.staleness_sum))
        yield staleness


def publish(
    dask_worker: distributed.Worker, labels: Mapping[str, str], figures: Figures
) -> Callable[[], None]:
    """Add a host's replicas to the metrics of its Dask worker; return what removes them."""
    # The registry is the program's, and would keep killed processes of virtual time.
    if platform_of(dask_worker) is not SYSTEM or find_spec("prometheus_client") is None:
        return lambda: None
    from prometheus_client import REGISTRY

    metrics = made_once(dask_worker, METRICS, ShardMetrics)
    if not metrics.hosts:
        REGISTRY.register(metrics)
    host = labels, figures
    metrics.hosts.append(host)

    def withdraw() -> None:
        metrics.hosts.remove(host)
        if not metrics.hosts:
            del state_of(dask_worker)[METRICS]
            REGISTRY.unregister(metrics)

    return withdraw
