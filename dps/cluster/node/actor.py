"""The Dask actors of a node: one hosts shards or the state store, one evaluates the weights.

Their methods are coroutines, so Dask runs them on the node's event loop; steps of the update rule
on large shards go to threads (`dps.protocol.executor`), so that heartbeats are not held up.

The metrics of shards are for Prometheus, on the endpoint where Dask serves its own: `/metrics`.
They are computed when they are requested. Without the package prometheus_client there are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.cluster.node.member import Member
from dps.cluster.platform import SYSTEM, made_once, platform_of, state_of
from dps.cluster.transport.calls import Meter, begin_answer
from dps.cluster.transport.memory import private
from dps.core.arguments import as_number, is_name
from dps.core.ranges import shown
from dps.core.shard import ShardState
from dps.errors import ConfigurationError, DpsError
from dps.events import Evaluated, EvaluationMissed, Event, Reported
from dps.observe.history import EVALUATOR
from dps.protocol import wire
from dps.protocol.client.client import Client
from dps.protocol.executor import Cores
from dps.protocol.group import Group
from dps.protocol.server.node import ServerNode
from dps.protocol.server.replica import STALENESS_BOUNDS, Replica
from dps.protocol.server.shard_server import ShardServer
from dps.protocol.transport import Endpoint

if TYPE_CHECKING:
    import distributed

METRICS = "dps-metrics"
BOUNDS = (*map(str, STALENESS_BOUNDS), "+Inf")
GAUGES: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "version": ("Updates in the state of the shard.", lambda r: r.state.version),
    "epoch": ("Number of the current configuration of the shard's replicas.", lambda r: r.epoch),
    "head": ("Whether clients push to this replica.", lambda r: r.is_head),
    "waiting": ("Pushes received and not yet acknowledged.", lambda r: r.ledger.waiting),
    "uncommitted": (
        "Operations applied here that the next replica or store has not acknowledged.",
        lambda r: r.uncommitted,
    ),
}
COUNTERS: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "updates": ("Updates that this replica has applied.", lambda r: r.ledger.updates),
    "duplicates": (
        "Pushes that this replica ignored as duplicates.",
        lambda r: r.ledger.duplicates,
    ),
}
STALENESS = "Staleness of the applied updates, in versions."

Replicas = Callable[[], Sequence[Replica]]


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
        self._withdraw_metrics = publish(member.dask_worker, labels, lambda: self._host.replicas)
        member.dask_worker.loop.add_callback(self._start)

    async def handle(self, link: str, *frames: np.ndarray) -> wire.Frames:
        """Carry out one message; returns the frames of its reply, which may carry an error."""
        if self._links.disturbed:
            await self._links.passage("in")
        begun = self._begin_answer(link, list(frames))
        return begun if isinstance(begun, list) else await begun

    def begin(
        self, link: str, *frames: np.ndarray
    ) -> wire.Frames | Coroutine[Any, Any, wire.Frames]:
        """Carry out one message as `handle` does, at once if nothing has to be awaited."""
        if self._links.disturbed:
            return self.handle(link, *frames)
        return self._begin_answer(link, list(frames))

    def states(self) -> dict[int, ShardState]:
        """Return the state of each replica on this node, for checks."""
        return {replica.shard: replica.state for replica in self._host.replicas}

    async def finish(self) -> None:
        """Stop serving and send the last events; the actor is of no use afterwards."""
        if self._finished:
            return
        self._finished = True
        self._withdraw_metrics()
        await self._member.tasks.close()
        await self._host.close()
        self._cores.close()
        self._member.port.handlers.pop(self._key, None)
        await self._member.exit()

    def _begin_answer(
        self, link: str, frames: wire.Frames
    ) -> wire.Frames | Coroutine[Any, Any, wire.Frames]:
        begun = begin_answer(self._host.at_once, self._host.carry_out, self._meter, link, frames)
        wait = self._links.disturbed or not isinstance(begun, list)
        return self._let_out(begun) if wait else begun

    async def _let_out(self, begun: wire.Frames | Coroutine[Any, Any, wire.Frames]) -> wire.Frames:
        reply = begun if isinstance(begun, list) else await begun
        if self._links.disturbed:
            await self._links.passage("out")
        return reply

    def _start(self) -> None:
        self._member.enter()
        self._member.port.handlers[self._key] = self.begin
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
        self.hosts: list[tuple[Mapping[str, str], Replicas]] = []  # the labels of each

    def describe(self) -> Sequence[Any]:
        """Return nothing: the metrics are only known when they are requested."""
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
        values = [[labels.get(name, "") for name in names] for labels, _ in rows]
        for metric, (text, value) in {**GAUGES, **COUNTERS}.items():
            make = core.GaugeMetricFamily if metric in GAUGES else core.CounterMetricFamily
            family = make(f"dps_shard_{metric}", text, labels=names)
            for of_row, (_, replica) in zip(values, rows, strict=True):
                family.add_metric(of_row, float(value(replica)))
            yield family
        staleness = core.HistogramMetricFamily("dps_shard_staleness", STALENESS, labels=names)
        for of_row, (_, replica) in zip(values, rows, strict=True):
            buckets = list(zip(BOUNDS, accumulate(replica.ledger.staleness), strict=True))
            staleness.add_metric(of_row, buckets, float(replica.ledger.staleness_sum))
        yield staleness


def publish(
    dask_worker: distributed.Worker, labels: Mapping[str, str], replicas: Replicas
) -> Callable[[], None]:
    """Add a host's replicas to the metrics of its Dask worker; return a function to remove them."""
    # The registry is the program's, and would keep killed processes of virtual time.
    if platform_of(dask_worker) is not SYSTEM or find_spec("prometheus_client") is None:
        return lambda: None
    from prometheus_client import REGISTRY

    metrics = made_once(dask_worker, METRICS, ShardMetrics)
    if not metrics.hosts:
        REGISTRY.register(metrics)
    host = labels, replicas
    metrics.hosts.append(host)

    def withdraw() -> None:
        metrics.hosts.remove(host)
        if not metrics.hosts:
            del state_of(dask_worker)[METRICS]
            REGISTRY.unregister(metrics)

    return withdraw


# The user's function: it gets the weights by name, and returns what `scored` takes.
Score = Callable[[Mapping[str, np.ndarray]], Any]


class EvaluatorActor:
    """Scores a snapshot every `every` seconds until it is finished; a Dask actor."""

    def __init__(self, group: Group, score: Score, every: float, node: str, key: str) -> None:
        self._member = Member(group, node, "evaluator", Meter())
        self._client = Client(group, self._member.transport)
        self._group = group
        self._score = score
        self._every = every
        self._key = key
        self._has_read = asyncio.Event()
        self._is_last = asyncio.Event()
        self._member.dask_worker.loop.add_callback(self._start)

    async def read(self) -> None:
        """Wait until the first snapshot is read: later updates are not in it."""
        await self._has_read.wait()

    async def finish(self) -> None:
        """Score once more, send the last events and stop."""
        if not self._is_last.is_set():
            self._is_last.set()
            await asyncio.wait([self._evaluating])
            await self._client.close()
            await self._member.exit()

    def _start(self) -> None:
        self._member.enter()
        tasks = self._member.tasks
        self._evaluating = tasks.keep(self._evaluate_forever, self._group.timings.flush)
        tasks.start(self._member.finish_when_released(self._key, self.finish))
        self._member.record(lambda: None)

    async def _evaluate_forever(self) -> None:
        loop, hold = asyncio.get_running_loop(), self._group.timings.hold
        while True:
            is_last, due = self._is_last.is_set(), loop.time() + self._every
            # The first and the last evaluation cannot be repeated later.
            needs_time = is_last or not self._has_read.is_set()
            await self._evaluate(max(self._every, hold if needs_time else 0.0))
            if is_last:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._is_last.wait()

    async def _evaluate(self, seconds: float) -> None:
        clock, record = self._member.clock, self._member.recorder
        try:
            async with asyncio.timeout(seconds):
                await self._client.pull()
        except (TimeoutError, DpsError):
            reason = f"the shards could not be read within {seconds:g} s"
            record(EvaluationMissed(clock.now(), reason))
            return
        finally:
            self._has_read.set()
        read, versions = clock.now(), self._client.versions()
        weights = self._client.own_weights(self._client.read_point(), private)

        def events() -> list[Event]:
            try:
                return scored(self._score(weights), read, sum(versions) / len(versions))
            except BaseException as error:  # noqa: BLE001 - any error of the user's code
                return [EvaluationMissed(read, f"the score raised {error!r}", score_failed=True)]

        for event in await asyncio.get_running_loop().run_in_executor(None, events):
            record(event)


def scored(returned: Any, read: float, version: float) -> list[Event]:
    """Return the events of a score of weights that were read at time `read`, of mean `version`."""
    try:
        match returned:
            case tuple() | list() if len(returned) in (2, 4):
                numbers = (as_number("", each) for each in returned)
                return [Evaluated(read, version, *numbers)]
            case Mapping() if returned and all(map(is_name, returned)):
                named = {name: as_number(name, each) for name, each in returned.items()}
            case _:
                named = {"loss": as_number("", returned)}
    except ConfigurationError:
        reason = (
            f"the score returned {shown(returned)}, expected a number (the loss), a pair of loss "
            "and accuracy, or a mapping of names to numbers"
        )
        return [EvaluationMissed(read, reason, score_failed=True)]
    step = (round(version),)
    return [
        Reported(read, EVALUATOR, 0, name, (read,), (0,), (number,), step)
        for name, number in named.items()
    ]
