"""The workers of a group: which are active, and how shards learn that one no longer is.

Shards wait for a worker as long as it is in their clock table. It enters there with its first
request, and is evicted from all shards when it leaves or is given up (see the table in
`dps.protocol.coordinator.liveness`). When a live worker that was given up renews its lease,
the reply refuses that, and the worker enters again as a new *incarnation* with its next push or
pull.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dps.core.consistency import ASP
from dps.core.functions import CALLS, names_of
from dps.core.updates import Operation, UpdateId
from dps.errors import DpsError, NotServing, TrainingStopped
from dps.events import WorkerJoined, WorkerLeft
from dps.protocol import messages as msg
from dps.protocol.lease import Leases
from dps.protocol.transport import Endpoint, Watched

if TYPE_CHECKING:
    from dps.protocol.coordinator.coordinator import Coordinator
    from dps.protocol.coordinator.shard_controller import ShardController


@dataclass(slots=True)
class _Worker:
    incarnation: int
    address: str = ""
    token: str = ""
    active: bool = True
    stops: int = 0
    watched: Watched | None = None
    may_push: bool = False  # shards accept updates after it was given up, while its process lives


class Workers:
    """All workers so far; `stops` counts stops of the training. Used from one event loop."""

    def __init__(self, coordinator: Coordinator) -> None:
        group = coordinator.group
        self.stops = 0
        self._coordinator = coordinator
        self._group = group
        self._known = {
            name: _Worker(incarnation, active=False)
            for name, incarnation in group.incarnations.items()
        }
        self._leases = Leases[str](group.timings, coordinator.clock)
        self._returned: dict[str, msg.Returned] = {}  # by the Dask task of the training function
        self._dismissed: set[str] = set()
        self._departed = asyncio.Condition()
        self.services: dict[type, Callable[[Any], Any]] = {
            msg.EnterWorker: self._enter,
            msg.RenewWorker: self._renew,
            msg.ExitWorker: self._exit,
            msg.Dismiss: self._dismiss,
            msg.StopTraining: self._stop_training,
        }
        coordinator.tasks.keep(lambda: self._leases.watch(self._fall_silent), group.timings.retry)

    @property
    def places(self) -> dict[str, tuple[str, bool]]:
        """The address of each worker so far, and whether it is active."""
        return {name: (worker.address, worker.active) for name, worker in self._known.items()}

    @property
    def active(self) -> dict[str, int]:
        """The active workers, with their incarnations."""
        return {name: worker.incarnation for name, worker in self._known.items() if worker.active}

    @property
    def donors(self) -> set[str]:
        """The active workers, by their names as holders of copies."""
        return {msg.donor_name(*worker) for worker in self.active.items()}

    # -- requests --------------------------------------------------------------------------------

    async def _enter(self, m: msg.EnterWorker) -> msg.Entered:
        before = self._known.get(m.worker)
        if before is not None and before.token == m.token:
            return msg.Entered(before.incarnation)
        if m.task in self._returned:
            return msg.Entered(0, self._returned[m.task])
        if m.stops < self.stops:  # it was under way when the training was stopped
            raise TrainingStopped(msg.STOPPED)
        incarnation = before.incarnation + 1 if before else 1
        self._coordinator.follow(m.watched)
        self._known[m.worker] = _Worker(
            incarnation, m.address, m.token, stops=m.stops, watched=m.watched
        )
        self._leases.grant(m.worker)
        now = self._coordinator.clock.now()
        self._coordinator.emit(WorkerJoined(now, m.worker, incarnation, m.node))
        if before is not None and before.active:  # another process has taken the name
            await self._coordinator.losses.left(m.worker, before.incarnation, displaced=True)
            self._coordinator.data.left(m.worker, before.incarnation)
        return msg.Entered(incarnation)

    async def _renew(self, m: msg.RenewWorker) -> msg.Renewed:
        await self._coordinator.losses.stated(m.worker, m.incarnation, m.statement)
        worker = self._known.get(m.worker)
        if worker is None or worker.incarnation != m.incarnation or not worker.active:
            return msg.Renewed(granted=False)
        self._leases.grant(m.worker)
        self._coordinator.follow(m.watched)
        worker.watched = m.watched
        return msg.Renewed(granted=True, leaving=m.worker in self._dismissed)

    async def _exit(self, m: msg.ExitWorker) -> None:
        self._dismissed.discard(m.worker)
        worker = self._known.get(m.worker)
        if m.returned is not None and worker is not None and worker.incarnation == m.incarnation:
            self._returned[m.returned.task] = m.returned
        losses = self._coordinator.losses
        await losses.stated(m.worker, m.incarnation, m.statement, final=True)
        await self._remove(m.worker, m.incarnation, m.reason)
        if m.called:  # unlike a silent worker, it asks for no result again
            await self._evict_from_all(UpdateId(f"{m.worker}{CALLS}", m.incarnation, 0))

    def _dismiss(self, m: msg.Dismiss) -> None:
        worker = self._known.get(m.worker)
        if worker is None or worker.active:
            self._dismissed.add(m.worker)

    async def _stop_training(self, m: msg.StopTraining) -> tuple[str, ...]:
        self.stops = max(self.stops, m.number)
        self._coordinator.data.notify()
        await self._coordinator.publish()

        def left() -> tuple[str, ...]:
            return tuple(name for name, w in self._known.items() if w.active and w.stops < m.number)

        with suppress(TimeoutError):
            async with asyncio.timeout(m.patience), self._departed:
                await self._departed.wait_for(lambda: not left())
        return left()

    # -- liveness --------------------------------------------------------------------------------

    async def lose(self, address: str) -> None:
        """Give up the workers at an address, so that shards no longer wait for them."""
        for name, worker in list(self._known.items()):
            if worker.address == address and worker.active:
                await self._remove(name, worker.incarnation, "lost")

    async def sighted(self, m: msg.Sighted) -> None:
        """Process a monitor's reports on the processes that are workers now."""
        sightings = {Watched(m.monitor, each.number): each for each in m.sightings}
        for name in list(self._known):
            worker = self._known[name]
            sighting = sightings.get(worker.watched) if worker.watched is not None else None
            if sighting is None:
                continue
            if sighting.state == "gone":
                await self._remove(name, worker.incarnation, "lost")
            elif not worker.active:
                continue
            elif sighting.state == "running":
                self._leases.vouch(name)
            elif sighting.seconds >= self._group.timings.stopped:
                await self._fall_silent(name)

    async def _fall_silent(self, name: str) -> None:
        self._leases.end(name)
        incarnation = self._known[name].incarnation
        self._coordinator.tasks.start(self._remove(name, incarnation, "silent"))

    async def _remove(self, name: str, incarnation: int, reason: str) -> None:
        worker = self._known.get(name)
        if worker is None or worker.incarnation != incarnation:
            return
        if not worker.active and (not worker.may_push or reason == "silent"):
            return
        left = WorkerLeft(self._coordinator.clock.now(), name, incarnation, reason)
        if worker.active:
            self._coordinator.emit(left)
        worker.active = False
        worker.may_push = reason == "silent" and isinstance(self._group.consistency, ASP)
        self._leases.end(name)
        try:
            if left.was_lost:
                await self._coordinator.losses.left(name, incarnation)
            await self._evict_from_all(UpdateId(name, incarnation, 0))
        finally:
            self._coordinator.data.left(name, incarnation)
        async with self._departed:
            self._departed.notify_all()

    # -- the clock tables of shards --------------------------------------------------------------

    async def admit_active(self, view: msg.View, host: Endpoint, early: bool = False) -> None:
        """Enter every active worker in a shard's clock table before it is served again.

        The restored state may be older than a worker's first request, so that no other worker
        would wait for it. `early`: before buffered gradients are applied. Afterwards workers would
        enter at the clocks of those that pushed these, too far ahead. It only keeps places, with
        incarnation 0: after a join with the present one, the shard would take gradients of earlier
        ones for duplicates. Raises `NotServing` if the shard's server cannot commit the joins.
        """
        if isinstance(self._group.consistency, ASP):
            return
        timings, ask = self._group.timings, self._coordinator.transport.call

        async def admit(worker: UpdateId) -> None:
            join = Operation("join", worker)
            request = msg.Push(view.shard, view.epoch, join, False, timings.hold)
            try:
                async with asyncio.timeout(timings.copy):
                    while isinstance(await ask(host, request, timings.call), msg.Waiting):
                        pass  # there is no room, or the join is not durable yet
            except TimeoutError:
                raise NotServing(f"shard {view.shard}: no join became durable") from None

        active = self.active.items()
        ids = [UpdateId(name, 0, n) if early else UpdateId(name, n, 0) for name, n in active]
        await asyncio.gather(*map(admit, ids))

    async def evict_absent(self, controller: ShardController) -> None:
        """Remove all workers that are gone from a shard's clock table."""
        workers = self._known.items()
        absent = [UpdateId(name, w.incarnation, 0) for name, w in workers if not w.active]
        if absent:
            await self._evict(controller, absent)

    async def _evict_from_all(self, gone: UpdateId) -> None:
        controllers = self._coordinator.controllers
        await asyncio.gather(*(self._evict(controller, [gone]) for controller in controllers))

    async def _evict(self, controller: ShardController, workers: Sequence[UpdateId]) -> None:
        view, deadline = controller.view, self._group.timings.call
        if not view.serving:
            return
        request = msg.Evict(view.shard, view.epoch, tuple(workers))
        # Shards have every update of these that was or will be acked.
        final = [gone for gone in workers if not self._may_push(gone)]
        try:
            call = self._coordinator.transport.call(view.chain[0], request, deadline)
            known: dict[str, int] = await call
        except DpsError:
            controller.wake()  # the shard is changing; it evicts again when it is settled
            return
        for gone in final:
            counts = {name: known[name] for name in names_of(gone.worker) if name in known}
            await self._coordinator.losses.has(view, gone.incarnation, counts)

    def _may_push(self, gone: UpdateId) -> bool:
        worker = self._known.get(gone.worker)
        return worker is not None and worker.may_push and worker.incarnation == gone.incarnation
