"""A client's requests to one shard, one after the other.

Updates of a worker reach a shard in order, so the shard recognises a duplicate by its number. A
shard client resends requests that were not acknowledged, finds the new server, and follows the
group's outage policy while there is none. Every request has a deadline.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from dps.core.consistency import ASP
from dps.core.replay import Continue
from dps.core.shard import check_gradient
from dps.core.updates import Operation, UpdateId
from dps.errors import (
    DpsError,
    Evicted,
    GroupClosed,
    KeysUnknown,
    MailboxClosed,
    NotServing,
    RemoteError,
    ShardUnavailable,
    StaleEpoch,
    StoreUnavailable,
    TransportError,
)
from dps.protocol import messages as msg
from dps.protocol.client.read_point import Copy, ShardRead
from dps.protocol.compression import KnownKeys, applicable, decoded_bytes
from dps.protocol.executor import offload
from dps.protocol.transport import Done, Endpoint

if TYPE_CHECKING:
    from dps.protocol.client.client import Client

T = TypeVar("T")

Outcome = Literal["applied", "duplicate", "repeated", "buffered", "dropped"]
OnAck = Callable[[int, UpdateId, int, Outcome], None]
# Sends a request to a shard in this view; None: it is to be repeated.
Attempt = Callable[[msg.View], Awaitable[T | None]]

# The shard may be served again soon.
TEMPORARY = (TransportError, StaleEpoch, NotServing, MailboxClosed, StoreUnavailable)
BUFFERED = msg.Pushed("buffered", 0, 0, None)  # no shard has replied


class ShardClient:
    """The requests of a client to one shard. Used from one event loop."""

    def __init__(self, shard: int, client: Client) -> None:
        self._shard = shard
        self._client = client
        self._router = client.router
        self._group = client.group
        self._timings = client.group.timings
        self._layout = client.group.layout.shards[shard]
        self._turn = asyncio.Lock()
        self.read = ShardRead()  # replaced as a whole, so any thread may look at it
        self.keys = KnownKeys()  # lists of indices that the shard's head has received
        self.clock = 0  # of the worker on this shard, at the last acknowledgement
        self.acked_in = 0  # the epoch of the last acknowledgement
        self._copy = Copy(self._layout)
        self._held: list[Operation] = []
        self._deposited = 0
        self._missed: dict[Endpoint, float] = {}  # unreachable mailboxes, and since when
        self._since_read = 0
        self._number = 0
        self._why = ""  # why the shard makes this client wait, if it gives a reason
        self._waits_for_workers = False
        self._last: UpdateId | None = None
        self._clock_sent_in = 0  # the epoch in which the shard received the worker's clock
        # If all shards are restored together, so are all clocks; the client must not send its own.
        gated = not isinstance(client.group.consistency, ASP)
        self._sends_clock = gated and not client.group.restores_together
        self._catching_up: asyncio.Task[None] | None = None
        self._evicted_as = -1

    @property
    def evicted(self) -> bool:
        """Whether the shard has refused the worker's present incarnation: it must enter again."""
        return self._evicted_as >= self._client.incarnation

    async def push(self, op: Operation, pull: bool) -> None:
        """Deliver an operation to the shard, or to a buffer if the outage policy permits that.

        With `pull`, also read the weights, in the same round trip if the shard replies.
        """
        async with self._turn:
            if op.kind == "join":
                self._last = None
                if self._sends_clock:
                    self._catch_up()
            else:
                self._since_read += 1
                self._number = op.id.seq
            await self._deliver(op, pull)

    async def _deliver(self, op: Operation, pull: bool, since: float | None = None) -> None:
        try:
            attempt, meanwhile = partial(self._push, op, pull), partial(self._buffer, op)
            reply = await self._until_served(f"push of {op.id}", attempt, meanwhile, since)
        except Evicted:
            self._drop([op])
        else:
            if pull and reply.weights is None:
                await self._read(op.id._replace(seq=0))

    def begin_push(self, op: Operation, pull: bool, done: Done) -> bool:
        """Push an update as `push` does, without a task, if nothing has to be awaited before.

        Returns whether it has begun; then `done` is called later, with None or an exception. What
        is no plain ack is left to a task, which may send the update again. For clients that are
        not gated.
        """
        view = self._router.served(self._shard)
        if view is None or self._held or not taken(self._turn):
            return False
        request = msg.Push(view.shard, view.epoch, op, pull, self._timings.hold)
        deadline, since = self._timings.call + self._timings.hold, asyncio.get_running_loop().time()
        replied = partial(self._replied, op, pull, view, since, done)
        has_begun = False
        try:
            has_begun = self._router.begin(view, view.chain[0], request, deadline, "train", replied)
        finally:
            if not has_begun:
                self._turn.release()
        if has_begun:
            self._since_read += 1
            self._number = op.id.seq
        return has_begun

    def _replied(
        self, op: Operation, pull: bool, view: msg.View, since: float, done: Done, reply: Any
    ) -> None:
        """Take what came of `begin_push`."""
        ended: Done = partial(self._release, done)
        if isinstance(reply, msg.Pushed):
            try:
                self._acked(op, view.epoch, reply)
            except Exception as error:  # noqa: BLE001 - raised by the caller
                return ended(error)
            if pull and reply.weights is None:
                return self._client.run(self._read(op.id._replace(seq=0)), ended)
            return ended(None)
        if isinstance(reply, TransportError):
            self._router.report(view.chain[0])
        self._why = reply.reason if isinstance(reply, msg.Waiting) else ""
        if isinstance(reply, (*TEMPORARY, Evicted, TimeoutError, msg.Waiting)):
            self._client.run(self._deliver(op, pull, since), ended)
        else:
            ended(reply)

    def _release(self, done: Done, outcome: Any) -> None:
        self._turn.release()
        done(outcome)

    async def pull(self, reader: UpdateId) -> None:
        """Read the weights; during an outage the last ones may have to do."""
        async with self._turn:
            await self._read(reader)

    async def pull_rows(self, reader: UpdateId, rows: msg.RowsAsked) -> msg.RowsRead | None:
        """Read rows of a table, and wait for a shard that is down; None: the worker was evicted."""
        async with self._turn:
            try:
                attempt = partial(self._ask_to_read, reader, rows)
                read: msg.RowsRead = await self._until_served("pull of rows", attempt)
            except Evicted:
                self._note_evicted(reader.incarnation)
                return None
        self.read = self.read._replace(seen=(read.version, read.at))
        return read

    async def call(self, op: Operation) -> np.ndarray:
        """Run a function on the shard, once; return its packed result.

        Waits for a shard that is down, because a result cannot be buffered. Raises `Evicted` if a
        later incarnation of the caller has called.
        """

        async def attempt(view: msg.View) -> np.ndarray | None:
            try:
                await self._send_earlier(view)
            except Evicted:  # that is no reason to refuse a call, which no clock bounds
                self._note_evicted(op.id.incarnation)
            request = msg.Push(view.shard, view.epoch, op, False, self._timings.hold)
            reply = await self._ask(view, view.chain[0], request)
            if reply is None:
                return None
            if reply.result is None:  # a shard keeps the result of the caller's last call
                raise Evicted(
                    f"a later incarnation has replaced {op.id.worker} (incarnation "
                    f"{op.id.incarnation}), which was unreachable: end this process"
                )
            self._note_acked(op, view.epoch, reply)
            result: np.ndarray = reply.result
            return result

        async with self._turn:
            return await self._until_served(f"call {op.id}", attempt)

    async def drain(self) -> None:
        """Wait until the gradients that are buffered, here or in a mailbox, are applied."""
        # A shard is served again only with the gradients in its mailbox.
        async with self._turn:
            with suppress(Evicted):
                if self._held or self._deposited:
                    await self._until_served("drain", self._flush_held)
                    self._deposited = 0

    async def at_rest(self) -> None:
        """Wait until nothing is under way; nothing more may be sent."""
        await self.close()
        async with self._turn:
            pass

    async def close(self) -> None:
        """Forget what is buffered in this worker."""
        if self._catching_up is not None:
            self._catching_up.cancel()
            await asyncio.gather(self._catching_up, return_exceptions=True)

    # -- attempts: each returns None if it is to be repeated --------------------------------------

    async def _push(self, op: Operation, pull: bool, view: msg.View) -> msg.Pushed | None:
        await self._send_earlier(view)
        head, has = view.chain[0], self._copy.has if pull else None
        shortened = partial(self.keys.shortened, op, head)
        sent = await offload(shortened, op.nbytes if op.codec else 0)
        request = msg.Push(view.shard, view.epoch, sent, pull, self._timings.hold, has)
        try:
            reply: msg.Pushed | None = await self._ask(view, head, request)
        except KeysUnknown:
            self.keys.forget()
            return None
        if reply is None:
            return None
        self.keys.acked(op, sent, head)
        if reply.weights is not None:
            reply = replace(reply, weights=await self._copy.whole(reply.weights))
        self._acked(op, view.epoch, reply)
        return reply

    async def _read(self, reader: UpdateId) -> None:
        """Read the weights, unless the worker is evicted: that drops nothing that it has pushed."""

        async def attempt(view: msg.View) -> msg.Weights | None:
            reply = await self._ask_to_read(reader, None, view)
            weights = None if reply is None else await self._copy.whole(reply)
            if weights is not None:
                self._keep(reader.incarnation, weights)
            return weights

        async def keep_last(view: msg.View) -> msg.Weights | None:
            """Compute from the last weights again, as far as the consistency model allows."""
            last, same = self.read.weights, self.read.incarnation == reader.incarnation
            keeps = isinstance(self._group.recovery.outage, Continue) and reader.worker
            if last is None or not keeps:
                return None
            return last if last.slack < 0 or (same and self._since_read <= last.slack) else None

        try:
            await self._until_served("pull", attempt, keep_last)
        except Evicted:
            self._note_evicted(reader.incarnation)

    async def _ask_to_read(
        self, reader: UpdateId, rows: msg.RowsAsked | None, view: msg.View
    ) -> Any | None:
        await self._send_earlier(view)  # the shard judges by this worker's clock
        seen, has = self.read.seen[0] if self.read.seen else 0, None if rows else self._copy.has
        request = msg.Pull(view.shard, view.epoch, reader, seen, self._timings.hold, has, rows)
        replica = view.chain[-1]
        if self._group.recovery.durability.above.reads == "any":
            replica = view.chain[zlib.crc32(reader.worker.encode()) % len(view.chain)]
        return await self._ask(view, replica, request)

    async def _buffer(self, op: Operation, view: msg.View) -> msg.Pushed | None:
        """Buffer an operation while the shard is down, in this worker or in the mailboxes."""
        outage = self._group.recovery.outage
        if op.kind == "join" or not isinstance(outage, Continue):
            return None
        is_here = outage.buffer == "worker"
        if (len(self._held) if is_here else self._deposited) >= outage.limit:
            return None
        if op.kind == "gradient":  # no shard checks it now, and it could keep one from recovering
            nbytes = decoded_bytes(self._layout, op)
            await offload(
                lambda: check_gradient(self._layout, applicable(self._layout, op)), nbytes
            )
        if is_here:
            copied = await offload(op.copied, op.nbytes)  # the arrays may be the caller's
            self._client.may_go_on()  # a worker that has ended sends no buffered gradients
            self._held.append(copied)
            self._catch_up()
        else:
            mailboxes = (await self._router.table()).mailboxes
            if not mailboxes:
                return None
            await self._deposit_in(mailboxes, msg.Deposit(self._shard, view.epoch, op))
            self._deposited += 1
            self._last, self._clock_sent_in = op.id, 0
        if op.kind == "gradient":
            self._client.note_outcome(self._shard, op.id, 0, "buffered")
        return BUFFERED

    # -- acknowledgements -------------------------------------------------------------------------

    def _acked(self, op: Operation, epoch: int, reply: msg.Pushed) -> None:
        self._deposited = 0
        self._missed.clear()
        self.clock = reply.clock
        # A worker that joins has a clock, but no number yet.
        self._last = op.id._replace(seq=reply.clock) if op.kind == "join" else op.id
        self._clock_sent_in = self.acked_in = epoch
        if reply.weights is not None:
            self._keep(op.id.incarnation, reply.weights)
        self._note_acked(op, epoch, reply)
        if op.kind == "gradient":
            self._client.note_outcome(self._shard, op.id, reply.version, reply.outcome)

    def _note_acked(self, op: Operation, epoch: int, reply: msg.Pushed) -> None:
        """Count an ack; on joining, that covers updates of other processes under this name."""
        name, incarnation, _ = op.id
        account = msg.Account(self._shard, name, epoch, reply.applied, incarnation)
        self._client.receipts.acked(account)

    def _keep(self, incarnation: int, weights: msg.Weights) -> None:
        seen = weights.version, weights.at
        self.read = ShardRead(weights, incarnation, self._number, seen)
        self._since_read = 0

    def _drop(self, ops: Sequence[Operation]) -> None:
        for op in ops:
            self._note_evicted(op.id.incarnation)
            if op.kind == "gradient":
                self._client.note_outcome(self._shard, op.id, 0, "dropped")

    def _note_evicted(self, incarnation: int) -> None:
        self._evicted_as = max(self._evicted_as, incarnation)

    # -- what a shard must have before a request ---------------------------------------------------

    async def _send_earlier(self, view: msg.View) -> None:
        await self._send_clock(view)
        await self._flush_held(view)

    def _catch_up(self) -> None:
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = self._client.tasks.start(self._catch_up_forever())

    async def _catch_up_forever(self) -> None:
        """Others may wait for this worker at a restored shard, while it sends nothing to it."""
        version = -1
        while True:
            try:
                version = (await self._router.newer(version)).version
                async with self._turn:
                    view = (await self._router.table()).views[self._shard]
                    if view.serving:
                        await self._send_earlier(view)
            except GroupClosed:
                return
            except (DpsError, TimeoutError) as error:
                if self._held and not isinstance(error, (*TEMPORARY, Evicted, TimeoutError)):
                    raise  # other workers may wait for buffered updates; no other task sends them
                if isinstance(error, RemoteError):
                    return
                version = -1
                await asyncio.sleep(self._timings.retry)

    async def _send_clock(self, view: msg.View) -> None:
        """Send this worker's clock to a shard in a new epoch, which may have lost it."""
        # So may a mailbox, and a replay policy may leave out what was buffered.
        if not self._sends_clock or self._last is None or self._clock_sent_in == view.epoch:
            return
        join = Operation("join", self._last)
        request = msg.Push(view.shard, view.epoch, join, False, self._timings.hold)
        await self._ask(view, view.chain[0], request)
        self._clock_sent_in = view.epoch

    async def _flush_held(self, view: msg.View) -> bool:
        """Apply the gradients that are buffered here; they come before newer ones."""
        # Those of an earlier incarnation may be refused, which does not concern the present one.
        if self._held:
            request = msg.ReplayBuffered(self._shard, view.epoch, tuple(self._held))
            try:
                await self._ask(view, view.chain[0], request, self._timings.copy)
            except Evicted:
                refused, self._held = self._held, []
                self._drop(refused)
                if self.evicted:
                    raise
                return True
            self._last, self._clock_sent_in = self._held[-1].id, 0
            self._held.clear()
            await self._send_clock(view)
        return True

    async def _deposit_in(self, mailboxes: Sequence[Endpoint], request: msg.Deposit) -> None:
        """Deposit a gradient in each of several mailboxes: only then it is safe."""
        # The coordinator may drop a mailbox that is unreachable for longer than a lease.
        now = asyncio.get_running_loop().time
        for mailbox in mailboxes:
            try:
                await self._router.transport.call(mailbox, request, self._timings.call, "store")
            except TransportError:
                missed = now() - self._missed.setdefault(mailbox, now())
                link = msg.ReportLink(self._shard, request.epoch, mailbox, missed)
                self._router.report(mailbox, link if missed > self._timings.lease else None)
                raise
            self._missed.pop(mailbox, None)

    # -- one request, until it is served -----------------------------------------------------------

    async def _until_served(
        self,
        what: str,
        attempt: Attempt[T],
        meanwhile: Attempt[T] | None = None,
        since: float | None = None,
    ) -> T:
        """Repeat `attempt` until it succeeds; while the shard is down, try `meanwhile` instead.

        Raises `ShardUnavailable` if the shard stays down for longer than `Timings.unavailable`,
        which counts from the loop's time `since` (None: now, at the first attempt).
        """
        limit = self._timings.unavailable
        if since is None:
            since, self._why = asyncio.get_running_loop().time(), ""
        view = (await self._router.table()).views[self._shard]
        try:
            async with asyncio.timeout_at(since + limit) as scope:
                while True:
                    self._client.may_go_on()
                    if (result := await self._attempt(view, attempt, meanwhile)) is not None:
                        return result
                    if self._waits_for_workers:  # so the shard is served
                        scope.reschedule(asyncio.get_running_loop().time() + limit)
                    view = (await self._router.table()).views[self._shard]
        except TimeoutError:
            what = f"{what}: shard {self._shard} (epoch {view.epoch})"
            why = f": {self._why}" if self._why else ""
            raise ShardUnavailable(f"{what} was not served for {limit:g} s{why}") from None

    async def _attempt(
        self, view: msg.View, attempt: Attempt[T], meanwhile: Attempt[T] | None
    ) -> T | None:
        """Try once; return None when it is time to try again with the view that is then known."""
        self._waits_for_workers = False
        try:
            if view.serving:
                return await attempt(view)
            result = None if meanwhile is None else await meanwhile(view)
            if result is None:
                await self._until_replaced(view)
            return result
        except TimeoutError:
            return None
        except TEMPORARY:
            await self._until_replaced(view, self._timings.retry)
            return None

    async def _until_replaced(self, view: msg.View, patience: float = math.inf) -> None:
        until = asyncio.get_running_loop().time() + patience
        while (table := await self._router.table()).views[self._shard] == view:
            self._client.may_go_on()
            try:
                async with asyncio.timeout_at(until):
                    await self._router.newer(table.version)
            except TimeoutError:
                break

    async def _ask(
        self, view: msg.View, to: Endpoint, request: Any, deadline: float | None = None
    ) -> Any | None:
        """Ask a replica; None: it makes this client wait, and the reason is noted."""
        deadline = deadline or self._timings.call + self._timings.hold
        try:
            reply = await self._router.call(view, to, request, deadline, "train")
        except TransportError:
            self._router.report(to)
            raise
        if isinstance(reply, msg.Waiting):
            self._why, self._waits_for_workers = reply.reason, reply.for_workers
            return None
        return reply


def taken(turn: asyncio.Lock) -> bool:
    """Acquire a lock if that needs no wait; return whether it was acquired."""
    acquiring = turn.acquire()
    try:
        acquiring.send(None)
    except StopIteration:
        return True
    acquiring.close()
    return False
