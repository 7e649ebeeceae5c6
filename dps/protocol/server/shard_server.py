"""The services of one server node: its replicas of shards, or the state store and mailboxes.

A host is handed every message that reaches its node and gives it to the part that it is for, as
long as it holds a lease. It also brings a shard into service on its node, from initial values, a
checkpoint or the store, and then applies what workers left in the shard's mailboxes meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from dps.core.checkpoint_interval import FailureHistory
from dps.core.shard import Each, ShardState, in_turn
from dps.errors import DpsError, LeaseExpired, NotServing, StaleEpoch
from dps.events import Restored, Sink
from dps.protocol.executor import offload
from dps.protocol.group import Group
from dps.protocol.lease import Lease
from dps.protocol.messages import (
    Audit,
    AuditReply,
    Brought,
    CanReach,
    ClearMail,
    Configure,
    Deposit,
    Describe,
    Description,
    Done,
    Durable,
    EndCut,
    Evict,
    Extend,
    Flush,
    GetState,
    Held,
    HoldCut,
    Install,
    Keepers,
    LookUp,
    Mail,
    Pull,
    PullRange,
    PullRows,
    Push,
    PutSince,
    PutState,
    Release,
    RenewLease,
    ReplayBuffered,
    Replicate,
    Restore,
    RowsAsked,
    Save,
    SavedAt,
    TakeCut,
    TakeMail,
    Taken,
    brought,
)
from dps.protocol.server.key_cache import KeyLists
from dps.protocol.server.metrics import ReplicaMetrics
from dps.protocol.server.reach import Reach
from dps.protocol.server.replica import Replica
from dps.protocol.tasks import Tasks, task_failed
from dps.protocol.transport import Clock, Endpoint, Transport, Watched, answers_of
from dps.recovery.durability import Persistence, ServerContext
from dps.recovery.mailboxes import Mailboxes
from dps.recovery.shared_store import StateStore

# What asks for, or something of, the replica of a shard that is here.
OF_REPLICAS = (
    Push,
    Pull,
    PullRows,
    PullRange,
    ReplayBuffered,
    Replicate,
    Evict,
    Install,
    Restore,
    Configure,
    Extend,
    Audit,
    Describe,
    CanReach,
    HoldCut,
    TakeCut,
    EndCut,
    Save,
)

# Requests of clients, which carry arguments of users.
OF_CLIENTS = (Push, Pull, PullRows, PullRange, ReplayBuffered, Deposit, Save, Describe, Audit)

FORGIVEN = 6  # leases after which an earlier failure counts no more
MOST_DOUBLINGS = 20


class ShardServer:
    """One server node. All calls come from one event loop.

    Parameters
    ----------
    each
        Runs the chunks of a step of the update rule.
    watched
        Returns by which monitor this process is watched; None: by none.
    """

    def __init__(
        self,
        group: Group,
        node: str,
        me: Endpoint,
        transport: Transport,
        clock: Clock,
        emit: Sink,
        each: Each = in_turn,
        watched: Callable[[], Watched | None] = lambda: None,
    ) -> None:
        self._group = group
        self._watched = watched
        self._node = node
        self._me = me
        self._transport = transport
        self._reach = Reach(group, transport)
        self._clock = clock
        self._emit = emit
        self._each = each
        self._replicas: dict[int, Replica] = {}
        self._states = StateStore()
        self._mailboxes = Mailboxes()
        self._keys = KeyLists()
        self._restored: dict[int, int] = {}
        self._keepers: dict[int, tuple[int, Keepers]] = {}
        self._left: dict[int, int] = {}
        self._lease = Lease(group.timings, clock)
        self._life = 0
        self._history = FailureHistory()
        self._tasks = Tasks(self._fail)
        self._failures = 0  # in a row
        self._failed_at = self._rests_until = -math.inf
        self._services: dict[type, Callable[[Any], Awaitable[Any]]] = {
            Push: self._push,
            Pull: self._pull,
            PullRows: self._pull,
            PullRange: self._pull,
            ReplayBuffered: self._replay,
            Replicate: self._replicate,
            Evict: self._evict,
            Install: self._install,
            Restore: self._restore,
            Configure: self._configure,
            Extend: self._extend,
            Release: self._release,
            Audit: self._audit,
            Describe: self._describe,
            CanReach: self._can_reach,
            HoldCut: self._cut,
            TakeCut: self._cut,
            EndCut: self._cut,
            Flush: self._flush,
            Save: self._save,
            PutState: _at_once(self._states.put),
            PutSince: _at_once(self._states.put_since),
            LookUp: _at_once(self._states.look_up),
            GetState: _at_once(self._states.get),
            Deposit: _at_once(self._mailboxes.deposit),
            TakeMail: _at_once(self._mailboxes.take),
            ClearMail: _at_once(self._mailboxes.clear),
        }

    @property
    def stored_bytes(self) -> int:
        """Bytes that this node keeps for others, as a state store and mailbox."""
        return self._states.nbytes + self._mailboxes.nbytes

    def start(self) -> None:
        """Ask for a lease, and renew it from now on."""
        pause = self._group.timings.retry
        self._tasks.keep(lambda: self._lease.renew_forever(self._renew, self._tasks), pause)

    async def handle(self, message: Any) -> Any:
        """Carry out one message and return its reply; raises `DpsError` to be sent back.

        Who was paused may be in the midst of anything when its lease ends, and whatever is waited
        for may outlast the epoch: both are looked at again before anybody is answered.
        """
        try:
            self._must_hold_lease(message)
            reply = await self._services[type(message)](message)
            self._must_hold_lease(message)
            self._must_still_be_in_epoch(message)
        except DpsError as error:
            raise type(error)(f"{_described(message)}: {error}") from error
        except Exception as error:
            if not isinstance(message, OF_CLIENTS):
                self._fail(error)  # what a client sends harms only itself
            raise
        return reply

    def states(self) -> dict[int, ShardState]:
        """The state of each replica that is here."""
        return {shard: replica.state for shard, replica in self._replicas.items()}

    def figures(self) -> list[ReplicaMetrics]:
        """How it stands with each replica that is here."""
        return [_figures_of(replica) for replica in self._replicas.values()]

    def flush(self) -> None:
        """Emit the events of what was applied since the last flush."""
        for replica in self._replicas.values():
            replica.ledger.flush()

    async def close(self) -> None:
        """Stop serving."""
        for replica in self._replicas.values():
            await replica.close()
        await self._tasks.close()

    # -- the right to serve ----------------------------------------------------------------------

    def _must_hold_lease(self, message: Any) -> None:
        if not self._lease.held and not isinstance(message, Flush):
            raise LeaseExpired(f"the lease of {self._node} is over")

    def _must_still_be_in_epoch(self, message: Any) -> None:
        """Answer for a replica only if it is in the epoch in which it was asked.

        Its head and its chain are then those that it had all the while.
        """
        if isinstance(message, OF_REPLICAS):
            self.replica(message.shard).must_be_in(message.epoch)

    async def _renew(self, deadline: float) -> bool:
        life = self._life
        request = RenewLease(self._me, life, self._watched())
        reply = await self._transport.call(self._group.coordinator, request, deadline)
        if reply.history.exposure > self._history.exposure:  # replies may overtake one another
            self._history = reply.history
        if not reply.granted and life == self._life:
            self._start_over()
        return bool(reply.granted) and life == self._life

    def _fail(self, error: Exception) -> None:
        """Start over, as after a kill: a failed part may have left anything undone.

        If that happens again and again, the host takes no shard for a while.
        """
        self._emit(task_failed(self._clock, self._node, error))
        now, timings = self._clock.monotonic(), self._group.timings
        again = now - self._failed_at < FORGIVEN * timings.lease
        self._failures = self._failures + 1 if again else 0
        self._failed_at = now
        if self._failures:
            rest = min(timings.lease, timings.retry * 2.0 ** min(self._failures, MOST_DOUBLINGS))
            self._rests_until = now + rest
        self._start_over()

    def _start_over(self) -> None:
        """Drop everything: others may have taken this host's place, or are to take it."""
        self._life += 1
        self._lease.end()
        dropped, self._replicas = self._replicas, {}
        self._states.clear()
        self._mailboxes.clear_all()
        self._keys = KeyLists()
        self._left |= {shard: replica.epoch for shard, replica in dropped.items()}
        for replica in dropped.values():
            self._tasks.start(replica.close())

    # -- messages for a replica that is here -----------------------------------------------------

    async def _push(self, m: Push) -> Any:
        if m.operation.codec:
            work = partial(self._keys.completed, m.operation)
            m = replace(m, operation=await offload(work, m.operation.nbytes))
        replica = self.replica(m.shard)
        with replica.ledger.tally.pending_push():
            return await replica.push(m)

    async def _pull(self, m: Pull | RowsAsked) -> Any:
        return await self.replica(m.shard).pull(m)

    async def _replay(self, m: ReplayBuffered) -> Done:
        await self.replica(m.shard).replay(m.epoch, m.operations, late=True)
        return Done()

    async def _replicate(self, m: Replicate) -> Done:
        return await self.replica(m.shard).replicate(m)

    async def _evict(self, m: Evict) -> Durable:
        return await self.replica(m.shard).evict(m.epoch, m.workers)

    async def _extend(self, m: Extend) -> Done:
        return await self.replica(m.shard).extend(m)

    async def _configure(self, m: Configure) -> Done:
        replica = self.replica(m.shard)
        self._note_keepers(m)
        done = await replica.configure(m)
        if not m.kept:
            await replica.make_durable(m.epoch)
        if replica.is_head:
            await self._take_mail(replica, m.epoch)
        return done

    async def _audit(self, m: Audit) -> AuditReply:
        replica = self.replica(m.shard)
        applied = {name: p.applied for name, p in replica.state.workers.items()}
        return AuditReply(self._node, replica.state.version, applied, replica.duplicates)

    async def _describe(self, m: Describe) -> Description:
        replica = self.replica(m.shard)
        state, tally = replica.state, replica.ledger.tally
        applied = {name: p.applied for name, p in state.workers.items()}
        counted = tally.updates, tally.staleness_sum
        return Description(state.version, state.nbytes, applied, state.clocks, *counted)

    async def _can_reach(self, m: CanReach) -> Done:
        look, deadline = LookUp(m.shard, m.epoch), self._group.timings.hold
        await self._transport.call(m.store, look, deadline, "store")
        return Done()

    async def _cut(self, m: HoldCut | TakeCut | EndCut) -> Held | Taken | Done:
        replica = self.replica(m.shard)
        if replica.cutter is None or replica.epoch != m.epoch:
            raise StaleEpoch(f"shard {m.shard} is in epoch {replica.epoch}, not {m.epoch}")
        return await replica.cutter.handle(m)

    async def _save(self, m: Save) -> SavedAt:
        return SavedAt(await self.replica(m.shard).save(m.epoch))

    async def _flush(self, m: Flush) -> Done:
        self.flush()
        return Done()

    def replica(self, shard: int) -> Replica:
        """The replica of a shard on this node; raises `NotServing` if there is none."""
        try:
            return self._replicas[shard]
        except KeyError:
            raise NotServing(f"{self._node} holds no replica of shard {shard}") from None

    # -- bringing a shard into service -----------------------------------------------------------

    async def _install(self, m: Install) -> Done:
        """Hold a state that was sent: the initial values, or a copy of the predecessor's."""
        self._note_keepers(m)
        keeper = self._persistence(m.shard)
        if m.source == "replica":
            keeper.take_over(m.saved, m.state.version)
        await self._adopt(m.shard, m.epoch, m.chain, m.state, m.source, keeper)
        return Done()

    async def _release(self, m: Release) -> Done:
        """Forget a replica that was moved to another host, unless it has come back since."""
        replica = self._replicas.get(m.shard)
        if replica is not None and replica.epoch <= m.epoch:
            self._left[m.shard] = self._replicas.pop(m.shard).epoch
            await replica.close()
        return Done()

    async def _restore(self, m: Restore) -> Brought:
        """Fetch the state from where the durability keeps it, and serve the shard alone."""
        self._note_keepers(m)
        keeper, life = self._persistence(m.shard, m.from_below), self._life
        if m.since:
            got = self._got(m)
            state = got.state
            keeper.take_over(got.saved, state.version)
        else:
            state = await keeper.restore(m.epoch, m.cut)
        if life != self._life:
            raise LeaseExpired(f"{self._node} was given up while it restored the state")
        await self._adopt(m.shard, m.epoch, (m.host,), state, keeper.source, keeper)
        return brought(keeper.source, state)

    def _got(self, m: Restore) -> Replica:
        """The replica that an earlier attempt to restore a shard has brought here."""
        replica = self._replicas.get(m.shard)
        if replica is None or replica.epoch < m.since:
            raise StaleEpoch(f"{self._node} has got no state of shard {m.shard} since {m.since}")
        return replica

    async def _adopt(
        self,
        shard: int,
        epoch: int,
        chain: tuple[Endpoint, ...],
        state: ShardState,
        source: str,
        keeper: Persistence,
    ) -> None:
        old = self._replicas.get(shard)
        if old is not None and old.epoch > epoch:
            raise StaleEpoch(f"shard {shard} is in epoch {old.epoch}, not {epoch}")
        if self._clock.monotonic() < self._rests_until:
            raise NotServing(f"{self._node} has failed {self._failures + 1} times, and rests")
        if old is None and epoch <= (left := self._left.get(shard, 0)):
            raise StaleEpoch(f"{self._node} gave shard {shard} up after epoch {left}")
        # Who was not told that this was done asks again; the replica may have gone on since.
        replica = old if old is not None and old.epoch == epoch else None
        if replica is not None and replica.state.index < state.index:
            # Whoever sent this state would go on from there, and leave a gap.
            raise NotServing(f"{self._node} holds an earlier copy of shard {shard}")
        if replica is None:
            replica = self._replicas[shard] = Replica(
                shard,
                self._group,
                self._node,
                self._me,
                state,
                epoch,
                chain,
                keeper,
                self._transport,
                self._clock,
                self._emit,
                self._tasks,
                self._each,
            )
            if old is not None:
                await old.close()
        if replica.is_head:
            await replica.make_durable(epoch)
            now = self._clock.now()
            if self._restored.get(shard, 0) < epoch:  # the first time it may have failed half-way
                self._restored[shard] = epoch
                self._emit(Restored(now, shard, epoch, self._node, state.version, source))
            await self._take_mail(replica, epoch)

    async def _take_mail(self, replica: Replica, epoch: int) -> None:
        """Apply what workers left in the mailbox while the shard was down.

        It stays there until the shard is served: until then somebody else may have to begin anew.
        """
        if not self._group.recovery.uses_mailbox:
            return
        mailboxes = self._keepers_of(replica.shard).mailboxes
        take, timings = TakeMail(replica.shard, epoch), self._group.timings
        calls = [self._transport.call(box, take, timings.copy, "store") for box in mailboxes]
        # What was acked is in all of them, and nothing more is as soon as one is closed. What is in
        # some is no less welcome.
        found: list[Mail] = await answers_of(calls, timings.lease)
        mail = {op.id: op for each in found for op in each.operations}
        if mail:
            await replica.replay(epoch, tuple(mail.values()))

    def _persistence(self, shard: int, from_below: bool = False) -> Persistence:
        group = self._group
        context = ServerContext(
            shard=shard,
            group=f"{group.name}-{group.instance}",
            name=group.name,
            coordinator=group.coordinator,
            timings=group.timings,
            transport=self._transport,
            clock=self._clock,
            emit=self._emit,
            tasks=self._tasks,
            layout=group.layout.shards[shard],
            history=lambda: self._history,
            stores=partial(self._stores_of, shard),
            whole_stores=partial(self._whole_stores_of, shard),
            ask_store=self._reach.ask_store,
            from_below=from_below,
        )
        return group.recovery.durability.persistence(context)

    def _note_keepers(self, m: Install | Restore | Configure) -> None:
        """Keep who keeps states and mail; raises `StaleEpoch` if a later epoch was heard of."""
        newest, _ = self._keepers.get(m.shard, (0, None))
        if m.epoch < newest:
            raise StaleEpoch(f"shard {m.shard} is in epoch {newest}, not {m.epoch}")
        self._keepers[m.shard] = m.epoch, m.keepers

    def _keepers_of(self, shard: int) -> Keepers:
        return self._keepers[shard][1]

    def _stores_of(self, shard: int) -> tuple[Endpoint, ...]:
        stores = self._keepers_of(shard).stores
        if not stores:
            raise NotServing("the group has no node for the state store")
        return stores

    def _whole_stores_of(self, shard: int) -> tuple[Endpoint, ...]:
        return self._stores_of(shard)[: self._keepers_of(shard).whole]


def _figures_of(replica: Replica) -> ReplicaMetrics:
    tally = replica.ledger.tally
    return ReplicaMetrics(
        shard=replica.shard,
        epoch=replica.epoch,
        head=replica.is_head,
        version=replica.state.version,
        updates=tally.updates,
        duplicates=replica.duplicates,
        staleness=tuple(tally.staleness),
        staleness_sum=tally.staleness_sum,
        waiting=tally.waiting,
        uncommitted=replica.uncommitted,
    )


def _described(message: Any) -> str:
    """What was to be done, to which shard, in which epoch."""
    what = type(message).__name__
    if hasattr(message, "operation"):
        what = f"{what} of {'/'.join(map(str, message.operation.id))}"
    if hasattr(message, "epoch"):
        what = f"{what} (shard {message.shard}, epoch {message.epoch})"
    return what


def _at_once(service: Callable[[Any], Any]) -> Callable[[Any], Awaitable[Any]]:
    """Make a service of a function that has nothing to wait for."""

    async def serve(message: Any) -> Any:
        return service(message)

    return serve
