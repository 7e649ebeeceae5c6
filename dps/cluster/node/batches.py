"""Leased data, as a training function sees it: an iterator over batches."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from distributed import Worker as DaskWorker
from distributed.utils_comm import gather_from_workers

from dps.core.leases import Division, chosen
from dps.core.updates import Batch
from dps.errors import CapacityError, ConfigurationError
from dps.protocol.client.client import Client
from dps.protocol.messages import Leased

Indices = np.ndarray  # of the examples of a batch, int64
Begin = Callable[[Coroutine[Any, Any, Any]], Future[Any]]  # begins a request
UnderWay = Callable[[], list[Future[Any]]]  # the requests that have not ended
RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Leases:
    """The data of which the workers of a run lease batches.

    With `keys`, the data is that of Dask futures: one for each partition, or copies of the whole.
    They are no dependencies of the workers' tasks, because Dask would start these only where the
    data is.
    """

    run: str
    division: Division
    source: Any = None
    keys: tuple[Any, ...] = ()  # as Dask has them


class Data:
    """The data of a worker's leases; `fetched` is the partition that was read last."""

    def __init__(self, leases: Leases, node: DaskWorker) -> None:
        self.leases = leases
        self.fetched: tuple[int, Any] = (-1, None)
        self._node = node

    async def read(self, partition: int) -> Any:
        """Return a partition, which is fetched from another node if it is not on this one."""
        keys, partitions = self.leases.keys, self.leases.division.partitions
        if keys:
            rows = await self._fetch([keys[partition]] if partitions else keys)
        else:
            rows = self.leases.source
        self.fetched = partition, rows
        return rows

    async def _fetch(self, keys: Sequence[Any]) -> Any:
        """Return the data that all of these keys have."""
        node = self._node
        while not (here := [key for key in keys if key in node.data]):
            holders = await node.scheduler.who_has(keys=[*keys])
            for key, held_by in holders.items():
                gathered, *_ = await gather_from_workers({key: held_by}, rpc=node.rpc)
                if key in gathered:
                    return gathered[key]
            states = await node.scheduler.get_task_status(keys=[*keys])
            if all(state in (None, "erred") for state in states.values()):
                raise CapacityError("data of the run was lost with its nodes; start the run again")
            await asyncio.sleep(RETRY_SECONDS)  # Dask computes it again
        return node.data[here[0]]


class _Leased(NamedTuple):
    """A batch that is leased to this worker, in one of its incarnations."""

    lease: int
    epoch: int
    batch: Batch
    incarnation: int


class Batches:
    """The batches that a worker computes, one after the other; each needs exactly one push.

    It takes a lease whenever it needs one, and ends when every shard has applied every batch of the
    last epoch, or when the worker is asked to leave. Not thread-safe.

    Attributes
    ----------
    epoch
        That of the last batch, from 0.
    division
        How the data is divided.

    Examples
    --------
    >>> from dps.testing import VirtualCluster
    >>> def train(worker, batches):
    ...     for x in batches:
    ...         worker.push({"sum": -x.sum(axis=0)})
    >>> with VirtualCluster() as cluster:
    ...     with ParameterServer(cluster, {"sum": np.zeros(2)}, optimizer=SGD(1.0)) as ps:
    ...         ps.run(train, data=np.ones((7, 2)), batch_size=3, epochs=2)[0].result()
    ...         ps.pull()
    {'sum': array([14., 14.])}
    """

    def __init__(
        self,
        data: Data,
        client: Client,
        begin: Begin,
        under_way: UnderWay,
        leaving: Callable[[], bool],
    ) -> None:
        self.epoch = 0
        self.division = data.leases.division
        self._run = data.leases.run
        self._data = data
        self._partition = 0  # that of the last batch
        self._client = client
        self._begin, self._under_way, self._leaving = begin, under_way, leaving
        self._last = 0  # the number of the last lease
        self._left: deque[_Leased] = deque()  # leased, and not begun
        # Leases, and once all their batches were begun, the requests under way then.
        self._held: dict[int, list[Future[Any]]] = {}
        self._open: Batch | None = None  # was begun, and is to be pushed
        # Leases of two epochs may alternate.
        self._order = lru_cache(maxsize=2)(self.division.order)

    def __iter__(self) -> Iterator[Any]:
        while self.more():
            while (indices := self.begin()) is not None:
                partition, rows = self._data.fetched
                if partition != self._partition:
                    rows = self._begin(self._data.read(self._partition)).result()
                yield chosen(rows, indices)

    def more(self) -> bool:
        """Wait until batches are leased; return False at the end. For loaders."""
        # A worker that was given up has no leases.
        present = [each for each in self._left if each.incarnation == self._client.incarnation]
        self._left = deque(present)
        while not self._leaving():
            if self._left:
                return True
            reply = self._take(waits=True)
            if reply.ended:
                return False
            if reply.lease is None:
                for sent in self._under_way():
                    with suppress(CancelledError):
                        sent.exception()  # waits, also on virtual time
                self._begin(self._client.idle()).result()
        return False

    def begin(self) -> Indices | None:
        """Begin the next batch and return its examples; None: `more` comes first. For loaders."""
        if self._open is not None:
            raise ConfigurationError(
                f"batch {self._open.number} of epoch {self.epoch} was not pushed, expected one "
                "push for each batch; with local steps, call exchange() after each batch"
            )
        if not self._left or self._leaving():
            return None
        leased = self._left.popleft()
        if leased.incarnation != self._client.incarnation:
            return None
        self.epoch, self._open = leased.epoch, leased.batch
        self._partition, indices = self._place(leased)
        return indices

    def ahead(self) -> Iterator[Indices]:
        """Yield the examples of batches that `begin` will return, while there are any to lease.

        For loaders, which read further batches while one is computed.
        """
        leased = list(self._left)
        while leased:
            yield from (indices for _, indices in map(self._place, leased))
            before = len(self._left)
            self._take(waits=False)
            leased = list(self._left)[before:]

    def to_push(self, is_needed: bool) -> Batch | None:
        """Return the batch that a push is of; raise an error if there is none and `is_needed`."""
        batch, self._open = self._open, None
        if batch is None and is_needed:
            raise ConfigurationError(
                "no batch is open for this push; expected one push for each batch, inside the loop "
                "over the batches"
            )
        return batch

    def _place(self, leased: _Leased) -> tuple[int, Indices]:
        """Return the partition of a batch, and its examples there."""
        return self._order(leased.epoch).indices(leased.batch.number)

    def _take(self, waits: bool) -> Leased:
        """Take a lease; `waits`: wait some time for batches that others may return."""
        for number in self._held.keys() - {each.lease for each in self._left}:
            requests = self._held.pop(number) or self._under_way()
            if unfinished := [each for each in requests if not each.done()]:
                self._held[number] = unfinished
        held = [*self._held]
        request = self._client.take_lease(self._run, self.division, self._last, held, waits)
        reply: Leased = self._begin(request).result()
        if reply.lease is not None:
            number, epoch = reply.lease.number, reply.lease.epoch
            batches, incarnation = reply.batches(), self._client.incarnation
            self._last, self._held[number] = number, []
            self._left.extend(_Leased(number, epoch, each, incarnation) for each in batches)
        return reply
