"""Leased data, as a training function sees it: an iterator over batches."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from distributed import Worker as DaskWorker
from distributed.utils_comm import gather_from_workers

from dps.core.leases import Division, chosen
from dps.core.updates import Batch
from dps.errors import CapacityError, ConfigurationError
from dps.protocol.client.client import Client
from dps.protocol.messages import Leased


@dataclass(frozen=True, slots=True)
class Leases:
    """The data of which the workers of a run lease batches.

    If `is_key`, the `source` is the key of a Dask future. That is no dependency of the workers'
    tasks, because Dask would start these only where it is, and not on nodes that are new.
    """

    run: str
    division: Division
    source: Any
    is_key: bool = False

    async def data(self, node: DaskWorker) -> Any:
        """Return the data, which a node that is new fetches from another one."""
        key = self.source
        if not self.is_key:
            return self.source
        if key in node.data:
            return node.data[key]
        holders = await node.scheduler.who_has(keys=[key])
        found, *_ = await gather_from_workers(holders, rpc=node.rpc)
        if key not in found:
            raise CapacityError("all nodes that had the data of the run are lost: start it again")
        return found[key]


class Requests(NamedTuple):
    """The requests of a worker: how to begin one, and those that are under way."""

    begin: Callable[[Coroutine[Any, Any, Any]], Future[Any]]
    under_way: Callable[[], list[Future[Any]]]
    leaving: Callable[[], bool]  # whether the worker is to make no more


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

    def __init__(self, leases: Leases, data: Any, client: Client, requests: Requests) -> None:
        self.epoch = 0
        self.division = leases.division
        self._run = leases.run
        self._data = data
        self._client = client
        self._requests = requests
        self._last: int | None = None  # the lease that is, or was, worked on
        self._held: dict[int, list[Future[Any]]] = {}  # the unfinished requests of earlier leases
        self._open: Batch | None = None  # was yielded, and is to be pushed
        # Leases of two epochs may alternate.
        self._order = lru_cache(maxsize=2)(self.division.order)

    def __iter__(self) -> Iterator[Any]:
        while (taken := self._take()) is not None:
            yield from self._of(taken)

    def to_push(self, is_needed: bool) -> Batch | None:
        """Return the batch that a push is of; raise an error if there is none and `is_needed`."""
        batch, self._open = self._open, None
        if batch is None and is_needed:
            raise ConfigurationError(
                "there is no batch for this push: each batch needs exactly one, in the loop over "
                "the batches"
            )
        return batch

    def _of(self, taken: Leased) -> Iterator[Any]:
        assert taken.lease is not None
        client, division, epoch = self._client, self.division, taken.lease.epoch
        incarnation, order = client.incarnation, self._order(epoch)
        for batch in taken.batches():
            # A worker that was given up has no leases.
            if self._requests.leaving() or client.incarnation != incarnation:
                return
            self.epoch, self._open = epoch, batch
            yield chosen(self._data, division.indices(epoch, batch.number, order))
            if self._open is not None:
                raise ConfigurationError(
                    f"batch {batch.number} of epoch {epoch} was not pushed: each batch needs "
                    "exactly one push before the next one"
                )

    def _take(self) -> Leased | None:
        under_way, begin = self._requests.under_way, self._requests.begin
        if self._last is not None:
            self._held[self._last] = under_way()
        while not self._requests.leaving():
            self._held = {
                number: left
                for number, sent in self._held.items()
                if (left := [each for each in sent if not each.done()])
            }
            request = self._client.take_lease(self._run, self.division, [*self._held])
            reply: Leased = begin(request).result()
            if reply.lease is not None:
                self._last = reply.lease.number
                return reply
            if reply.ended:
                return None
            wait(under_way())
            begin(self._client.idle()).result()
        return None
