"""A client's requests to one shard, which follow one another.

Updates of a worker reach a shard in order, so the shard can tell a duplicate by its number alone. A
shard client sends again what was not acknowledged, finds the new server by itself, and follows the
group's outage policy while there is none. Nothing waits past its deadline.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np

from dps.core.blocks import ShardLayout
from dps.core.consistency import ASP
from dps.core.outage import Continue
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
from dps.protocol.client.copy import Copy
from dps.protocol.client.key_cache import KnownKeys
from dps.protocol.client.read_point import ShardRead
from dps.protocol.client.receipts import Receipts
from dps.protocol.client.routing_table import Router
from dps.protocol.compression import decoded_bytes, dense
from dps.protocol.executor import offload
from dps.protocol.group import Group
from dps.protocol.messages import (
    Account,
    Deposit,
    Pull,
    Push,
    Pushed,
    ReplayBuffered,
    ReportLink,
    RowsAsked,
    RowsRead,
    View,
    Waiting,
    Weights,
)
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Endpoint, Transport

Outcome = Literal["applied", "duplicate", "buffered", "dropped"]
OnAck = Callable[[int, UpdateId, int, Outcome], None]


class ShardClient:
    """One client's requests to one shard, one after the other. Used from one event loop.

    Parameters
    ----------
    receipts
        Keeps count of what is acknowledged.
    may_go_on
        Raises if nothing more is to be sent.
    tasks
        The client's background tasks.

    Attributes
    ----------
    incarnation
        As which the worker takes part.
    read
        What was read last. It is replaced as a whole, so any thread may look at it.
    keys
        The lists of indices that the shard's head has had.
    """

    def __init__(
        self,
        shard: int,
        group: Group,
        transport: Transport,
        router: Router,
        on_ack: OnAck,
        receipts: Receipts,
        may_go_on: Callable[[], None],
        tasks: Tasks,
    ) -> None:
        self._shard = shard
        self._group = group
        self._transport = transport
        self._router = router
        self._on_ack = on_ack
        self._receipts = receipts
        self._may_go_on = may_go_on
        self._tasks = tasks
        self._turn = asyncio.Lock()
        self.read = ShardRead()
        self._copy = Copy(group.layout.shards[shard])
        self._held: list[Operation] = []
        self._draining: asyncio.Task[None] | None = None
        self._deposited = 0
        self._missed: dict[Endpoint, float] = {}  # the mailboxes out of reach, and since when
        self._since_read = 0
        self._number = 0
        self._why = ""  # why the shard makes this client wait, if it says so
        self._waits_for_workers = False
        self._clock = 0
        self._last: UpdateId | None = None
        self._told_in = 0  # the epoch in which the shard was told of the last update
        self._telling: asyncio.Task[None] | None = None
        self.keys = KnownKeys()
        self.incarnation = 0
        self._evicted_as = -1
        self.acked_in = 0  # the epoch of the last acknowledgement

    @property
    def evicted(self) -> bool:
        """Whether the shard has refused the worker's present incarnation: it must enter again."""
        return self._evicted_as >= self.incarnation

    @property
    def clock(self) -> int:
        """The worker's clock on this shard when the last push was acknowledged."""
        return self._clock

    @property
    def base(self) -> Weights | None:
        """The weights that were read last."""
        return self.read.weights

    async def push(self, op: Operation, pull: bool) -> None:
        """Bring an operation to the shard, or to a buffer if the outage policy says so."""
        async with self._turn:
            if op.kind == "join":
                self._last = None
                self._begin_to_tell()
            if op.kind != "join":
                self._since_read += 1
                self._number = op.id.seq
            try:
                await self._deliver(op, pull)
            except Evicted:
                self._drop([op])

    async def pull(self, reader: UpdateId) -> None:
        """Read the weights; during an outage the last ones may have to do."""
        async with self._turn:
            await self._read_unless_evicted(reader)

    async def pull_rows(self, asked: RowsAsked) -> RowsRead | None:
        """Read rows of a table, however long that has to be waited for; None: it was evicted.

        `epoch`, `seen` and `patience` of what is asked are filled in here.
        """
        found: list[RowsRead] = []

        async def keep(reply: RowsRead) -> bool:
            found.append(reply)
            return True

        async with self._turn:
            try:
                await self._until_served("pull of rows", self._asking(asked, keep))
            except Evicted:
                self._note_evicted(asked.incarnation)
                return None
        self.read = self.read.with_rows(found[-1])
        return found[-1]

    async def call(self, op: Operation) -> np.ndarray:
        """Have a function run on the shard, once; return its packed result.

        It waits for a shard that is down: a result cannot be buffered. Raises `Evicted` if a later
        incarnation of the caller has called since.
        """
        results: list[np.ndarray] = []

        async def attempt(view: View) -> bool:
            try:
                await self._tell(view)
                await self._flush_held(view)  # what was pushed before comes before
            except Evicted:  # that is no reason to refuse a call, which no clock bounds
                self._note_evicted(op.id.incarnation)
            request = Push(view.shard, view.epoch, op, False, self._group.timings.hold)
            reply = await self._ask(view, view.chain[0], request)
            if self._must_wait(reply):
                return False
            if reply.result is None:  # what the caller is told of is always its last call
                raise Evicted(
                    f"{op.id.worker} (incarnation {op.id.incarnation}) was not heard of, and calls "
                    "under its name come from a later incarnation now: end this process"
                )
            results.append(reply.result)
            self._note_acked(op, view.epoch, reply)
            return True

        async with self._turn:
            await self._until_served(f"call {op.id}", attempt)
        return results[0]

    async def drain(self) -> None:
        """Wait until the gradients that are buffered, here or in a mailbox, are applied.

        A shard is served again only with what its mailbox has been given.
        """
        async with self._turn:
            with suppress(Evicted):
                if self._held or self._deposited:
                    await self._until_served("drain", self._flush_held)
                    self._deposited = 0

    async def at_rest(self) -> None:
        """Return when nothing that was sent is under way; nothing more may be."""
        await self.close()
        async with self._turn:
            pass

    async def close(self) -> None:
        """Forget what is buffered in this worker."""
        for task in (self._draining, self._telling):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    # -- how far the worker is -------------------------------------------------------------------

    def _begin_to_tell(self) -> None:
        """Where shards go back together, all know the same; what is sent again must not be told."""
        gated = not isinstance(self._group.consistency, ASP) and not self._group.restores_together
        if gated and (self._telling is None or self._telling.done()):
            self._telling = self._tasks.start(self._tell_forever())

    async def _tell_forever(self) -> None:
        """Others may wait for this worker at a restored shard, though it waits elsewhere."""
        version = -1
        while True:
            try:
                version = (await self._router.newer(version)).version
                async with self._turn:
                    view = await self._router.view(self._shard)
                    if view.serving:
                        await self._tell(view)
            except (GroupClosed, RemoteError):
                return
            except (DpsError, TimeoutError):
                version = -1
                await asyncio.sleep(self._group.timings.retry)

    async def _tell(self, view: View) -> None:
        """Have a shard in a new epoch know this worker's clock: its own may have been lost.

        So may what was in a mailbox; and a replay policy may leave out what was buffered.
        """
        if self._telling is None or self._last is None or self._told_in == view.epoch:
            return
        join = Operation("join", self._last)
        patience = self._group.timings.hold
        request = Push(view.shard, view.epoch, join, False, patience)
        await self._ask(view, view.chain[0], request)
        self._told_in = view.epoch

    # -- one request ---------------------------------------------------------------------------

    async def _deliver(self, op: Operation, pull: bool) -> None:
        """Push until it is acknowledged, buffered, or too late."""
        replies: list[Pushed] = []

        async def attempt(view: View) -> bool:
            await self._tell(view)
            await self._flush_held(view)
            patience, head = self._group.timings.hold, view.chain[0]
            work = partial(self.keys.shortened, op, head)
            sent = await offload(work, op.nbytes if op.codec else 0)
            has = self._copy.has if pull else None
            request = Push(view.shard, view.epoch, sent, pull, patience, has)
            try:
                reply = await self._ask(view, head, request)
            except KeysUnknown:
                self.keys.forget()
                return False
            if self._must_wait(reply):
                return False
            self.keys.acked(op, sent, head)
            if reply.weights is not None:
                reply = replace(reply, weights=await self._copy.whole(reply.weights))
            replies.append(reply)
            self.acked_in = view.epoch
            return True

        buffer = None if op.kind == "join" else self._buffering(op)
        await self._until_served(f"push of {op.id}", attempt, buffer)
        for reply in replies:
            self._acked(op, reply)
        if pull and not any(reply.weights for reply in replies):
            await self._read_unless_evicted(op.id)

    def _acked(self, op: Operation, reply: Pushed) -> None:
        self._deposited = 0
        self._missed.clear()
        self._clock = reply.clock
        # Where it joined it has a clock, but no number yet.
        self._last = op.id._replace(seq=reply.clock) if op.kind == "join" else op.id
        self._told_in = self.acked_in
        if reply.weights is not None:
            self._keep(op.id.incarnation, reply.weights)
        self._note_acked(op, self.acked_in, reply)
        if op.kind == "gradient":
            outcome: Outcome = "duplicate" if reply.outcome == "duplicate" else "applied"
            self._on_ack(self._shard, op.id, reply.version, outcome)

    def _note_acked(self, op: Operation, epoch: int, reply: Pushed) -> None:
        """Keep count; who joins is told of what other processes have pushed under its name."""
        name, incarnation, _ = op.id
        account = Account(self._shard, name, epoch, reply.applied, incarnation)
        self._receipts.acked(account)

    def _keep(self, incarnation: int, weights: Weights) -> None:
        self.read = self.read.with_weights(incarnation, self._number, weights)
        self._since_read = 0

    def _drop(self, ops: list[Operation]) -> None:
        """The shard refuses what the worker computed while nobody waited for it."""
        for op in ops:
            self._note_evicted(op.id.incarnation)
            if op.kind == "gradient":
                self._on_ack(self._shard, op.id, 0, "dropped")

    async def _read_unless_evicted(self, reader: UpdateId) -> None:
        try:
            await self._read(reader)
        except Evicted:  # what was pushed before it is not dropped
            self._note_evicted(reader.incarnation)

    def _note_evicted(self, incarnation: int) -> None:
        self._evicted_as = max(self._evicted_as, incarnation)

    async def _read(self, reader: UpdateId) -> None:
        async def keep_last(view: View) -> bool:
            """Compute from the last weights again, as far as the consistency model allows."""
            base, mine = self.base, self.read.incarnation == reader.incarnation
            allowed = base is not None and mine and self._since_read <= base.slack
            return allowed or (base is not None and base.slack < 0)

        async def keep_whole(reply: Weights) -> bool:
            whole = await self._copy.whole(reply)
            if whole is not None:
                self._keep(reader.incarnation, whole)
            return whole is not None

        keep = isinstance(self._group.recovery.outage, Continue) and reader.worker
        pull = Pull(self._shard, 0, reader.worker, reader.incarnation, 0, 0.0)
        attempt = self._asking(pull, keep_whole)
        await self._until_served("pull", attempt, keep_last if keep else None)

    def _asking(
        self, asked: Pull | RowsAsked, keep: Callable[[Any], Awaitable[bool]]
    ) -> Callable[[View], Awaitable[bool]]:
        async def attempt(view: View) -> bool:
            await self._tell(view)  # the shard judges by this worker's clock
            await self._flush_held(view)
            seen = self.read.seen[0] if self.read.seen else 0
            patience = self._group.timings.hold
            request = replace(asked, epoch=view.epoch, seen=seen, patience=patience)
            if isinstance(request, Pull):
                request = replace(request, has=self._copy.has)
            reply = await self._ask(view, self._serving_reads(view, asked.worker), request)
            return not self._must_wait(reply) and await keep(reply)

        return attempt

    def _serving_reads(self, view: View, worker: str) -> Endpoint:
        if self._group.recovery.durability.reads == "any":
            return view.chain[zlib.crc32(worker.encode()) % len(view.chain)]
        return view.chain[-1]

    async def _ask(
        self, view: View, to: Endpoint, request: Any, deadline: float | None = None
    ) -> Any:
        """Ask a replica, for as long as it is the one to ask; raises `TimeoutError` otherwise."""
        timings = self._group.timings
        deadline = deadline or timings.call + timings.hold
        try:
            async with asyncio.timeout(None) as scope:
                with self._router.while_asked(view, to, scope):
                    return await self._transport.call(to, request, deadline, "train")
        except TransportError:
            self._router.report(to)
            raise

    # -- outages -------------------------------------------------------------------------------

    async def _until_served(
        self,
        what: str,
        attempt: Callable[[View], Awaitable[bool]],
        meanwhile: Callable[[View], Awaitable[bool]] | None = None,
    ) -> None:
        """Repeat `attempt` until it succeeds; while the shard is down, try `meanwhile` instead.

        Raises
        ------
        ShardUnavailable
            The shard stayed down for longer than the group's `unavailable` seconds.
        """
        limit, self._why = self._group.timings.unavailable, ""
        view = await self._router.view(self._shard)
        try:
            async with asyncio.timeout(limit) as scope:
                self._may_go_on()
                while not await self._attempt(view, attempt, meanwhile or _never):
                    if self._waits_for_workers:  # the shard is served, and does not keep it waiting
                        scope.reschedule(asyncio.get_running_loop().time() + limit)
                    view = await self._router.view(self._shard)
                    self._may_go_on()
        except TimeoutError:
            why = f": {self._why}" if self._why else ""
            raise ShardUnavailable(
                f"{what}: shard {self._shard} (epoch {view.epoch}) was not served for {limit:g} s"
                f"{why}"
            ) from None

    async def _attempt(
        self,
        view: View,
        attempt: Callable[[View], Awaitable[bool]],
        meanwhile: Callable[[View], Awaitable[bool]],
    ) -> bool:
        """Try once; return False when it is time to try again with the view that is then known."""
        self._waits_for_workers = False
        try:
            if not view.serving:
                return await meanwhile(view) or await self._until_replaced(view)
            return await attempt(view)
        except TimeoutError:
            return False
        except (TransportError, StaleEpoch, NotServing, MailboxClosed, StoreUnavailable):
            return await self._until_replaced(view, self._group.timings.retry)

    def _must_wait(self, reply: Any) -> bool:
        """Take note of whether, and for what, a shard makes this client wait."""
        if isinstance(reply, Waiting):
            self._why, self._waits_for_workers = reply.reason, reply.for_workers
        return isinstance(reply, Waiting)

    async def _until_replaced(self, view: View, patience: float = math.inf) -> Literal[False]:
        """Wait until the table says something else of the shard, or for `patience` seconds."""
        until = asyncio.get_running_loop().time() + patience
        while (table := await self._router.table()).views[self._shard] == view:
            self._may_go_on()
            try:
                async with asyncio.timeout_at(until):
                    await self._router.newer(table.version)
            except TimeoutError:
                break
        return False

    def _buffering(self, op: Operation) -> Callable[[View], Awaitable[bool]] | None:
        """What to do with a gradient while the shard is down; None: keep trying to push it."""
        outage = self._group.recovery.outage
        if not isinstance(outage, Continue):
            return None

        layout = self._group.layout.shards[self._shard]

        async def check() -> None:
            """No shard sees it now, and a bad one would keep the shard from coming back."""
            if op.kind == "gradient":
                work = partial(_check, layout, op)
                await offload(work, decoded_bytes(layout, op))

        def buffered() -> None:
            if op.kind == "gradient":
                self._on_ack(self._shard, op.id, 0, "buffered")

        async def keep(view: View) -> bool:
            if len(self._held) >= outage.limit:
                return False
            await check()
            copied = await offload(op.copied, op.nbytes)  # the arrays may be the caller's
            self._held.append(copied)
            if self._draining is None or self._draining.done():
                self._draining = self._tasks.start(self._drain_when_served())
            buffered()
            return True

        async def deposit(view: View) -> bool:
            if self._deposited >= outage.limit:
                return False
            await check()
            mailboxes = (await self._router.table()).mailboxes
            if not mailboxes:
                return False
            await self._deposit_in(mailboxes, Deposit(self._shard, view.epoch, op))
            self._deposited += 1
            self._last, self._told_in = op.id, 0
            buffered()
            return True

        return keep if outage.buffer == "worker" else deposit

    async def _deposit_in(self, mailboxes: Sequence[Endpoint], request: Deposit) -> None:
        """Have a gradient kept by each of several mailboxes: only then it is safe.

        The coordinator may make do without one that is out of reach for longer than a lease.
        """
        timings, now = self._group.timings, asyncio.get_running_loop().time
        for mailbox in mailboxes:
            try:
                await self._transport.call(mailbox, request, timings.call, "store")
            except TransportError:
                missed = now() - self._missed.setdefault(mailbox, now())
                link = ReportLink(self._shard, request.epoch, mailbox, missed)
                self._router.report(mailbox, link if missed > timings.lease else None)
                raise
            self._missed.pop(mailbox, None)

    async def _drain_when_served(self) -> None:
        """Others may wait for what is held here, though this worker pushes nothing for long."""
        while self._held:
            view = await self._router.view(self._shard)
            if view.serving:
                async with self._turn:
                    with suppress(Evicted):
                        await self._attempt(view, self._flush_held, _never)
            else:
                await self._until_replaced(view)

    async def _flush_held(self, view: View) -> bool:
        """Have the gradients applied that were held back here; they come before newer ones.

        Those of an earlier incarnation may be refused: that says nothing of the present one.
        """
        if self._held:
            request = ReplayBuffered(self._shard, view.epoch, tuple(self._held))
            try:
                await self._ask(view, view.chain[0], request, self._group.timings.copy)
            except Evicted:
                refused, self._held = self._held, []
                self._drop(refused)
                if self.evicted:
                    raise
                return True
            self._last, self._told_in = self._held[-1].id, 0
            self._held.clear()
            await self._tell(view)
        return True


def _check(layout: ShardLayout, op: Operation) -> None:
    check_gradient(layout, dense(layout, op))


async def _never(view: View) -> bool:
    return False
