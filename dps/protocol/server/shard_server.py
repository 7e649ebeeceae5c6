"""The server on one node: its replicas of shards, or the state store and mailboxes.

It carries out every message to its node while it holds a lease. It brings a shard into service,
from initial values, a checkpoint or the store, and then applies what is in the shard's mailboxes.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

from dps.core.checkpoint_interval import FailureHistory
from dps.core.shard import ShardState
from dps.core.updates import Operation
from dps.errors import DpsError, LeaseExpired, NotServing, StaleEpoch
from dps.events import Restored
from dps.protocol import messages as msg
from dps.protocol.compression import KeyLists
from dps.protocol.executor import offload
from dps.protocol.lease import Lease
from dps.protocol.server.node import ServerNode
from dps.protocol.server.replica import Replica
from dps.protocol.server.snapshot_barrier import SnapshotBarrier
from dps.protocol.tasks import Tasks, task_failed
from dps.protocol.transport import answers_of
from dps.recovery.durability import Persistence, ServerContext
from dps.recovery.shared_store import Mailboxes, StateStore

# Requests of clients, which carry arguments of users.
OF_CLIENTS = (msg.Push, msg.Pull, msg.ReplayBuffered, msg.Deposit, msg.Save, msg.Describe)

FORGIVEN = 6  # leases after which an earlier failure counts no more
MAX_DOUBLINGS = 20


class ShardServer:
    """The server on one node. Used from one event loop."""

    def __init__(self, node: ServerNode) -> None:
        self.node = node
        self._group = node.group
        self._replicas: dict[int, Replica] = {}
        self._states = StateStore()
        self._mailboxes = Mailboxes()
        self._keys = KeyLists()
        self._restored: dict[int, int] = {}
        self._keepers: dict[int, tuple[int, msg.Keepers]] = {}
        self._left: dict[int, int] = {}  # shards that were given up, and after which epoch
        self._lease = Lease(node.group.timings, node.clock)
        self._life = 0
        self._history = FailureHistory()
        self._tasks = Tasks(self._fail)
        self._failures = 0  # in a row
        self._failed_at = self._rests_until = -math.inf
        # Requests that no epoch of a replica here fences.
        self._keeping: dict[type, Callable[[Any], Any]] = {
            msg.PutState: self._states.put,
            msg.PutSince: self._states.put_since,
            msg.LookUp: self._states.look_up,
            msg.GetState: self._states.get,
            msg.Deposit: self._mailboxes.deposit,
            msg.TakeMail: self._mailboxes.take,
            msg.ClearMail: self._mailboxes.clear,
            msg.Release: self._release,
            msg.Flush: lambda m: self.flush(),
        }
        self._serving: dict[type, Callable[[Any], Awaitable[Any]]] = {
            msg.Push: self._push,
            msg.Pull: lambda m: self.replica(m.shard).pull(m),
            msg.ReplayBuffered: self._replay,
            msg.Replicate: lambda m: self.replica(m.shard).replicate(m),
            msg.Install: self._install,
            msg.Restore: self._restore,
            msg.Configure: self._configure,
            msg.Extend: lambda m: self.replica(m.shard).extend(m),
            msg.Evict: lambda m: self.replica(m.shard).evict(m),
            msg.HoldCut: lambda m: self._cutter(m).hold(m),
            msg.TakeCut: lambda m: self._cutter(m).take(m),
            msg.EndCut: lambda m: self._cutter(m).end(m),
            msg.Save: lambda m: self.replica(m.shard).save(m),
            msg.Describe: lambda m: self.replica(m.shard).describe(),
            msg.CanReach: self._can_reach,
        }

    @property
    def stored_bytes(self) -> int:
        """Bytes that this node keeps for others, as a state store and mailbox."""
        return self._states.nbytes + self._mailboxes.nbytes

    def start(self) -> None:
        """Ask for a lease, and renew it from now on."""
        renewal = self._group.timings.renewal
        self._tasks.repeat(lambda: self._lease.renew(self._renew), renewal)

    async def handle(self, message: Any) -> Any:
        """Carry out one message and return its reply; raises `DpsError` to be sent back."""
        at_once = self.at_once(message)
        return await self.carry_out(message) if at_once is None else at_once

    async def carry_out(self, message: Any) -> Any:
        """Carry out a message as `handle` does; it may have to wait."""
        # The process may be paused anywhere, so lease and epoch are checked again before the reply.
        # A pause after that only delays a reply that was right while the lease lasted.
        try:
            self._must_hold_lease(message)
            reply = await self._dispatch(message)
            self._must_hold_lease(message)
            self._must_still_be_in_epoch(message)
        except DpsError as error:
            raise type(error)(f"{_described(message)}: {error}") from error
        except Exception as error:
            if not isinstance(message, OF_CLIENTS):
                self._fail(error)  # a client's request harms only itself
            raise
        return reply

    def at_once(self, message: Any) -> Any:
        """Carry out a message as `handle` does if that needs no wait; otherwise return None."""
        replica = self._replicas.get(message.shard) if type(message) is msg.Push else None
        if replica is None:
            return None
        try:
            self._must_hold_lease(message)
            reply = replica.push_at_once(message)
            self._must_hold_lease(message)
        except DpsError as error:
            raise type(error)(f"{_described(message)}: {error}") from error
        return reply

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """The replicas on this node."""
        return tuple(self._replicas.values())

    def flush(self) -> None:
        """Emit the events of updates that were applied since the last flush."""
        for replica in self._replicas.values():
            replica.ledger.flush()

    def replica(self, shard: int) -> Replica:
        """Return the replica of a shard on this node; raises `NotServing` if there is none."""
        try:
            return self._replicas[shard]
        except KeyError:
            raise NotServing(f"{self.node.name} holds no replica of shard {shard}") from None

    async def close(self) -> None:
        """Stop serving."""
        for replica in self._replicas.values():
            await replica.close()
        await self._tasks.close()

    # -- the right to serve ----------------------------------------------------------------------

    def _must_hold_lease(self, message: Any) -> None:
        if not self._lease.held and not isinstance(message, msg.Flush):
            raise LeaseExpired(f"the lease of {self.node.name} is over")

    def _must_still_be_in_epoch(self, message: Any) -> None:
        # A replica that is in the epoch of the request has had the same chain all the time.
        if type(message) not in self._keeping:
            self.replica(message.shard).must_be_in(message.epoch)

    async def _renew(self, deadline: float) -> bool:
        life = self._life
        request = msg.RenewLease(self.node.me, life, self.node.watched())
        reply = await self.node.transport.call(self._group.coordinator, request, deadline)
        if reply.history.exposure > self._history.exposure:  # replies may overtake one another
            self._history = reply.history
        if not reply.granted and life == self._life:
            self._start_over()
        return bool(reply.granted) and life == self._life

    def _fail(self, error: Exception) -> None:
        """Start over, as after a kill: a failed part may have left anything undone."""
        self.node.emit(task_failed(self.node.clock, self.node.name, error))
        now, timings = self.node.clock.monotonic(), self._group.timings
        again = now - self._failed_at < FORGIVEN * timings.lease
        self._failures = self._failures + 1 if again else 0
        self._failed_at = now
        # If this happens repeatedly, the server takes no shard for a while.
        if self._failures:
            rest = min(timings.lease, timings.retry * 2.0 ** min(self._failures, MAX_DOUBLINGS))
            self._rests_until = now + rest
        self._start_over()

    def _start_over(self) -> None:
        self._life += 1
        self._lease.end()
        for shard in [*self._replicas]:
            self._drop(shard)
        self._states.clear()
        self._mailboxes.clear_all()
        self._keys = KeyLists()

    # -- messages ----------------------------------------------------------------------------------

    async def _dispatch(self, m: Any) -> Any:
        keep = self._keeping.get(type(m))
        return await self._serving[type(m)](m) if keep is None else keep(m)

    async def _push(self, m: msg.Push) -> msg.Pushed | msg.Waiting:
        if m.operation.codec:
            work = partial(self._keys.completed, m.operation)
            m = replace(m, operation=await offload(work, m.operation.nbytes))
        replica = self.replica(m.shard)
        replica.ledger.waiting += 1
        try:
            return await replica.push(m)
        finally:
            replica.ledger.waiting -= 1

    async def _replay(self, m: msg.ReplayBuffered) -> None:
        await self.replica(m.shard).replay(m.epoch, m.operations, late=True)

    async def _can_reach(self, m: msg.CanReach) -> None:
        look, deadline = msg.LookUp(m.shard, m.epoch), self._group.timings.hold
        await self.node.transport.call(m.store, look, deadline, "store")

    def _cutter(self, m: msg.HoldCut | msg.TakeCut | msg.EndCut) -> SnapshotBarrier:
        replica = self.replica(m.shard)
        if replica.cutter is None or replica.epoch != m.epoch:
            raise StaleEpoch(f"shard {m.shard} is in epoch {replica.epoch}, not {m.epoch}")
        return replica.cutter

    # -- bringing a shard into service -----------------------------------------------------------

    async def _install(self, m: msg.Install) -> None:
        """Hold a state that was sent: the initial values, or a copy of the predecessor's."""
        self._note_keepers(m)
        persistence = self._persistence(m.shard)
        if m.source == "replica":
            persistence.take_over(m.saved, m.state.version)
        view = msg.View(m.shard, m.epoch, m.chain, serving=True)
        await self._adopt(view, m.state, m.source, persistence)

    async def _restore(self, m: msg.Restore) -> msg.Brought:
        self._note_keepers(m)
        persistence, life = self._persistence(m.shard, m.from_below), self._life
        if m.since:  # an earlier attempt has brought the state here
            got = self._replicas.get(m.shard)
            if got is None or got.epoch < m.since:
                name = self.node.name
                raise StaleEpoch(f"{name} has received no state of shard {m.shard} since {m.since}")
            state = got.state
            persistence.take_over(got.persistence.saved, state.version)
        else:
            state = await persistence.restore(m.epoch, m.cut)
        if life != self._life:
            raise LeaseExpired(f"the lease of {self.node.name} ended while it restored the state")
        view = msg.View(m.shard, m.epoch, (m.host,), serving=True)
        await self._adopt(view, state, persistence.source, persistence)
        return msg.brought(persistence.source, state)

    async def _configure(self, m: msg.Configure) -> None:
        replica = self.replica(m.shard)
        self._note_keepers(m)
        await replica.configure(m)
        if not m.kept:
            await replica.make_durable(m.epoch)
        if replica.is_head:
            await self._take_mail(replica, m.epoch)

    def _release(self, m: msg.Release) -> None:
        """Forget a replica that was moved to another node, unless it has come back since."""
        replica = self._replicas.get(m.shard)
        if replica is not None and replica.epoch <= m.epoch:
            self._drop(m.shard)

    def _drop(self, shard: int) -> None:
        replica = self._replicas.pop(shard)
        self._left[shard] = replica.epoch
        self._tasks.start(replica.close())

    async def _adopt(
        self, view: msg.View, state: ShardState, source: str, persistence: Persistence
    ) -> None:
        name, shard, epoch = self.node.name, view.shard, view.epoch
        old = self._replicas.get(shard)
        if old is not None and old.epoch > epoch:
            raise StaleEpoch(f"shard {shard} is in epoch {old.epoch}, not {epoch}")
        if self.node.clock.monotonic() < self._rests_until:
            raise NotServing(f"{name} waits after {self._failures + 1} failures")
        if old is None and epoch <= (left := self._left.get(shard, 0)):
            raise StaleEpoch(f"{name} left shard {shard} after epoch {left}")
        if old is not None and old.epoch == epoch:
            # A repeated request, whose reply was lost; the replica may have new operations since.
            replica = old
            if replica.state.index < state.index:
                # The sender would continue from its own state, and leave a gap.
                raise NotServing(f"{name} holds an earlier copy of shard {shard}")
        else:
            replica = Replica(self.node, self._tasks, view, state, persistence)
            self._replicas[shard] = replica
            if old is not None:
                await old.close()
        if replica.is_head:
            await replica.make_durable(epoch)
            now = self.node.clock.now()
            if self._restored.get(shard, 0) < epoch:  # the first time it may have failed half-way
                self._restored[shard] = epoch
                self.node.emit(Restored(now, shard, epoch, name, state.version, source))

    async def _take_mail(self, replica: Replica, epoch: int) -> None:
        """Apply what workers left in the mailbox."""
        # It stays there until the shard is served: another server may have to restore it before. If
        # no mailbox answers, the shard stays down: only mailboxes may have the buffered gradients.
        if not self._group.recovery.uses_mailbox:
            return
        mailboxes = self._keepers_in(replica.shard, epoch).mailboxes
        take, timings = msg.TakeMail(replica.shard, epoch), self._group.timings
        calls = [self.node.transport.call(box, take, timings.copy, "store") for box in mailboxes]
        # Acked mail is in all of them, and nothing is added as soon as one is closed. Mail that is
        # in some of them is applied as well.
        replies: list[tuple[Operation, ...]] = await answers_of(calls, timings.lease)
        mail = {op.id: op for each in replies for op in each}
        if mail:
            await replica.replay(epoch, tuple(mail.values()))

    def _persistence(self, shard: int, from_below: bool = False) -> Persistence:
        group, node = self._group, self.node
        context = ServerContext(
            shard=shard,
            group=f"{group.name}-{group.instance}",
            name=group.name,
            coordinator=group.coordinator,
            timings=group.timings,
            transport=node.transport,
            clock=node.clock,
            emit=node.emit,
            tasks=self._tasks,
            layout=group.layout.shards[shard],
            history=lambda: self._history,
            keepers=partial(self._keepers_in, shard),
            ask_store=node.ask_store,
            from_below=from_below,
        )
        return group.recovery.durability.persistence(context)

    def _note_keepers(self, m: msg.Install | msg.Restore | msg.Configure) -> None:
        """Record the stores and mailboxes of a shard; raises `StaleEpoch` in a past epoch."""
        newest, _ = self._keepers.get(m.shard, (0, None))
        if m.epoch < newest:
            raise StaleEpoch(f"shard {m.shard} is in epoch {newest}, not {m.epoch}")
        self._keepers[m.shard] = m.epoch, m.keepers

    def _keepers_in(self, shard: int, epoch: int) -> msg.Keepers:
        newest, keepers = self._keepers[shard]
        if epoch != newest:  # the replica is about to enter the next one
            raise StaleEpoch(f"shard {shard} is in epoch {newest}, not {epoch}")
        return keepers


def _described(message: Any) -> str:
    what = type(message).__name__
    if hasattr(message, "operation"):
        what = f"{what} of {'/'.join(map(str, message.operation.id))}"
    if hasattr(message, "epoch"):
        what = f"{what} (shard {message.shard}, epoch {message.epoch})"
    return what
