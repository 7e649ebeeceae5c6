"""Broken variants of the protocol, each of which leaves one thing out that it needs."""

from __future__ import annotations

import asyncio
import math
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np

from dps.core import replay
from dps.core import shard as core_shard
from dps.core.checkpoint_interval import AutoInterval
from dps.core.filters.chain import FilterChain, Outbox
from dps.core.functions import CALLS
from dps.core.names import STORE_ROLES
from dps.errors import NotServing, StoreUnavailable, TransportError
from dps.protocol import lease
from dps.protocol.client.client import Client
from dps.protocol.client.encoder import Encoder, Parts, _packed, _plain
from dps.protocol.client.receipts import Receipts
from dps.protocol.client.routing_table import Router
from dps.protocol.client.shard_client import ShardClient
from dps.protocol.compression import KeyLists
from dps.protocol.coordinator import placement
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.coordinator.data_leases import DataLeases, _Pass
from dps.protocol.coordinator.liveness import Member, Membership
from dps.protocol.coordinator.losses import Losses
from dps.protocol.coordinator.placement import Rebalancer
from dps.protocol.coordinator.shard_controller import ShardController
from dps.protocol.coordinator.workers import Workers
from dps.protocol.lease import Lease, Leases
from dps.protocol.messages import (
    ClearMail,
    Install,
    Keepers,
    Leased,
    Pull,
    Push,
    Pushed,
    TakeMail,
    Waiting,
    Weights,
)
from dps.protocol.monitor import Monitor
from dps.protocol.server import replica
from dps.protocol.server.batching import Batching, evicted
from dps.protocol.server.commit_log import CommitLog
from dps.protocol.server.copies import SentCopies
from dps.protocol.server.replica import Replica
from dps.protocol.server.shard_server import ShardServer
from dps.protocol.tasks import Tasks, task_failed
from dps.recovery import checkpoint_files, files, worker_cache
from dps.recovery import manifest as runs
from dps.recovery import partial as parts
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import CheckpointPersistence
from dps.recovery.checkpoint_files import CheckpointFiles
from dps.recovery.durability import NoDurability
from dps.recovery.layered import LayeredPersistence
from dps.recovery.manifest import Saved
from dps.recovery.partial import NEVER
from dps.recovery.shared_store import Mailboxes, SharedStore, StateStore, StorePersistence
from dps.recovery.worker_cache import CopyOffers
from tests.simulator.broken.variant import VARIANTS, always, instead_of

__all__ = ["VARIANTS"]

# -- what is not done at all, or always answered alike ---------------------------------------------

always(core_shard, "is_duplicate", False, "sent again, applied again")
always(CopyOffers, "best", None, "copies of workers ignored", "caches")
always(Lease, "held", True, "zombie not fenced")
always(ShardServer, "_must_still_be_in_epoch", None, "epoch not checked again")
always(Rebalancer, "look", False, "released before it is empty")
always(ShardServer, "_take_mail", None, "mailbox left", "mailboxes")
always(Workers, "admit_active", None, "workers forgotten after a loss", "gated")
always(Receipts, "heard", False, "workers not told what they lost")
always(Losses, "restored", None, "losses reported to nobody")
always(Losses, "left", [], "lost workers asked what they were told")
always(placement, "moves_to", (), "nothing moves on the ring", "rings")
always(Client, "_push_withheld", None, "residual lost on leaving", "filters")
always(files, "_sync", None, "bytes not synced", "checkpoints wide")
always(files, "_sync_folder", None, "folder not synced", "checkpoints wide")
always(Saved, "incarnations", {}, "incarnations begin again", "checkpoints wide")
always(Leases, "vouch", None, "busy taken for dead", "watched")
always(Workers, "sighted", None, "busy worker evicted", "gated watched")
always(NoDurability, "is_last_copy", False, "busy server without a copy replaced", "alone watched")
always(StorePersistence, "begin", None, "new store counted before its copy is there", "two_stores")
always(ShardController, "do_without", False, "store out of reach waited for", "two_stores wide")
always(Coordinator, "_not_replaced_by", [], "drained store let go too early", "stores wide")
always(LayeredPersistence, "note", None, "layer written once", "layered")
always(Chain, "is_last_copy", False, "layer restored while a replica is silent", "layered chains")
always(
    SharedStore, "is_restorable", False, "layer restored although the store lives", "layered stores"
)

# -- what a newcomer is not given ------------------------------------------------------------------


async def _install_without(field, right, self, m):
    return await right(self, replace(m, state=replace(m.state, **{field: {}})))


for name, field, needs in (
    ("dedupe table not replicated", "workers", "chains"),
    ("dedupe table not moved", "workers", "alone"),
    ("results of functions not replicated", "results", "calls"),
    ("tables not replicated", "tables", "chains"),
    ("batches not replicated", "batches", "leases chains"),
):
    instead_of(ShardServer, "_install", name, needs)(partial(_install_without, field))


@instead_of(core_shard, "_held", "place kept for a worker that has left", "gated wide")
def _(right, state, op):
    return right(state, op._replace(id=op.id._replace(seq=1 << 30)))


# -- leased data -----------------------------------------------------------------------------------

always(DataLeases, "left", None, "lease of a worker that left not given out again", "leases")
always(_Pass, "under_way", [], "lease given out while it is held", "leases")
always(core_shard, "has", False, "batch applied again", "leases")
always(Client, "begin_push", False, "batch recorded before its update", "leases")


@instead_of(Client, "push_parts", "batch recorded before its update", "leases")
async def _(right, self, parts, pull=False, computed_on=None, batch=None):
    if batch is not None:
        await right(self, Parts({}, {}), False, None, batch)
    return await right(self, parts, pull, computed_on)


@instead_of(_Pass, "keep", "leases returned by a late request", "leases")
def _(right, self, holder, numbers, last):
    return right(self, holder, numbers, sys.maxsize)


@instead_of(Leased, "batches", "batches without their epoch", "leases")
def _(right, self):
    return [batch._replace(epoch=self.pass_name) for batch in right(self)]


@instead_of(CheckpointFiles, "_assembled", "batches not in checkpoints", "leases checkpoints")
def _(right, self, manifest, arrays):
    return replace(right(self, manifest, arrays), batches={})


# -- acknowledging ---------------------------------------------------------------------------------


@instead_of(Replica, "push", "ack before the tail", "chains")
@instead_of(Replica, "push", "ack before the store", "stores")
async def _(right, self, m):
    self.must_be_head(m.epoch)
    until = asyncio.get_running_loop().time() + m.patience
    step = await self.apply(m.operation, m.epoch, until)
    if isinstance(step, Waiting):
        return step
    known = step.state.workers[m.operation.id.worker]
    result = core_shard.result_of(step.state, m.operation)
    version = step.state.version
    return Pushed(step.outcome, version, known.clock, None, result, known.applied)


@instead_of(Replica, "push_at_once", "ack before the tail, at once", "chains")
def _(right, self, m):
    self.must_be_head(m.epoch)
    step = self.keep(m.operation, self._machine.apply(self.state, m.operation))
    return self._pushed(m.operation, step, None)


@instead_of(ShardServer, "at_once", "lease not checked at once")
def _(right, self, message):
    replica = self._replicas.get(message.shard) if type(message) is Push else None
    return None if replica is None else replica.push_at_once(message)


@instead_of(Replica, "push_at_once", "epoch not checked at once")
def _(right, self, m):
    return right(self, replace(m, epoch=self.epoch))


@instead_of(ShardClient, "_replied", "failed push taken for acknowledged")
def _(right, self, op, pull, view, since, done, reply):
    if isinstance(reply, Pushed):
        right(self, op, pull, view, since, done, reply)
    else:
        self._release(done, None)


@instead_of(Replica, "_readable", "uncommitted weights served", "chains")
async def _(right, self, reader, until, has):
    return Weights(self.state.version, self.node.clock.now(), -1, self.state.values)


# -- exactly once ----------------------------------------------------------------------------------


@instead_of(CheckpointPersistence, "restore", "dedupe table not restored", "checkpoints")
async def _(right, self, *args):
    return replace(await right(self, *args), workers={})


@instead_of(CheckpointPersistence, "restore", "clocks not restored", "checkpoints")
async def _(right, self, *args):
    state = await right(self, *args)
    workers = {name: replace(p, clock=0, active=False) for name, p in state.workers.items()}
    return replace(state, workers=workers)


@instead_of(core_shard.StateMachine, "apply", "function run again on a resend", "calls")
def _(right, self, state, op):
    known = state.workers.get(op.id.worker)
    if op.kind == "apply" and known is not None:
        fresh = replace(known, incarnation=-1)
        state = replace(state, workers={**state.workers, op.id.worker: fresh})
    return right(self, state, op)


# -- chains ----------------------------------------------------------------------------------------


@instead_of(Replica, "extend", "last operations not copied", "chains")
@instead_of(Replica, "extend", "updates during a move left out", "alone")
async def _(right, self, m):
    chain, state = (*self.chain, m.host), self.state
    install = Install(self.shard, m.epoch, chain, state, "replica", keepers=m.keepers)
    await self.node.transport.call(m.host, install, self._group.timings.copy, "replicate")
    self._commits.successor = m.host


@instead_of(Replica, "configure", "lost on promotion", "chains")
async def _(right, self, m):
    self._commits._log.clear()
    return await right(self, m)


@instead_of(CommitLog, "pass_on", "operations skipped", "chains")
async def _(right, self, successor, after, committed=-1):
    await right(self, successor, max(after, self._replica.state.index - 1), committed)


@instead_of(Replica, "replicate", "gaps in the order taken", "chains")
async def _(right, self, m):
    async with self.lock:
        self.must_be_in(m.epoch)
        for op in m.operations:
            await self.apply_now(op)
    self.notify()


@instead_of(ShardController, "unsettle", "restarted although a replica lives", "chains")
def _(right, self, without=None):
    lost_head = without is not None and self.view.chain[:1] == (without,)
    right(self, without)
    if lost_head:
        self.view = replace(self.view, chain=())


# -- epochs and leases -----------------------------------------------------------------------------


@instead_of(Replica, "must_be_in", "epoch not checked")
def _(right, self, epoch):
    if self._commits.closed:
        raise NotServing("closed")


@instead_of(ShardServer, "_must_hold_lease", "lease not checked on reads")
def _(right, self, message):
    if not isinstance(message, Pull):
        right(self, message)


@instead_of(ShardServer, "carry_out", "lease not checked again")
async def _(right, self, message):
    self._must_hold_lease(message)
    reply = await self._dispatch(message)
    self._must_still_be_in_epoch(message)
    return reply


@instead_of(Lease, "renew", "lease counted from the reply")
async def _(right, self, ask):
    with suppress(TransportError, NotServing):
        if await ask(self._seconds):
            kept = 1 - lease.DRIFT - lease.STANDSTILL
            self._until = self._clock.monotonic() + self._seconds * kept


@instead_of(Membership, "renew", "given up, but renewed")
async def _(right, self, host, life, watched=None):
    self.leases.grant(host)
    member = self._known.get(host)
    if member is not None:
        member.watched = watched
        member.given_up = member.excluded = member.silent = False
    await self._coordinator.use_hosts()
    return True


@instead_of(Coordinator, "lose", "given up without proof")
async def _(right, self, address, by):
    hosts = [host for host in self.members._known if host.address == address]
    await self.members._end(hosts, by)


# -- moves -----------------------------------------------------------------------------------------


@instead_of(Replica, "configure", "old holder serves on after a move")
async def _(right, self, m):
    return await right(self, m) if self.node.me in m.chain else None


@instead_of(ShardController, "_next_epoch", "taken over in the same epoch")
def _(right, self):
    if self.moving is None or self.moving.target not in self.view.chain:
        return right(self)
    return self.view.epoch


# -- the store and mailboxes -----------------------------------------------------------------------


@instead_of(StateStore, "get", "store forgets optimizer and table", "stores")
def _(right, self, m):
    state = right(self, m)
    return None if state is None else replace(state, workers={})


@instead_of(ShardServer, "_take_mail", "mailbox cleared before apply", "mailboxes")
async def _(right, self, on, epoch):
    for mailbox in self._keepers_in(on.shard, epoch).mailboxes:
        mail = await self.node.transport.call(mailbox, TakeMail(on.shard, epoch), 1.0, "store")
        await self.node.transport.call(mailbox, ClearMail(on.shard, epoch), 1.0, "store")
        await on.replay(epoch, mail)


@instead_of(ShardServer, "_take_mail", "mailbox cleared before the shard is served", "mailboxes")
async def _(right, self, on, epoch):
    await right(self, on, epoch)
    for mailbox in self._keepers_in(on.shard, epoch).mailboxes:
        await self.node.transport.call(mailbox, ClearMail(on.shard, epoch), 1.0, "store")


@instead_of(ShardServer, "_note_keepers", "first store used for ever", "stores")
def _(right, self, m):
    _, first = self._keepers.get(m.shard, (m.epoch, m.keepers))
    self._keepers[m.shard] = m.epoch, first


@instead_of(Mailboxes, "deposit", "mail taken after it was closed", "mailboxes")
def _(right, self, m):
    self._mail.setdefault(m.shard, []).append((m.epoch, m.operation))


@instead_of(replica, "plan", "replay out of order", "buffers")
def _(right, policy, layout, version, buffered, summable):
    return right(policy, layout, version, tuple(reversed(buffered)), summable)


@instead_of(ShardClient, "_flush_held", "buffer of the worker dropped", "buffers")
async def _(right, self, view):
    self._held = []
    return True


# -- checkpoints -----------------------------------------------------------------------------------


@instead_of(CheckpointPersistence, "commit", "checkpoint ignores its bound", "checkpoints")
async def _(right, self, epoch, state):
    if state.version - self._complete >= self._due:
        self._start_writing(epoch, state)


@instead_of(AutoInterval, "choose", "chosen interval beyond its bound", "adaptive")
def _(right, self, *seen):
    return right(replace(self, most=1 << 30), *seen)


@instead_of(CheckpointPersistence, "_promise", "chosen interval promises nothing", "adaptive")
def _(right, self, every):
    right(self, every)
    self._allowed = math.inf


@instead_of(checkpoint_files, "digest_of", "torn checkpoint accepted", "checkpoints")
def _(right, data):
    return ""


@instead_of(checkpoint_files, "publish", "non-atomic publish", "checkpoints")
def _(right, fs, folder, name, data):
    fs.pipe_file(f"{folder}/{name}", data)


@instead_of(CheckpointFiles, "published", "oldest checkpoint restored", "checkpoints")
def _(right, self):
    return list(reversed(right(self)))


# -- consistency -----------------------------------------------------------------------------------


@instead_of(replica, "slack", "gate off by one", "gated")
def _(right, model, clocks, worker):
    left = right(model, clocks, worker)
    return None if left is None else left + 1


@instead_of(Replica, "apply", "dead workers waited for", "gated")
async def _(right, self, op, epoch, until):
    return None if op.kind == "leave" else await right(self, op, epoch, until)


# -- telling of losses -----------------------------------------------------------------------------


# -- the ring --------------------------------------------------------------------------------------


@instead_of(Rebalancer, "_order", "shards dealt out by turns", "rings")
def _order_by_turns(right, self, shard, hosts):
    around = sorted(hosts, key=lambda info: (info.node, str(info.host)))
    first = shard % max(1, len(around))
    return [info.host for info in (*around[first:], *around[:first])]


@instead_of(Rebalancer, "_owners", "shards moved by turns", "rings")
def _(right, self, shards):
    hosts, replicas = self._in_use().values(), self._group.replicas
    return [_order_by_turns(right, self, shard, hosts)[:replicas] for shard in range(shards)]


# -- sparse tables ---------------------------------------------------------------------------------


@instead_of(checkpoint_files, "whole_units", "tables left out of checkpoints", "checkpoints")
def _(right, state):
    tables = {n: replace(t, levels=t.levels[-1:] * len(t.levels)) for n, t in state.tables.items()}
    return right(replace(state, tables=tables))


@instead_of(StateStore, "put", "tables left out of the store", "stores")
def _(right, self, m):
    return right(self, replace(m, state=replace(m.state, tables={})))


@instead_of(replay, "added", "rows of summed updates forgotten", "sums")
def _(right, a, b):
    return a


# -- filters ---------------------------------------------------------------------------------------


@instead_of(Encoder, "operations", "filtered again when sent again", "filters cuts")
async def _(right, self, operation, parts, point):
    def filtered(shard):
        op, base = _plain(operation, parts.dense[shard]), point.shards[shard].weights
        again = self._outboxes[shard].prepared(op, base.values if base else None)
        return self._committed({shard: _packed(again)})[shard]

    class FilteredAgain(dict[int, object]):
        def __getitem__(self, shard):
            return filtered(shard)

    return FilteredAgain.fromkeys(parts.dense)


@instead_of(FilterChain, "filtered", "residual dropped", "filters")
def _(right, self, gradient, residual, sending, device):
    return right(self, gradient, None, sending, device)


@instead_of(Outbox, "commit", "residual kept when it is sent", "filters")
def _(right, self, prepared):
    before = dict(self._residuals)
    right(self, prepared)
    for names, kept in before.items():
        if not self._residuals[names].any():
            self._residuals[names] = kept


@instead_of(KeyLists, "_found", "list of indices of another worker", "filters")
def _(right, self, digest):
    return next(reversed(self._lists.values()), None)


@instead_of(KeyLists, "completed", "list of indices not filled in", "filters")
def _(right, self, op):
    return op


@instead_of(Replica, "summable", "encoded gradients summed", "filters buffers", raises=True)
def _(right, self, op):
    return op


# -- filtered pulls --------------------------------------------------------------------------------


@instead_of(SentCopies, "_found", "copy of another replica", "pull_filters")
def _(right, self, worker, has):
    known = self._sent.get(worker)
    return replace(known, id=has) if known is not None and has is not None else None


@instead_of(SentCopies, "_keep", "what is sent not kept", "pull_filters")
def _(right, self, worker, sent):
    before = self._sent.get(worker)
    right(self, worker, replace(sent, values=before.values) if before is not None else sent)


# -- clocks and leases -----------------------------------------------------------------------------


@instead_of(Lease, "__init__", "leases on the wall clock", "wide")
@instead_of(Leases, "__init__", "leases on the wall clock", "wide")
def _(right, self, timings, clock):
    right(self, timings, SimpleNamespace(now=clock.now, monotonic=clock.now))


@instead_of(Leases, "watch", "no grace after standing still", "wide")
async def _(right, self, on_over):
    while True:
        await asyncio.sleep(self._until_next(self._clock.monotonic()))
        now = self._clock.monotonic()
        for holder in [holder for holder, until in self._until.items() if until <= now]:
            if self._until.get(holder, now + 1) <= now:
                await on_over(holder)


@instead_of(Membership, "renew", "renewed, though ended", "wide")
async def _(right, self, host, life, watched=None):
    if host in self._ended:
        self._known.setdefault(host, Member(life))
        return True
    return await right(self, host, life, watched)


# -- disks -----------------------------------------------------------------------------------------


# -- promises in seconds ---------------------------------------------------------------------------


@instead_of(CheckpointPersistence, "_saved", "age counted from the end of the write", "timed wide")
def _(right, self, version, noted):
    right(self, version, self._clock.monotonic())


# -- reading ---------------------------------------------------------------------------------------


@instead_of(Router, "_keep", "older tables taken", "wide")
def _(right, self, table):
    known, self._table = self._table, None
    if known is not None and known.version == table.version:
        self._table = known
        return known
    return right(self, table)


# -- who is who ------------------------------------------------------------------------------------


@instead_of(Workers, "_enter", "a second start for the same request", "wide")
async def _(right, self, m):
    return await right(self, replace(m, token=f"{m.token} {id(object())}"))


@instead_of(Workers, "_enter", "no lease on entering", "gated wide")
async def _(right, self, m):
    before = self._known.get(m.worker)
    entered = await right(self, m)
    if self._known.get(m.worker) is not before:
        self._leases.end(m.worker)
    return entered


@instead_of(Batching, "_refused", "held update of an earlier incarnation", "rounds wide")
def _(right, self, held):
    update = held.operation.id
    if not core_shard.is_evicted(self._replica.state, update):
        return False
    self._let_go(held, evicted(update))
    return True


@instead_of(Replica, "replay", "late updates of a lost worker", "held_back wide")
async def _(right, self, epoch, buffered, late=False):
    await right(self, epoch, buffered)


# -- commits and moves -----------------------------------------------------------------------------


@instead_of(Replica, "extend", "newcomer given what is not committed", "stores wide")
async def _(right, self, m):
    self.must_be_in(m.epoch)
    chain, commits, state = (*self.chain, m.host), self._commits, self.state
    with commits.keeping_later_than(state):
        given = self.shard, m.epoch, chain, state, "replica", self.persistence.saved
        install = Install(*given, m.keepers)
        copy = self.node.transport.call(m.host, install, self._group.timings.copy, "replicate")
        await commits.until_interrupted(copy)
        async with self.lock:
            self.must_be_in(m.epoch)
            commits.successor = m.host
            await commits.until_interrupted(
                commits.pass_on(m.host, state.index, commits.committed.index)
            )


@instead_of(ShardController, "_fence_forsaken", "forsaken hosts not fenced", "cuts wide")
async def _(right, self, host):
    self._forsaken = ()


@instead_of(Rebalancer, "may_hold", "drained, but chosen", "spread wide")
def _(right, self, info, shard):
    if info.role in STORE_ROLES:
        return False
    return self.servers is not None or info.home in (-1, shard)


@instead_of(Rebalancer, "best", "replicas share a machine", "chains wide")
def _(right, self, shard, chain, last):
    known = self._coordinator.members._known
    infos = {host: known[host].info for host in chain if host in known}
    for host, info in infos.items():
        known[host].info = replace(info, machine="")
    try:
        return right(self, shard, chain, last)
    finally:
        for host, info in infos.items():
            known[host].info = info


# -- groups that are brought up again --------------------------------------------------------------


@instead_of(Saved, "incarnations", "incarnations of the last shard", "checkpoints wide")
def _(right, self):
    known = {}
    for state in self.states:
        for name, progress in state.workers.items():
            if not name.endswith(CALLS):
                known[name] = progress.incarnation
    return known


@instead_of(runs, "_states", "newest cut of each shard", "cuts wide")
def _(right, run, folder, refused):
    shards = [CheckpointFiles(folder, shard, 1) for shard in range(len(run.layout.shards))]
    newest = [shard.published()[:1] for shard in shards]
    return tuple(s.read(*f) for s, f in zip(shards, newest, strict=True)) if all(newest) else None


# -- partial checkpoints ---------------------------------------------------------------------------


@instead_of(CheckpointFiles, "_assembled", "numbers of an older part", "in_parts wide")
def _(right, self, manifest, arrays):
    epoch, index = manifest["epoch"], manifest["index"]
    before = [f for f in self.published() if f.epoch == epoch and f.index < index]
    if before:
        older = self.manifest(before[0])
        manifest |= {name: older[name] for name in ("index", "version", "steps", "workers")}
    return right(self, manifest, arrays)


@instead_of(parts, "units_of", "slots left out of parts", "in_parts wide")
def _(right, layout, state):
    return right(layout, replace(state, slots={k: v * 0 for k, v in state.slots.items()}))


@instead_of(parts, "choose", "what changes least is never saved", "in_parts wide")
def _(right, nbytes, saved_in, distances, share):
    if (saved_in == NEVER).any():
        return right(nbytes, saved_in, distances, share)
    return np.argsort(-distances, kind="stable")[:1]


# -- optimizer state -------------------------------------------------------------------------------


@instead_of(worker_cache, "rebuilt", "steps go on with empty slots", "caches wide")
def _(right, copy, rule):
    return replace(right(copy, rule), steps=copy.metadata.steps)


@instead_of(checkpoint_files, "whole_units", "slots left out of checkpoints", "checkpoints wide")
def _(right, state):
    return right(replace(state, slots={k: v * 0 for k, v in state.slots.items()}))


@instead_of(Leases, "vouch", "patience without end", "watched")
def _(right, self, holder):
    if holder in self._until:
        self._until[holder] = self._clock.monotonic() + self._seconds


@instead_of(ShardController, "is_last_copy", "stopped replica taken for a copy", "chains watched")
def _(right, self, host):
    alone = self.view.chain == (host,)
    return self._durability.is_last_copy(alone, False, not self.begun or self._is_kept)


@instead_of(Membership, "_check", "stopped replica taken for a copy", "chains watched")
async def _(right, self, host):
    await self._end_if_gone(host.address, "coordinator")


@instead_of(Membership, "_have_stopped", "last copy killed", "watched")
async def _(right, self, watched, hosts):
    await self._coordinator.monitors.kill(watched, self._timings.stopped)


@instead_of(Monitor, "may_kill", "killed though it runs again", "watched")
def _(right, self, number, now, look, seconds):
    return number in self._watched


@instead_of(Monitor, "look", "slow taken for stopped", "watched")
def _(right, self, now, at):
    return right(self, now, lambda number: at(number)._replace(progress=None))


@instead_of(Monitor, "may_kill", "slow taken for stopped", "watched")
def _(right, self, number, now, look, seconds):
    return right(self, number, now, look._replace(progress=None), seconds)


@instead_of(Membership, "sighted", "processes of two monitors confused", "watched")
async def _(right, self, watched, sighting):
    for member in self._known.values():
        if member.watched is not None and member.watched.number == watched.number:
            await right(self, member.watched, sighting)
            return


@instead_of(Coordinator, "_report_link", "busy successor excluded", "chains watched")
async def _(right, self, m):
    view = self.controllers[m.shard].view
    if m.epoch == view.epoch and m.host in view.chain[1:]:
        self.members[m.host].excluded = True
    return self._table()


@instead_of(Lease, "renew", "no allowance for a clock that is slow or stands still", "watched")
async def _(right, self, ask):
    asked = self._clock.monotonic()
    with suppress(TransportError, NotServing):
        if await ask(self._seconds):
            self._until = max(self._until, asked + self._seconds)


# -- tasks -----------------------------------------------------------------------------------------


@instead_of(ShardServer, "_fail", "failed host serves on", "watched")
def _(right, self, error):
    self.node.emit(task_failed(self.node.clock, self.node.name, error))


@instead_of(Tasks, "keep", "coordinator's tasks not restarted", "watched")
def _(right, self, work, pause):
    return self.start(work())


# -- replicated stores -----------------------------------------------------------------------------


@instead_of(StorePersistence, "commit", "ack after one of two stores", "two_stores")
async def _(right, self, epoch, state):
    puts = [asyncio.ensure_future(self._keep(s, epoch, state)) for s in self._keepers(epoch).stores]
    for put in puts:
        put.add_done_callback(lambda put: put.cancelled() or put.exception())
    done, _ = await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED)
    for put in done:
        put.result()


@instead_of(ShardController, "_keepers", "restored from the newest store", "two_stores")
def _(right, self):
    return Keepers(tuple(reversed(self._coordinator.stores)), self._coordinator.mailboxes, whole=1)


@instead_of(ShardController, "do_without", "last store let go as out of reach", "two_stores wide")
def _(right, self, store):
    if right(self, store) or store not in self.stored:
        return right(self, store)
    self.store_lost(store)
    self.unsettle()
    return True


@instead_of(ShardController, "_note_stored", "store out of reach counted on", "two_stores wide")
def _(right, self, keepers):
    self.stored = self._coordinator.stores


@instead_of(ShardClient, "_deposit_in", "mail left in one of two mailboxes", "two_stores mailboxes")
async def _(right, self, mailboxes, request):
    await right(self, mailboxes[:1], request)


@instead_of(ShardServer, "_take_mail", "mail left where it is out of reach", "mailboxes")
async def _(right, self, replica, epoch):
    with suppress(TransportError):
        await right(self, replica, epoch)


@instead_of(Coordinator, "came_to_rest", "no second mailbox after outages", "two_stores mailboxes")
async def _(right, self):
    self.rebalancer.consider()
    if self.rebalancer.look():
        await self.publish()


@instead_of(Coordinator, "_not_replaced_by", "drained store let go by one shard", "stores wide")
def _(right, self, stores):
    copied = any({*stores} <= {*each.stored} for each in self.controllers)
    return [] if stores and copied else right(self, stores)


# -- layers ----------------------------------------------------------------------------------------


@instead_of(LayeredPersistence, "commit", "layer delays acks", "layered")
async def _(right, self, epoch, state):
    await self._above.commit(epoch, state)
    await CheckpointPersistence.commit(self, epoch, state)


@instead_of(LayeredPersistence, "commit", "layer stops acks", "layered")
async def _(right, self, epoch, state):
    await self._above.commit(epoch, state)
    self.note(epoch, state)
    if self._failure:
        raise StoreUnavailable(self._failure)


@instead_of(LayeredPersistence, "begin", "layer empty until a write is due", "layered")
async def _(right, self, epoch, state):
    self.note(epoch, state)
    await self._above.begin(epoch, state)


@instead_of(LayeredPersistence, "restore", "older checkpoint of the layer restored", "layered")
async def _(right, self, *args):
    files = self._files
    files.published = lambda: CheckpointFiles.published(files)[-1:]
    try:
        return await right(self, *args)
    finally:
        del files.published


@instead_of(LayeredPersistence, "enter", "layer left to the old tail", "layered")
def _(right, self, epoch, state):
    if state is None:
        right(self, epoch, state)


@instead_of(ShardController, "_bring_back", "layer forgotten", "layered")
async def _(right, self, view, host):
    above = self._is_kept or host in self._tried
    return await (right if above else ShardController._install)(self, view, host)
