"""The Dask task of a worker: how it joins the group, runs the training function and leaves.

The task's thread runs the training function; joining, recording and leaving run on the node's event
loop, as everything of the protocol does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from distributed import get_worker
from distributed.sizeof import safe_sizeof

from dps.cluster.node.audit import audit
from dps.cluster.node.connecting import transport_of
from dps.cluster.node.logs import DropLog, keep_quiet, log_own, why_dropped
from dps.cluster.node.presence import presence_of
from dps.cluster.node.recorder import (
    AckColumns,
    FilterCounts,
    ReportColumns,
    joined,
    keep_recording,
    recorded_tasks,
    recorder_of,
    sample,
)
from dps.cluster.node.shutdown import leave_of
from dps.cluster.node.worker import Worker
from dps.cluster.platform import keep_memory, platform_of
from dps.cluster.transport.calls import meter_of
from dps.cluster.transport.port import port_of
from dps.core.arguments import check_returned
from dps.core.consistency import ASP
from dps.core.functions import RESULT_BYTES, pack, unpack
from dps.core.updates import UpdateId
from dps.errors import ConfigurationError, ResultLost, ShardUnavailable, UpdatesDropped
from dps.events import ResourceSampled
from dps.protocol.client.client import Client
from dps.protocol.client.shard_client import Outcome
from dps.protocol.group import Group
from dps.protocol.messages import Returned
from dps.protocol.transport import Transport

T = TypeVar("T")

_HOW_ENDED = {SystemExit: "called sys.exit", KeyboardInterrupt: "was interrupted"}


def run_worker(
    group: Group,
    train: Callable[..., T],
    peers: Sequence[str],
    index: int,
    node_role: str,
    nodes: Mapping[str, str],
    stops: int = 0,
    data: Sequence[Any] | None = None,
) -> T:
    """Run a training function as a worker of the group; this is the Dask task.

    `peers` are the names of all workers that were started together, `index` is which one this is,
    `nodes` the names of nodes by their addresses, `stops` how often the training had been stopped
    before, `data` the partitions of this worker if it shares a collection with the others.
    Returns what `train` returns; raises `UpdatesDropped` if most of the worker's updates were
    dropped. When `train` raises, the worker leaves the group, so that the others do not wait for
    it, and the error goes to the Dask future.

    Dask computes a task again whose result was lost with its node. The work is done, so `train` is
    not called again: the result is the one that was recorded, or `ResultLost` is raised.
    """
    task = _Task(group, peers, index, node_role, nodes, stops)
    return cast(T, task.run(train if data is None else lambda worker: train(worker, data)))


class _Task:
    """A worker's client and records on its node, from before it joins until after it has left.

    Made in the task's thread; its coroutines run on the node's event loop.
    """

    def __init__(
        self,
        group: Group,
        peers: Sequence[str],
        index: int,
        node_role: str,
        nodes: Mapping[str, str],
        stops: int,
    ) -> None:
        self._dask_worker = get_worker()
        self._platform = platform_of(self._dask_worker)
        keep_memory(self._platform)
        self._loop = self._dask_worker.loop.asyncio_loop
        self._key = str(self._dask_worker.get_current_task())
        keep_quiet()
        self._group = group
        self._peers = peers
        self._index = index
        self._name = peers[index]
        self._node = nodes.get(self._dask_worker.address, str(self._dask_worker.name))
        self._node_role = node_role

        log_event, clock = self._dask_worker.log_event, self._platform.clock
        self._meter = meter_of(self._dask_worker, group.name)
        self._recorder = recorder_of(group, log_event)
        self._transport = transport_of(
            self._dask_worker, group, self._node, self._meter, self._recorder
        )
        self._drops = DropLog(group, self._name, log_event)
        self._acks = AckColumns(self._name, self._recorder, clock)
        self._reports = ReportColumns(self._name, self._recorder, clock)
        presence = self._presence = presence_of(self._dask_worker)
        self._tasks = recorded_tasks(self._recorder, clock, self._node)
        self._client = Client(
            group,
            self._transport,
            self._name,
            self._note,
            on_loss=partial(log_own, group, self._name),
            stops=stops,
            is_cancelled=self._is_cancelled,
            watched=lambda: presence.watched,
        )
        self._filters = FilterCounts(self._client, self._recorder, clock)

    def on_loop(self, request: Coroutine[Any, Any, T]) -> T:
        """Wait in the task's thread for what the event loop does."""
        return self._platform.begin(request, self._loop).result()

    def run(self, train: Callable[[Worker], Any]) -> Any:
        """Call the training function between joining the group and leaving it."""
        recording = self.on_loop(self.begin())
        reason, returned = "failed", None
        try:
            worker = self.on_loop(self.enter())
            if isinstance(worker, Returned):
                reason = ""  # it did not join
                return self._result_of(worker)
            result = train(worker)
            check_returned("the training function", result)
            reason = "finished"
            if not _mostly_dropped(worker):  # else the task fails, and may be started again
                returned = Returned(self._key, _packed(result))
        except BaseException as error:
            if isinstance(error, (Exception, *self._platform.kills)):
                raise
            # Dask would end the node by these, with all that others have there, or wait for ever.
            said = _HOW_ENDED.get(type(error), "raised what is no Exception")
            text = f"the training function of {self._name} {said}: {error!r}. A worker ends when "
            failure = RuntimeError(f"{text}its function returns")
            raise failure.with_traceback(error.__traceback__) from None
        finally:
            self.on_loop(self.end(recording, reason, returned))
        if _mostly_dropped(worker):
            raise UpdatesDropped(
                f"{worker.dropped} of the {worker.pushed} updates of {self._name} were dropped, "
                f"not applied: {why_dropped(self._group)}"
            )
        return result

    async def begin(self) -> asyncio.Task[None]:
        """Take the node for this task and record from now on; returns what records."""
        leave_of(self._dask_worker).enter(self._group.name)
        self._presence.enter(self._group.name)
        port_of(self._dask_worker).enter()
        await self._presence.registered()
        self._recorder(joined(self._node, self._node_role, self._platform))
        every = self._group.timings.flush
        return keep_recording(
            self._tasks, self._recorder, every, self._measure, self._flush, keeps=True
        )

    async def enter(self) -> Worker | Returned:
        """Join the group, under a new incarnation if one of this name was there before.

        Or return what the training function of this very task has returned, if it has.
        """
        client = self._client
        returned = await client.enter(self._dask_worker.address, self._node, self._key)
        if returned is not None:
            return returned
        for columns in (self._acks, self._reports, self._filters):
            columns.incarnation = client.incarnation
        done = 0
        if client.incarnation > 1:  # else nobody has pushed under this name
            done = await _done_before(self._name, self._group, client, self._transport)
        if not isinstance(self._group.consistency, ASP):
            await _until_joined(self._peers, self._group, client, self._transport)
        return Worker(
            client,
            self._platform,
            self._loop,
            reports=self._reports,
            leave=leave_of(self._dask_worker),
            index=self._index,
            workers=len(self._peers),
            done=done,
        )

    async def end(
        self, recording: asyncio.Task[None], reason: str, returned: Returned | None
    ) -> None:
        """Leave the group if it was joined, and hand over what is still to be recorded."""
        try:
            if reason:
                await self._client.leave(reason, returned)
        finally:
            await self._client.close()
            recording.cancel()
            self._flush()
            self._recorder(self._measure())
            self._recorder.send()
            port_of(self._dask_worker).exit()
            self._presence.exit(self._group.name)
            leave_of(self._dask_worker).exit(self._group.name)

    def _result_of(self, returned: Returned) -> Any:
        """The recorded result of an earlier run; raises `ResultLost` if only the node had it."""
        if returned.result is None:
            raise ResultLost(
                f"{self._name} had finished, and its result was lost with the node that held it. "
                "Its updates are in the weights, so its function is not called again. A result "
                f"outlives its node if it has {RESULT_BYTES >> 20} MiB at most and consists of "
                "None, numbers, texts, arrays of numbers, and lists, tuples or dicts by text of "
                "these: gather any other as soon as its future is done, or write it to a file"
            )
        return unpack(returned.result)

    def _is_cancelled(self) -> bool:
        task = self._dask_worker.state.tasks.get(self._key)
        return task is None or task.state == "cancelled"

    def _note(self, shard: int, update: UpdateId, version: int, outcome: Outcome) -> None:
        self._acks(shard, update, version, outcome)
        self._drops.note(outcome)

    def _flush(self) -> None:
        self._reports.flush()
        if self._recorder.on:
            self._acks.flush()
            self._filters.flush()

    def _measure(self) -> ResourceSampled:
        return sample(self._node, self._node_role, self._meter, platform=self._platform)


def _mostly_dropped(worker: Worker) -> bool:
    return worker.dropped > worker.pushed / 2


def _packed(result: Any) -> np.ndarray | None:
    """A result as bytes for the coordinator; None: it is large, or would come back as another."""
    if safe_sizeof(result) > RESULT_BYTES:
        return None
    try:
        packed = pack(result)
    except (ConfigurationError, RecursionError):
        return None
    return packed if _alike(result, unpack(packed)) else None


def _alike(value: Any, other: Any) -> bool:
    """Whether two values of equal content are of the same types, but for numpy's numbers."""
    if isinstance(value, np.generic):
        return True
    if isinstance(value, dict):
        value, other = tuple(value.values()), tuple(other.values())
    if isinstance(value, list | tuple):
        return type(value) is type(other) and all(map(_alike, value, other))
    return type(value) is type(other)


async def _done_before(name: str, group: Group, client: Client, transport: Transport) -> int:
    """How many updates of a worker of this name the shard has that has most of them.

    A shard that is down is waited for as long as a push would be.
    """

    async def on(shard: int) -> int:
        while True:
            await client.router.table()  # ends the wait when the group is closed
            client.may_go_on()
            reply = await audit(shard, client.router, transport, group.timings.call)
            if reply is not None:
                return reply.applied.get(name, 0)
            await asyncio.sleep(group.timings.retry)

    try:
        async with asyncio.timeout(group.timings.unavailable):
            return max([await on(shard) for shard in range(len(group.layout.shards))])
    except TimeoutError:
        raise ShardUnavailable(
            f"{name}: a shard did not say within {group.timings.unavailable:g} s how far it is"
        ) from None


async def _until_joined(
    workers: Sequence[str], group: Group, client: Client, transport: Transport
) -> None:
    """Wait until all of these workers take part, on every shard.

    The consistency models that bound how far workers are apart count from there: one that began
    alone would be ahead of the others by as much as they are late. One that does not come is
    waited for as long as a shard would be; then the training begins without it. There is nothing to
    wait for when the training was stopped.
    """

    async def present(shard: int) -> bool:
        await client.router.table()  # ends the wait when the group is closed
        client.may_go_on()
        reply = await audit(shard, client.router, transport, group.timings.call)
        return reply is not None and set(workers) <= reply.applied.keys()

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(group.timings.unavailable):
            for shard in range(len(group.layout.shards)):
                while not await present(shard):
                    await asyncio.sleep(group.timings.retry)
