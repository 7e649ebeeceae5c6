"""Broken variants that wide schedules find out: of clocks, disks, lives, groups that end, machines.

Like `dps.sim.broken.protocol`: each says what it leaves out in its docstring.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dps.core.names import STORE_ROLES
from dps.core.shard import ShardState
from dps.protocol.client.routing_table import Router
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.coordinator.membership import Membership, _Member
from dps.protocol.coordinator.placement import ReplicaPlacement
from dps.protocol.coordinator.rebalancer import Rebalancer
from dps.protocol.coordinator.shard_controller import ShardController
from dps.protocol.durabilities import worker_cache
from dps.protocol.functions import CALLS
from dps.protocol.lease import Lease, Leases
from dps.protocol.messages import (
    Done,
    Entered,
    EnterWorker,
    Extend,
    Install,
    Table,
)
from dps.protocol.server.batching import Batching, evicted, is_evicted
from dps.protocol.server.replica import Replica
from dps.protocol.storage import checkpoint_files as files
from dps.protocol.storage import manifest as runs
from dps.protocol.storage import partial_files
from dps.protocol.storage.checkpoint_files import CheckpointFiles
from dps.protocol.storage.checkpoint_schedule import Checkpoints
from dps.protocol.storage.manifest import Saved
from dps.protocol.storage.part_choice import NEVER, choose
from dps.protocol.storage.parts import units_of
from dps.protocol.transport import Clock, Endpoint, Watched
from dps.sim.broken import variant as broken
from dps.sim.broken.variant import (
    any_case,
    caches,
    chains,
    checkpoints,
    cuts,
    gated,
    held_back,
    in_parts,
    rounds,
    spread,
    stores,
    timed,
)

instead_of = partial(broken.instead_of, wide=True)

# -- clocks and leases -----------------------------------------------------------------------------


class _WallClock:
    """A clock whose monotonic time is that of the calendar."""

    def __init__(self, clock: Clock) -> None:
        self.now = self.monotonic = clock.now


@instead_of(Lease, "__init__", "leases on the wall clock", any_case)
def _lease_on_the_calendar(self: Lease, timings: Any, clock: Clock) -> None:
    """Count leases on clocks that are set, on both sides."""
    _lease(self, timings, _WallClock(clock))


@instead_of(Leases, "__init__", "leases on the wall clock", any_case)
def _leases_on_the_calendar(self: Leases[Any], timings: Any, clock: Clock) -> None:
    """Count leases on clocks that are set, on both sides."""
    _leases(self, timings, _WallClock(clock))


@instead_of(Leases, "watch", "no grace after standing still", any_case)
async def _watch_without_grace(
    self: Leases[Any], on_over: Callable[[Any], Awaitable[None]]
) -> None:
    """Give everybody up whose messages a coordinator that stood still has not read yet."""
    while True:
        await asyncio.sleep(self._until_next(self._clock.monotonic()))
        now = self._clock.monotonic()
        for holder in [holder for holder, until in self._until.items() if until <= now]:
            if self._until.get(holder, now + 1) <= now:
                await on_over(holder)


@instead_of(Membership, "renew", "renewed, though ended", any_case)
async def _renew_the_dead(
    self: Membership, host: Endpoint, life: int, watched: Watched | None = None
) -> bool:
    """Grant a lease to a process that is proven to have ended."""
    if host in self._ended:
        self._known.setdefault(host, _Member(life))
        return True
    return await _renew(self, host, life, watched)


# -- disks -----------------------------------------------------------------------------------------


@instead_of(files, "_sync", "bytes not synced", checkpoints)
def _bytes_left(fs: Any, file: Any) -> None:
    """Rename a file whose bytes may not be on the disk yet."""


@instead_of(files, "_sync_folder", "folder not synced", checkpoints)
def _names_left(fs: Any, folder: str) -> None:
    """Count on a name that may not be on the disk yet."""


# -- promises in seconds ---------------------------------------------------------------------------


@instead_of(Checkpoints, "_saved", "age counted from the end of the write", timed)
def _saved_just_now(self: Checkpoints, version: int, noted: float) -> None:
    """Take what came while a write was under way for new when it ends."""
    _saved(self, version, self._clock.monotonic())


# -- reading ---------------------------------------------------------------------------------------


@instead_of(Router, "_keep", "older tables taken", any_case)
def _keep_any(self: Router, table: Table) -> Table:
    """Take a table that has been overtaken on its way."""
    known, self._table = self._table, None
    if known is not None and known.version == table.version:
        self._table = known
        return known
    return _keep(self, table)


# -- who is who ------------------------------------------------------------------------------------


@instead_of(Coordinator, "_enter_worker", "a second start for the same request", any_case)
async def _enter_each_time(self: Coordinator, m: EnterWorker) -> Entered:
    """Begin another incarnation when a request to enter arrives twice."""
    return await _enter_worker(self, replace(m, token=f"{m.token} {id(object())}"))


@instead_of(Coordinator, "_enter_worker", "no lease on entering", gated)
async def _enter_without_lease(self: Coordinator, m: EnterWorker) -> Entered:
    """Wait forever for a worker that ends before it is heard of again."""
    before = self._workers.get(m.worker)
    entered = await _enter_worker(self, m)
    if self._workers.get(m.worker) is not before:
        self._worker_leases.end(m.worker)
    return entered


@instead_of(Batching, "_refused", "held update of an earlier incarnation", rounds)
def _refused_only_if_evicted(self: Batching, held: Any) -> bool:
    """Acknowledge what a worker had sent before it entered again, as if it were there."""
    update = held.operation.id
    if not is_evicted(self._replica.state, update):
        return False
    self._refuse(held, evicted(update))
    return True


@instead_of(Replica, "replay", "late updates of a lost worker", held_back)
async def _replay_of_anybody(self: Replica, epoch: int, buffered: Any, late: bool = False) -> None:
    """Apply what a worker brings that nobody waits for any more."""
    await _replay(self, epoch, buffered)


# -- commits and moves -----------------------------------------------------------------------------


@instead_of(Replica, "extend", "newcomer given what is not committed", stores)
async def _extend_with_all(self: Replica, m: Extend) -> Done:
    """Copy a state to a newcomer that takes it for committed, though it is not."""
    self.must_be_in(m.epoch)
    chain, commits, state = (*self.chain, m.host), self._commits, self.state
    with commits.keeping_later_than(state):
        given = self.shard, m.epoch, chain, state, "replica", self._persistence.saved
        install = Install(*given, m.keepers)
        copy = self._transport.call(m.host, install, self._group.timings.copy, "replicate")
        await commits.until_interrupted(copy)
        async with self.lock:
            self.must_be_in(m.epoch)
            commits.successor = m.host
            await commits.until_interrupted(commits.pass_on(m.host, state.index, commits.index))
    return Done()


@instead_of(ShardController, "_fence_forsaken", "forsaken hosts not fenced", cuts)
async def _fence_nobody(self: ShardController, host: Endpoint) -> None:
    """Leave hosts in the epoch from which a shard goes back."""
    self._forsaken = ()


@instead_of(Rebalancer, "may_hold", "drained, but chosen", spread)
def _may_hold_when_drained(self: Rebalancer, info: Any, shard: int) -> bool:
    """Give replicas to a host that is to be emptied."""
    if info.role in STORE_ROLES:
        return False
    return self.servers is not None or info.home in (-1, shard)


@instead_of(ReplicaPlacement, "best", "replicas share a machine", chains)
def _best_on_any_machine(
    self: ReplicaPlacement, chain: tuple[Endpoint, ...], last: Endpoint | None
) -> Endpoint | None:
    """Choose a host without a look at the machine that it is on."""
    hosts = self._port.members.hosts
    infos = {host: hosts[host] for host in chain if host in hosts}
    try:
        for host in infos:
            hosts_known = self._port.members._known[host]
            hosts_known.info = replace(infos[host], machine="")
        return _best(self, chain, last)
    finally:
        for host, info in infos.items():
            self._port.members._known[host].info = info


# -- groups that are brought up again --------------------------------------------------------------


@instead_of(Saved, "incarnations", "incarnations begin again", checkpoints)
def _none_known(self: Saved) -> dict[str, int]:
    """Give workers of a group that goes on incarnations that there were."""
    return {}


@instead_of(Saved, "incarnations", "incarnations of the last shard", checkpoints)
def _of_the_last_shard(self: Saved) -> dict[str, int]:
    """Take the last shard's word for an incarnation, though another knows of a later one."""
    known: dict[str, int] = {}
    for state in self.states:
        for name, progress in state.workers.items():
            if not name.endswith(CALLS):
                known[name] = progress.incarnation
    return known


@instead_of(runs, "_states", "newest cut of each shard", cuts)
def _newest_of_each(run: Any, folder: str, refused: list[Any]) -> tuple[ShardState, ...] | None:
    """Go on from each shard's newest state, whatever the others have."""
    states = []
    for shard in range(len(run.layout.shards)):
        of_shard = files.CheckpointFiles(folder, shard, 1)
        found = of_shard.found()
        if not found:
            return None
        states.append(of_shard.read(found[0]))
    return tuple(states)


# -- partial checkpoints ---------------------------------------------------------------------------


@instead_of(CheckpointFiles, "_put_together", "older numbers than the newest part's", in_parts)
def _put_together_with_older_numbers(
    self: CheckpointFiles, manifest: dict[str, Any], data: bytes
) -> ShardState:
    """Take the newest blocks for no newer than the part before them, and its dedupe table."""
    state = _put_together(self, manifest, data)
    this = manifest["epoch"], manifest["index"]
    before = [f for f in self.found() if (f.epoch, f.index) < this and f.epoch == this[0]]
    if not before:
        return state
    older = json.loads(self._fs.cat_file(before[0].manifest))
    numbers = {name: older[name] for name in ("index", "version", "steps")}
    return replace(state, **numbers, workers=files._workers(older))


@instead_of(partial_files, "units_of", "slots left out of parts", in_parts)
def _units_of_empty_slots(layout: Any, state: ShardState) -> Any:
    """Write blocks with slots as they are at the start."""
    return _units_of(layout, replace(state, slots={k: v * 0 for k, v in state.slots.items()}))


@instead_of(partial_files, "choose", "what changes least is never saved", in_parts)
def _choose_by_distance(nbytes: Any, saved_in: Any, distances: Any, share: float) -> Any:
    """Write what differs most from its saved copy, and nothing for its age."""
    if (saved_in == NEVER).any():
        return _choose(nbytes, saved_in, distances, share)
    return np.argsort(-distances, kind="stable")[:1]


# -- optimizer state -------------------------------------------------------------------------------


@instead_of(worker_cache, "rebuilt", "steps go on with empty slots", caches)
def _rebuilt_with_steps(copy: Any, rule: Any) -> ShardState:
    """Count the steps of a rule on, though its slots start anew."""
    state = _rebuilt(copy, rule)
    return replace(state, steps=copy.metadata.steps)


@instead_of(files, "_arrays", "slots left out of checkpoints", checkpoints)
def _arrays_of_empty_slots(state: ShardState) -> Any:
    """Write weights, and slots as they are at the start."""
    return _arrays(replace(state, slots={k: v * 0 for k, v in state.slots.items()}))


_lease, _leases = Lease.__init__, Leases.__init__
_renew, _saved, _pull, _keep = Membership.renew, Checkpoints._saved, Replica.pull, Router._keep
_enter_worker, _replay, _best = Coordinator._enter_worker, Replica.replay, ReplicaPlacement.best
_rebuilt, _arrays = worker_cache.rebuilt, files._arrays
_put_together, _units_of, _choose = CheckpointFiles._put_together, units_of, choose
