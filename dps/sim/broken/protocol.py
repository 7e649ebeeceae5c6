"""The broken variants of the protocol: what each leaves out, and where that must show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dps.core import consistency, replay
from dps.core import shard as core_shard
from dps.core.checkpoint_interval import AutoInterval, Chosen
from dps.core.consistency import Consistency
from dps.core.shard import ShardState, Step
from dps.core.updates import Operation, UpdateId
from dps.errors import NotServing, TransportError
from dps.protocol import lease
from dps.protocol.client.receipts import Receipts
from dps.protocol.client.shard_client import ShardClient
from dps.protocol.coordinator import rebalancer
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.coordinator.host_ring import HostRing
from dps.protocol.coordinator.losses import Losses
from dps.protocol.coordinator.membership import Membership
from dps.protocol.coordinator.rebalancer import Rebalancer
from dps.protocol.coordinator.shard_controller import ShardController
from dps.protocol.durabilities.worker_cache import CopyOffers
from dps.protocol.lease import Lease
from dps.protocol.messages import (
    ClearMail,
    Configure,
    Deposit,
    Done,
    Extend,
    GetState,
    HostInfo,
    Install,
    Loss,
    Pull,
    Push,
    Pushed,
    Replicate,
    Restore,
    TakeMail,
    View,
    Weights,
)
from dps.protocol.server import replica
from dps.protocol.server.commit_log import CommitLog
from dps.protocol.server.replica import Replica
from dps.protocol.server.shard_server import ShardServer
from dps.protocol.storage import checkpoint_files as files
from dps.protocol.storage.checkpoint_files import CheckpointFiles
from dps.protocol.storage.checkpoint_schedule import Checkpoints
from dps.protocol.storage.state_store import Mailboxes, StateStore
from dps.protocol.transport import Endpoint, Watched
from dps.sim.broken.variant import (
    adaptive,
    alone,
    any_case,
    buffers,
    caches,
    calls,
    chains,
    checkpoints,
    gated,
    instead_of,
    mailboxes,
    rings,
    stores,
)

# -- acknowledging ---------------------------------------------------------------------------------


async def _ack_at_once(self: Replica, m: Push) -> Pushed:
    """Acknowledge an update before anybody else has it."""
    self._must_be_head(m.epoch)
    step = await self._apply(m.operation, m.epoch)
    known = step.state.workers[m.operation.id.worker]
    result = core_shard.result_of(step.state, m.operation)
    version = step.state.version
    return Pushed(step.outcome, version, known.clock, None, result, known.applied)


instead_of(Replica, "push", "ack before the tail", chains)(_ack_at_once)
instead_of(Replica, "push", "ack before the store", stores)(_ack_at_once)


@instead_of(Replica, "_readable", "uncommitted weights served", chains)
async def _read_uncommitted(self: Replica, reader: UpdateId, until: float, has: Any) -> Weights:
    """Serve weights that a failure may take back."""
    return Weights(self.state.version, self._clock.now(), -1, self.state.values)


# -- exactly once ----------------------------------------------------------------------------------


@instead_of(core_shard, "is_duplicate", "sent again, applied again", any_case)
def _never_a_duplicate(state: ShardState, update: UpdateId) -> bool:
    """Apply an update that is sent again a second time."""
    return False


@instead_of(ShardServer, "_install", "dedupe table not replicated", chains)
async def _install_without_table(self: ShardServer, m: Install) -> Any:
    """Give a newcomer the weights, but not the dedupe table."""
    return await _install(self, replace(m, state=replace(m.state, workers={})))


@instead_of(Checkpoints, "restore", "dedupe table not restored", checkpoints)
async def _restore_without_table(self: Checkpoints, *args: Any) -> Any:
    """Restore the weights, but not the dedupe table."""
    return replace(await _restore(self, *args), workers={})


@instead_of(Checkpoints, "restore", "clocks not restored", checkpoints)
async def _restore_without_clocks(self: Checkpoints, *args: Any) -> Any:
    """Restore a dedupe table in which nobody is waited for."""
    state = await _restore(self, *args)
    workers = {name: replace(p, clock=0, active=False) for name, p in state.workers.items()}
    return replace(state, workers=workers)


@instead_of(core_shard, "_called", "function run again on a resend", calls)
def _call_again(layout: Any, functions: Any, state: ShardState, op: Operation) -> Step:
    """Run a function again when its call is sent again."""
    known = state.workers.get(op.id.worker)
    if known is not None:
        fresh = replace(known, incarnation=-1)
        state = replace(state, workers={**state.workers, op.id.worker: fresh})
    return _called(layout, functions, state, op)


@instead_of(ShardServer, "_install", "results of functions not replicated", calls)
async def _install_without_results(self: ShardServer, m: Install) -> Any:
    """Give a newcomer the weights and the dedupe table, but not the results of calls."""
    return await _install(self, replace(m, state=replace(m.state, results={})))


# -- chains ----------------------------------------------------------------------------------------


@instead_of(Replica, "extend", "last operations not copied", chains)
async def _extend_without_the_last(self: Replica, m: Extend) -> Done:
    """Copy the state to a newcomer, but not what was applied during the copy."""
    chain, state = (*self.chain, m.host), self.state
    install = Install(self.shard, m.epoch, chain, state, "replica", keepers=m.keepers)
    await self._transport.call(m.host, install, self._group.timings.copy, "replicate")
    self._commits.successor = m.host
    return Done()


@instead_of(Replica, "configure", "lost on promotion", chains)
async def _configure_and_forget(self: Replica, m: Any) -> Done:
    """Enter a new epoch without what the old successor had not acknowledged."""
    self._commits._log.clear()
    return await _configure(self, m)


@instead_of(CommitLog, "pass_on", "operations skipped", chains)
async def _skip_uncommitted(
    self: CommitLog, successor: Endpoint, after: int, committed: int = -1
) -> None:
    """Pass only the newest operation on."""
    await _pass_on(self, successor, max(after, self._newest.index - 1), committed)


@instead_of(Replica, "replicate", "gaps in the order taken", chains)
async def _replicate_with_gaps(self: Replica, m: Replicate) -> Done:
    """Apply whatever comes, although earlier operations are missing."""
    async with self.lock:
        self.must_be_in(m.epoch)
        for op in m.operations:
            await self.apply_now(op)
    self._notify()
    return Done()


@instead_of(ShardController, "unsettle", "restarted although a replica lives", chains)
def _unsettle_and_forget(
    self: ShardController, without: Endpoint | None = None, also: Endpoint | None = None
) -> None:
    """Start a shard anew when its head is lost, whoever else has its state."""
    lost_head = without is not None and self.view.chain[:1] == (without,)
    _unsettle(self, without, also)
    if lost_head:
        self.view = replace(self.view, chain=())


@instead_of(CopyOffers, "best", "copies of workers ignored", caches)
async def _best_of_none(self: CopyOffers, shard: int) -> None:
    """Start a lost shard anew, whoever has read it."""


# -- epochs and leases -----------------------------------------------------------------------------


@instead_of(Replica, "must_be_in", "epoch not checked", any_case)
def _any_epoch(self: Replica, epoch: int) -> None:
    """Serve requests of any epoch."""
    if self._closed:
        raise NotServing("closed")


@instead_of(Lease, "held", "zombie not fenced", any_case)
def _always_held(self: Lease) -> bool:
    """Serve on when the lease is over."""
    return True


@instead_of(ShardServer, "_must_hold_lease", "lease not checked on reads", any_case)
def _reads_without_lease(self: ShardServer, message: Any) -> None:
    """Serve reads when the lease is over."""
    if not isinstance(message, Pull):
        _must_hold_lease(self, message)


@instead_of(ShardServer, "handle", "lease not checked again", any_case)
async def _check_before_only(self: ShardServer, message: Any) -> Any:
    """Look at the lease before the work, but not before the reply."""
    self._must_hold_lease(message)
    reply = await self._services[type(message)](message)
    self._must_still_be_in_epoch(message)
    return reply


@instead_of(ShardServer, "_must_still_be_in_epoch", "epoch not checked again", any_case)
def _answer_late(self: ShardServer, message: Any) -> None:
    """Look at the epoch before the work, but not before the reply."""


@instead_of(Lease, "_renew", "lease counted from the reply", any_case)
async def _renew_from_the_reply(self: Lease, ask: Callable[[float], Any]) -> None:
    """Count a lease from when the reply came, not from when it was asked for."""
    try:
        granted = await ask(self._seconds)
    except (TransportError, NotServing):
        return
    if granted:
        kept = 1 - lease.DRIFT - lease.STANDSTILL
        self._until = self._clock.monotonic() + self._seconds * kept


@instead_of(Membership, "renew", "given up, but renewed", any_case)
async def _renew_anyway(
    self: Membership, host: Endpoint, life: int, watched: Watched | None = None
) -> bool:
    """Let a host that was given up hold its lease again, with what it held before."""
    self._leases.grant(host)
    member = self._known.get(host)
    if member is not None:
        member.watched = watched
        member.given_up = member.excluded = member.silent = False
    await self._on_found()
    return True


@instead_of(Coordinator, "lose", "given up without proof", any_case)
async def _lose_at_once(self: Coordinator, address: str, by: str) -> None:
    """Give a process up because somebody says that it is lost."""
    hosts = [host for host in self.members._known if host.address == address]
    await self.members._end(hosts, by)


# -- moves -----------------------------------------------------------------------------------------


@instead_of(Replica, "configure", "old holder serves on after a move", any_case)
async def _stay(self: Replica, m: Configure) -> Done:
    """Go on serving a shard that another host has taken over."""
    return await _configure(self, m) if self._me in m.chain else Done()


@instead_of(ShardController, "_next_epoch", "taken over in the same epoch", any_case)
def _same_epoch(self: ShardController) -> int:
    """Have the newcomer take over in the epoch in which the old holder served."""
    if self.moving is None or self.moving.target not in self.view.chain:
        return _next_epoch(self)
    return self.view.epoch


@instead_of(Rebalancer, "look", "released before it is empty", any_case)
def _nobody_is_leaving(self: Rebalancer) -> bool:
    """Say of a node that is drained that it is empty, at once."""
    return False


instead_of(Replica, "extend", "updates during a move left out", alone)(_extend_without_the_last)
instead_of(ShardServer, "_install", "dedupe table not moved", alone)(_install_without_table)


# -- the store and mailboxes -----------------------------------------------------------------------


@instead_of(StateStore, "get", "store forgets optimizer and table", stores)
def _get_without_table(self: StateStore, m: GetState) -> ShardState | None:
    """Return the weights without the dedupe table."""
    state = _get(self, m)
    return None if state is None else replace(state, workers={})


@instead_of(ShardServer, "_take_mail", "mailbox cleared before apply", mailboxes)
async def _clear_before_replay(self: ShardServer, on: Replica, epoch: int) -> None:
    """Empty the mailbox before what was in it is durable."""
    for mailbox in self._keepers_of(on.shard).mailboxes:
        take = TakeMail(on.shard, epoch)
        mail = await self._transport.call(mailbox, take, 1.0, "store")
        await self._transport.call(mailbox, ClearMail(on.shard, epoch), 1.0, "store")
        await on.replay(epoch, mail.operations)


@instead_of(ShardServer, "_take_mail", "mailbox cleared before the shard is served", mailboxes)
async def _clear_before_served(self: ShardServer, on: Replica, epoch: int) -> None:
    """Empty the mailbox as soon as what was in it is applied, whoever may have to begin anew."""
    await _take_mail(self, on, epoch)
    for mailbox in self._keepers_of(on.shard).mailboxes:
        await self._transport.call(mailbox, ClearMail(on.shard, epoch), 1.0, "store")


@instead_of(ShardServer, "_note_keepers", "first store used for ever", stores)
def _note_the_first(self: ShardServer, m: Install | Restore | Configure) -> None:
    """Keep to the store and the mailbox of the first epoch, though others are used now."""
    self._keepers.setdefault(m.shard, (m.epoch, m.keepers))


@instead_of(ShardServer, "_take_mail", "mailbox left", mailboxes)
async def _leave_mail(self: ShardServer, on: Replica, epoch: int) -> None:
    """Never apply what is in the mailbox."""


@instead_of(Mailboxes, "deposit", "mail taken after it was closed", mailboxes)
def _deposit_late(self: Mailboxes, m: Deposit) -> Done:
    """Take a gradient for a shard that is served again."""
    self._mail.setdefault(m.shard, []).append((m.epoch, m.operation))
    return Done()


@instead_of(replica, "plan", "replay out of order", buffers)
def _plan_backwards(
    policy: Any, layout: Any, version: int, buffered: Sequence[Operation], summable: Any
) -> Any:
    """Apply buffered gradients with the newest first."""
    return _plan(policy, layout, version, tuple(reversed(buffered)), summable)


@instead_of(ShardClient, "_flush_held", "buffer of the worker dropped", buffers)
async def _drop_held(self: ShardClient, view: View) -> bool:
    """Forget what was held back, and go on with newer gradients."""
    self._held = []
    return True


# -- checkpoints -----------------------------------------------------------------------------------


@instead_of(Checkpoints, "commit", "checkpoint ignores its bound", checkpoints)
async def _commit_regardless(self: Checkpoints, epoch: int, state: ShardState) -> None:
    """Write checkpoints in the background, and never wait for one that is overdue."""
    if state.version - self._complete >= self._due:
        self._start_writing(epoch, state)


@instead_of(AutoInterval, "choose", "chosen interval beyond its bound", adaptive)
def _choose_any(self: AutoInterval, *seen: Any) -> Chosen:
    """Choose the interval by costs and failures alone, whatever was promised."""
    return _choose(replace(self, most=1 << 30), *seen)


@instead_of(Checkpoints, "_promise", "chosen interval promises nothing", adaptive)
def _promise_nothing(self: Checkpoints, every: int | None) -> None:
    """Begin writes in the interval that was chosen, and never wait for one."""
    _promise(self, every)
    self._allowed = math.inf


@instead_of(files, "_sealed", "torn checkpoint accepted", checkpoints)
def _sealed_by_nothing(manifest: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Take any bytes for a checkpoint."""
    return manifest


@instead_of(CheckpointFiles, "_publish", "non-atomic publish", checkpoints)
def _publish_in_place(self: CheckpointFiles, name: str, data: bytes) -> None:
    """Write a checkpoint under its own name, the manifest as well."""
    self._fs.pipe_file(f"{self._folder}/{name}", data)


@instead_of(CheckpointFiles, "found", "oldest checkpoint restored", checkpoints)
def _oldest_first(self: CheckpointFiles) -> Any:
    """Look through the checkpoints from the oldest on."""
    return list(reversed(_found(self)))


# -- consistency -----------------------------------------------------------------------------------


@instead_of(replica, "slack", "gate off by one", gated)
def _one_too_many(model: Consistency, clocks: Any, worker: str) -> int | None:
    """Let a worker be one update further ahead than it may be."""
    left = _slack(model, clocks, worker)
    return None if left is None else left + 1


@instead_of(Replica, "_apply", "dead workers waited for", gated)
async def _keep_the_dead(self: Replica, op: Operation, epoch: int) -> Step | None:
    """Leave lost workers in the clock table."""
    return None if op.kind == "leave" else await _apply(self, op, epoch)


@instead_of(Coordinator, "admit_present", "workers forgotten after a loss", gated)
async def _admit_nobody(self: Coordinator, view: View, host: Endpoint) -> None:
    """Serve a restored shard that waits for nobody whom its state does not know."""


# -- telling of losses -----------------------------------------------------------------------------


@instead_of(Receipts, "heard", "workers not told what they lost", any_case)
def _hear_nothing(self: Receipts, restorations: Any) -> bool:
    """Do not compare what a worker was told with what its shard was restored with."""
    return False


@instead_of(Losses, "restored", "losses reported to nobody", any_case)
def _take_no_note(self: Losses, *args: Any, **known: Any) -> list[Loss]:
    """Restore a shard without a word about what it lacks."""
    return []


@instead_of(Losses, "left", "lost workers asked what they were told", any_case)
def _wait_for_the_dead(self: Losses, worker: str, incarnation: int) -> list[Loss]:
    """Wait for what a worker that was lost has to say of a loss."""
    return []


# -- the ring --------------------------------------------------------------------------------------


@instead_of(HostRing, "order", "shards dealt out by turns", rings)
def _order_by_turns(self: HostRing, shard: int, hosts: Sequence[HostInfo]) -> list[Endpoint]:
    """Number the servers anew when one comes or goes, so that most shards have another one."""
    around = sorted(hosts, key=lambda info: (info.node, str(info.host)))
    first = shard % max(1, len(around))
    return [info.host for info in (*around[first:], *around[:first])]


@instead_of(HostRing, "owners", "shards moved by turns", rings)
def _owners_by_turns(self: HostRing, shard: int, hosts: Sequence[HostInfo]) -> list[Endpoint]:
    """Move shards that have nothing to do with who has come or gone."""
    return _order_by_turns(self, shard, hosts)[: self._replicas]


@instead_of(rebalancer, "moves_to", "nothing moves on the ring", rings)
def _move_nothing(owners: Any, chains: Any) -> tuple[Any, ...]:
    """Leave shards where they are when their own server is there again."""
    return ()


_install, _configure, _apply = ShardServer._install, Replica.configure, Replica._apply
_restore, _found, _pass_on = Checkpoints.restore, CheckpointFiles.found, CommitLog.pass_on
_choose, _promise = AutoInterval.choose, Checkpoints._promise
_must_hold_lease, _unsettle, _get = (
    ShardServer._must_hold_lease,
    ShardController.unsettle,
    StateStore.get,
)
_plan, _slack, _called = replay.plan, consistency.slack, core_shard._called
_next_epoch, _take_mail = ShardController._next_epoch, ShardServer._take_mail
