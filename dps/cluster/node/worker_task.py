"""The Dask task of a worker: how it joins the group, runs the training function and leaves.

The task's thread runs the training function; joining, recording and leaving run on the node's event
loop, as all code of the protocol does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast

import numpy as np
from distributed import get_worker
from distributed.sizeof import safe_sizeof

from dps.cluster.heads import ask_heads
from dps.cluster.names import topic
from dps.cluster.node.batches import Data, Leases
from dps.cluster.node.logs import SILENT, dropped, keep_quiet, why_dropped, worker_log
from dps.cluster.node.member import Member
from dps.cluster.node.worker import Place, Worker
from dps.cluster.transport.calls import meter_of
from dps.core.arguments import check_returned
from dps.core.consistency import ASP
from dps.core.functions import RESULT_BYTES, pack, unpack
from dps.core.updates import UpdateId
from dps.errors import ConfigurationError, ResultLost, ShardUnavailable, UpdatesDropped
from dps.events import Acked, Filtered, Reported
from dps.protocol.client.client import Caller, Client
from dps.protocol.client.read_point import ReadPoint
from dps.protocol.client.shard_client import Outcome
from dps.protocol.group import Group
from dps.protocol.messages import Loss, Returned

T = TypeVar("T")

_HOW_ENDED = {SystemExit: "called sys.exit", KeyboardInterrupt: "was interrupted"}


def run_worker(
    group: Group, train: Callable[..., T], place: Place, share: Sequence[Any] | Leases | None = None
) -> T:
    """Run a training function as a worker of the group; this is the Dask task.

    `share` are this worker's partitions of a collection, if the workers share one, or leases of
    batches. Returns what `train` returns; raises `UpdatesDropped` if most of the worker's updates
    were dropped. When `train` raises, the worker leaves the group, so that the others do not wait
    for it, and the error goes to the Dask future.
    """

    def of_worker(worker: Worker) -> T:
        given = worker.batches or share
        return train(worker) if given is None else train(worker, given)

    leases = share if isinstance(share, Leases) else None
    return cast(T, _Task(group, place, leases).run(of_worker))


class _Task:
    """A worker's client and records on its node, from before it joins until after it has left."""

    # In the task's thread, as `run` and `_report`; the rest runs on the node's event loop.
    def __init__(self, group: Group, place: Place, leases: Leases | None) -> None:
        dask_worker = get_worker()
        self._group = group
        self._place = place
        self._data = None if leases is None else Data(leases, dask_worker)
        self._name = place.peers[place.index]
        self._key = str(dask_worker.get_current_task())
        self._drops_are_logged = group.on_loss == SILENT
        keep_quiet()
        node = place.nodes.get(dask_worker.address, str(dask_worker.name))
        member = self._member = Member(group, node, "worker", meter_of(dask_worker, group.name))
        caller = Caller(
            self._name,
            stops=place.stops,
            on_ack=self._note,
            on_loss=self._log_loss,
            is_cancelled=self._is_cancelled,
            watched=lambda: member.presence.watched,
        )
        self._client = Client(group, member.transport, caller)
        self._lock = threading.Lock()
        self._reports: dict[str, list[tuple[float, int, float, int]]] = {}
        self._steps = 0
        self._acks: list[tuple[float, int, int, int, Outcome]] = []
        self._filtered = self._client.filtered

    def run(self, train: Callable[[Worker], Any]) -> Any:
        """Call the training function between joining the group and leaving it."""
        begin = self._member.begin
        begin(self._begin()).result()
        reason, returned = "failed", None
        try:
            worker = begin(self._enter()).result()
            if isinstance(worker, Returned):
                reason = ""  # it did not join
                return self._result_of(worker)
            result = train(worker)
            check_returned("the training function", result)
            reason = "finished"
            if not _mostly_dropped(worker):  # otherwise the task fails, and may be started again
                returned = Returned(self._key, _packed(result))
        except BaseException as error:
            if isinstance(error, (Exception, *self._member.platform.kills)):
                raise
            # On these, Dask would end the node with everything on it, or wait for ever.
            how = _HOW_ENDED.get(type(error), "raised a BaseException")
            text = f"the training function of {self._name} {how}: {error!r}. A worker ends when "
            failure = RuntimeError(f"{text}its function returns")
            raise failure.with_traceback(error.__traceback__) from None
        finally:
            begin(self._end(reason, returned)).result()
        if _mostly_dropped(worker):  # the last updates were acknowledged only as it left
            raise UpdatesDropped(
                f"{worker.dropped} of the {worker.pushed} updates of {self._name} were dropped, "
                f"not applied: {why_dropped(self._group)}"
            )
        return result

    async def _begin(self) -> None:
        self._member.enter()
        await self._member.presence.registered()
        if self._data is not None and not self._data.leases.division.partitions:
            await self._data.read(0)  # before others wait for this worker
        self._member.record(self._flush)

    async def _enter(self) -> Worker | Returned:
        """Join the group, under a new incarnation if a worker of this name has joined before."""
        client, address = self._client, self._member.dask_worker.address
        returned = await client.enter(address, self._member.node, self._key)
        if returned is not None:  # Dask repeats a task whose result was lost with its node
            return returned
        # Before the second incarnation nothing was pushed under this name.
        done = await self._done_before() if client.incarnation > 1 else 0
        if not isinstance(self._group.consistency, ASP):
            # Bounds on how far workers are apart count from when all workers of one `run` have
            # joined: one that began alone would be ahead by the delay of the others. After this
            # time the training begins without the missing ones.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._group.timings.unavailable):
                    await self._applied(self._place.peers)
        return Worker(client, self._member, self._report, self._place, done, self._data)

    async def _end(self, reason: str, returned: Returned | None) -> None:
        """Leave the group for a reason (none: it has not joined), and send the last events."""
        try:
            if reason:
                await self._client.leave(reason, returned)
        finally:
            await self._client.close()
            await self._member.exit()

    def _result_of(self, returned: Returned) -> Any:
        if returned.result is None:
            raise ResultLost(
                f"the result of {self._name} was lost with the node that held it. The weights have "
                "its updates, so its function is not called again. A result outlives its node if "
                f"it has at most {RESULT_BYTES >> 20} MiB and consists of None, numbers, strings, "
                "arrays of numbers, and lists, tuples or string-keyed dicts of these. Gather any "
                "other result as soon as its future is done, or write it to a file"
            )
        return unpack(returned.result)

    def _is_cancelled(self) -> bool:
        task = self._member.dask_worker.state.tasks.get(self._key)
        return task is None or task.state == "cancelled"

    def _note(self, shard: int, update: UpdateId, version: int, outcome: Outcome) -> None:
        if self._member.recorder.on:
            now = self._member.clock.now()
            self._acks.append((now, shard, update.seq, version, outcome))
        if outcome == "dropped" and not self._drops_are_logged:
            self._drops_are_logged = True
            worker_log.warning("dps: %s", dropped(self._group, self._name))
            self._member.dask_worker.log_event(topic("dropped", self._group.name), self._name)

    def _report(self, metrics: Mapping[str, float], read: ReadPoint | None) -> None:
        self._steps += 1
        now, version = self._member.clock.now(), read.version if read is not None else None
        seen = -1 if version is None else version
        with self._lock:
            for name, value in metrics.items():
                self._reports.setdefault(name, []).append((now, self._steps, value, seen))

    def _flush(self) -> None:
        client, record = self._client, self._member.recorder
        now, source = self._member.clock.now(), (client.worker, client.incarnation)
        with self._lock:
            reports, self._reports = self._reports, {}
        for name, rows in reports.items():
            record(Reported(now, *source, name, *zip(*rows, strict=True)))
        acks, self._acks = self._acks, []
        if acks:
            record(Acked(now, *source, *zip(*acks, strict=True)))
        if record.on and client.filtered != self._filtered:
            self._filtered = client.filtered
            record(Filtered(now, *source, **self._filtered))

    def _log_loss(self, loss: Loss) -> None:
        if self._group.on_loss != SILENT:
            name = self._group.name
            worker_log.warning("dps: of the updates of %s, %s (group %s)", self._name, loss, name)

    async def _done_before(self) -> int:
        """Return how many updates the worker of this name has, on the shard that has most."""
        limit = self._group.timings.unavailable  # as long as a push waits
        try:
            async with asyncio.timeout(limit):
                return max(applied.get(self._name, 0) for applied in await self._applied(()))
        except TimeoutError:
            raise ShardUnavailable(
                f"{self._name}: a shard did not report its status within {limit:g} s"
            ) from None

    async def _applied(self, expected: Sequence[str]) -> list[Mapping[str, int]]:
        """Return each worker's number of updates on each shard, once all know those `expected`."""
        while True:
            await self._client.router.table()  # raises if the group is closed
            self._client.may_go_on()  # raises if the training is stopped
            replies = await ask_heads(self._client.router)
            if all(r is not None and r.applied.keys() >= set(expected) for r in replies):
                return [r.applied for r in replies if r is not None]
            await asyncio.sleep(self._group.timings.retry)


def _mostly_dropped(worker: Worker) -> bool:
    return worker.dropped > worker.pushed / 2


def _packed(result: Any) -> np.ndarray | None:
    """Return a result as bytes for the coordinator; None if too large, or not restorable."""
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
