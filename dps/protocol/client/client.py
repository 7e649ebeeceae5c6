"""The client: how a worker, an evaluator or a driver pushes to and pulls from the shards.

It has one shard client for each shard (`dps.protocol.client.shard_client`), numbers a worker's
updates, and keeps the worker a member of the group: it renews its lease, and enters again if it was
given up.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from dps.core.blocks import Arrays, Layout
from dps.core.consistency import ASP, Consistency
from dps.core.filters.outbox import Counts
from dps.core.flat import FlatArrays, FlatLayout
from dps.core.functions import CALLS, DRIVER, all_succeeded, known_call, unpack
from dps.core.tables.key_routing import Gradients, as_range, asked
from dps.core.updates import Operation, UpdateId
from dps.errors import (
    DpsError,
    NotServing,
    TrainingStopped,
    TransportError,
    UpdatesLost,
)
from dps.protocol.client.barrier import together
from dps.protocol.client.encoder import Encoder, FilterState, basis
from dps.protocol.client.parts import Parts, prepared
from dps.protocol.client.read_point import ReadPoint
from dps.protocol.client.receipts import Receipts
from dps.protocol.client.routing_table import Router
from dps.protocol.client.shard_client import OnAck, Outcome, ShardClient
from dps.protocol.durability import WorkerContext, WorkerPart
from dps.protocol.group import Group
from dps.protocol.lease import repeat_forever
from dps.protocol.messages import (
    STOPPED,
    Entered,
    EnterWorker,
    ExitWorker,
    Loss,
    PullRange,
    PullRows,
    RenewWorker,
    Returned,
    RowsAsked,
    RowsRead,
    Statement,
    Table,
    donor_name,
)
from dps.protocol.tasks import Tasks, internal_error
from dps.protocol.transport import Transport, Watched

T = TypeVar("T")

# What makes the operation for each shard that an update touches; it may be sent more than once.
Made = Mapping[int, Callable[[], Operation]]


class Client:
    """Pushes to and pulls from all shards. Used from one event loop.

    Parameters
    ----------
    worker
        The name under which updates are pushed; "" for a client that pushes none.
    incarnation
        That of a client which is no worker, and calls functions.
    on_loss
        Called with each loss of updates of this client, and again if it turns out to be larger.
    stops
        How often the training had been stopped when this worker was started.
    is_cancelled
        Tells whether whoever started this worker does not want it any more.
    watched
        Returns by which monitor this process is watched; None: by none.

    Attributes
    ----------
    leaving
        Whether the worker has been asked to leave.
    """

    def __init__(
        self,
        group: Group,
        transport: Transport,
        worker: str = "",
        on_ack: OnAck | None = None,
        incarnation: int = 0,
        *,
        on_loss: Callable[[Loss], None] | None = None,
        stops: int = 0,
        is_cancelled: Callable[[], bool] | None = None,
        watched: Callable[[], Watched | None] = lambda: None,
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self._incarnations: tuple[int, ...] = (incarnation,)
        self._stops = stops
        self._is_cancelled = is_cancelled or _never
        self._watched = watched
        self._on_loss = on_loss or _ignore_loss
        self._known = -1
        self._ended: DpsError | None = None
        self._ending: asyncio.Task[None] | None = None
        self._tasks = Tasks(self._fail)
        self._failure: Exception | None = None
        self._receipts = Receipts(group.restores_together, self._lost)
        self.router = Router(group, transport)
        self._group = group
        self._transport = transport
        self._part: WorkerPart | None = None
        self._seq = 0
        self._calls = 0
        self._home = ("", "")
        self._task = ""
        # Held while a request is prepared, and while the worker enters. Whoever lets go of it sends
        # at once what it has prepared, so requests reach each shard in the order they were made in.
        self._turn = asyncio.Lock()
        self._given_up = False
        self.leaving = False
        self._renewing: asyncio.Task[None] | None = None
        self._dropped: set[tuple[int, UpdateId]] = set()
        self._rows_read_as: set[int] = set()  # incarnations, since the last push
        self._on_ack = on_ack or _ignore
        self._shard_clients = [
            ShardClient(
                *(shard, group, transport, self.router, self._acked, self._receipts),
                *(self.may_go_on, self._tasks),
            )
            for shard in range(len(group.layout.shards))
        ]
        self._encoder = Encoder(group)
        self.router.listen(self._heard)

    async def enter(self, address: str, node: str, task: str = "") -> Returned | None:
        """Take part in the training under this client's name, as a Dask task.

        If its training function has returned before, return what is known of that instead.
        """
        await self.router.table()
        self.may_go_on()
        self._home, self._task = (address, node), task
        async with self._turn:
            return await self._enter()

    async def _enter(self) -> Returned | None:
        """Begin a new incarnation of the worker, in turn: others wait until all shards know it."""
        self.may_go_on()  # else others would wait for one that pushes no more
        token, watched = uuid.uuid4().hex, self._watched()
        request = EnterWorker(self.worker, *self._home, token, self._stops, self._task, watched)
        reply: Entered = await self.router.ask(request)
        if reply.returned is not None:
            return reply.returned
        self.incarnation, self._given_up = reply.incarnation, False
        self._incarnations = (*self._incarnations, self.incarnation)
        await self._take_part()
        if self._renewing is None:
            every = self._group.timings.renewal
            renewing = repeat_forever(every, self._renew, self._tasks)
            self._renewing = self._tasks.start(renewing)
        join = Operation("join", UpdateId(self.worker, self.incarnation, 0))
        for shard_client in self._shard_clients:
            shard_client.incarnation = self.incarnation
        await self._to_all(
            {s: partial(shard_client.push, join, False) for s, shard_client in self._numbered}
        )
        self._seq = max(shard_client.clock for shard_client in self._shard_clients)
        await self._catch_up()
        return None

    async def _catch_up(self) -> None:
        """Begin with the same clock on all shards: some may be a round behind the others."""
        tick = Operation("tick", UpdateId(self.worker, self.incarnation, self._seq))
        jobs = {s: partial(client.push, tick, False) for s, client in self._numbered}
        behind = [s for s, client in self._numbered if self._ticks and client.clock < self._seq]
        await self._to_all(jobs, behind)

    async def _enter_if_given_up(self) -> None:
        """Enter again, in turn, if the worker was given up meanwhile."""
        if self._given_up or self._evicted:
            await self._enter()

    @property
    def _evicted(self) -> bool:
        return any(shard_client.evicted for shard_client in self._shard_clients)

    async def _renew(self) -> None:
        if self.router.closed:
            return
        statement = self._statement
        request = RenewWorker(self.worker, self.incarnation, statement, self._watched())
        incarnation, deadline = self.incarnation, self._group.timings.lease
        try:
            reply = await self.router.ask_once(request, deadline)
        except (TransportError, NotServing):
            return  # the next one is on its way
        self._receipts.sent(statement.accounts)
        self.leaving = reply.leaving or self.leaving
        if self.worker and not reply.granted and incarnation == self.incarnation:
            self._given_up = True

    @property
    def layout(self) -> Layout:
        """The group's parameters, and where they are."""
        return self._group.layout

    @property
    def consistency(self) -> Consistency:
        """The group's consistency model."""
        return self._group.consistency

    async def leave(self, reason: str, returned: Returned | None = None) -> None:
        """Take part no longer; what is still buffered or withheld here is applied first.

        `returned` is recorded by the coordinator, so that the same Dask task trains only once.
        """
        try:
            if reason == "finished" and self._ended is None:
                await self._push_withheld()
                await self._drain()
        except BaseException:
            returned = None  # the task fails, and may be started again
            raise
        finally:
            try:
                if self._ending is not None:
                    reason = self._end_reason
                    await self._ending
            finally:
                await self._exit(reason, returned)

    async def _exit(self, reason: str, returned: Returned | None = None) -> None:
        """Have nobody wait for this worker any more."""
        if self.router.closed and self._is_cancelled():
            return  # the group has been closed, so no coordinator needs the report
        called, statement = self._calls > 0, self._statement
        request = ExitWorker(self.worker, self.incarnation, reason, called, statement, returned)
        await self.router.ask(request)

    async def close(self) -> None:
        """End the client's tasks; it is of no use afterwards."""
        self.router.unlisten(self._heard)
        await self._tasks.close()
        await self._leave_part()
        await self._all_shard_clients(lambda shard_client: shard_client.close())
        await self.router.close()

    async def push(
        self,
        gradients: Arrays,
        pull: bool = False,
        rows: Gradients = MappingProxyType({}),
        computed_on: ReadPoint | None = None,
    ) -> int:
        """Push gradients of some or all arrays, and of rows of sparse tables, as one update.

        See `parts` and `push_parts`.
        """
        self.may_go_on()
        return await self.push_parts(self.parts(gradients, rows), pull, computed_on)

    def parts(self, gradients: Arrays, rows: Gradients = MappingProxyType({})) -> Parts:
        """Check an update and take it apart, which takes a while if it is large. Thread-safe.

        `rows` has, for each table, keys and as many rows of a gradient; those of a key that is
        repeated are summed. What the update rule does not train is left out, and the rest clipped
        if the rule says so.

        Raises
        ------
        ShapeMismatch, NonFiniteGradient
            The gradients do not fit, or hold NaN or infinity.
        """
        layout = self._group.layout
        # What one shard refuses must not be applied by another; a single one checks for itself.
        looked_at = len(layout.shards) > 1 or self._encoder.filters
        rule, empty = self._group.rule, self._transport.empty
        return prepared(layout, rule, gradients, rows, empty, looked_at)

    async def push_parts(
        self, parts: Parts, pull: bool = False, computed_on: ReadPoint | None = None
    ) -> int:
        """Push an update that was taken apart by `parts`; return its number.

        The gradients were computed from what had been read by `computed_on`, or by now. With
        `pull`, the weights are read in the same round trip and then found by `weights`. A worker
        that was not heard of for a lease or more may find its gradients refused as too stale; they
        are dropped and counted, and it takes part again. So are those that it computed from what it
        read before it entered again.

        Raises
        ------
        NonFiniteGradient
            The gradients are too large, or hold NaN or infinity. No shard has applied anything.
        ShardUnavailable
            A shard stayed down for too long.
        TrainingStopped, UpdatesLost
            The training has ended; what was sent may have been applied.
        """
        self.may_go_on()
        point = computed_on or self.read_point()
        read_as = point.incarnations | self._rows_read_as
        self._rows_read_as = set()
        async with self._turn:
            operation = Operation("gradient", self._reader._replace(seq=self.next_seq))
            if self._is_gated and read_as - {self.incarnation}:
                made = self._nothing_of(operation.id, parts)
            else:
                made = await self._operations(operation, parts, point)
            self._seq += 1
        await self._send(operation, made, pull)
        self.may_go_on()
        if self._evicted:
            async with self._turn:
                await self._enter_if_given_up()
            if pull:
                await self.pull()
        return operation.id.seq

    async def _operations(self, operation: Operation, parts: Parts, point: ReadPoint) -> Made:
        """Filter an update, in turn; return what makes its operation for each shard it touches."""
        dense = await self._encoder.operations(operation, parts.dense, point)

        def made(shard: int) -> Operation:
            op = dense(shard) if shard in parts.dense else operation
            op = basis(self._group, point.shards[shard], shard)(op)
            return replace(op, rows=parts.rows[shard]) if shard in parts.rows else op

        return {shard: partial(made, shard) for shard in parts.touched}

    def _nothing_of(self, update: UpdateId, parts: Parts) -> Made:
        """Drop an update that was computed from what another incarnation read, which was evicted.

        Others may be any number of updates further by now. The round goes on without its gradients.
        """
        for shard in parts.touched:
            self._acked(shard, update, 0, "dropped")
        return {}

    async def _send(
        self,
        operation: Operation,
        made: Made,
        pull: bool,
    ) -> None:
        """Send an update to the shards that it touches, and to the others what goes with it."""

        async def send(shard: int) -> None:
            await self._shard_clients[shard].push(made[shard](), pull)

        jobs: dict[int, Callable[[], Awaitable[None]]] = {}
        for shard, shard_client in self._numbered:
            if shard in made:
                jobs[shard] = partial(send, shard)
            elif self._ticks:
                jobs[shard] = partial(shard_client.push, replace(operation, kind="tick"), pull)
            elif pull:
                jobs[shard] = partial(shard_client.pull, self._reader)
        await self._to_all(jobs)

    async def _push_withheld(self) -> None:
        """Send all that filters have withheld as one last update, again where it is refused."""
        async with self._turn:  # after what is still being filtered
            left = await self._encoder.remainders(Operation("gradient", self._reader))
        point = self.read_point()
        left = {s: basis(self._group, point.shards[s], s)(op) for s, op in left.items()}
        while left:
            async with self._turn:
                await self._enter_if_given_up()
                self._seq += 1
                last = self._reader._replace(seq=self._seq)
            left = {shard: replace(op, id=last) for shard, op in left.items()}
            made = {shard: partial(replace, op) for shard, op in left.items()}
            await self._send(Operation("gradient", last), made, False)
            await self._drain()  # what is buffered here may be refused yet
            left = {shard: op for shard, op in left.items() if (shard, last) in self._dropped}

    async def _drain(self) -> None:
        await self._all_shard_clients(lambda shard_client: shard_client.drain())

    @property
    def filtered(self) -> FilterState:
        """What the filters have done to this client's gradients so far."""
        state, saved = (
            self._encoder.state,
            sum(shard_client.keys.saved_bytes for shard_client in self._shard_clients),
        )
        return replace(state, counts=state.counts + Counts(sent_bytes=-saved))

    def withheld(self, shard: int) -> dict[str, np.ndarray]:
        """What the filters withhold from a shard now, by array; for reading only."""
        return self._encoder.withheld(shard)

    @property
    def losses(self) -> tuple[Loss, ...]:
        """What was lost of this client's acknowledged updates."""
        return self._receipts.losses

    @property
    def dropped(self) -> int:
        """How many of this client's updates were refused as too stale, on one shard or more."""
        return len({update for _, update in self._dropped})

    @property
    def next_seq(self) -> int:
        """The number that the next update will have, if the worker need not enter again."""
        return self._seq + 1

    async def pull(self) -> None:
        """Read all weights; they are then found by `weights`. Errors are those of `push`."""
        read = False
        while not read:
            async with self._turn:
                await self._enter_if_given_up()
                reader = self._reader
            await self._all_shard_clients(partial(ShardClient.pull, reader=reader))
            self.may_go_on()
            read = reader == self._reader and not (self._given_up or self._evicted)

    async def pull_rows(self, table: str, keys: object) -> np.ndarray:
        """Read the rows of these keys, in the order in which they are given.

        Each shard's are those of one version, not older than what this client has seen of it.

        Raises
        ------
        ShapeMismatch
            An unknown table, or keys that are no whole numbers from 0 to 2⁶³ - 1.
        ShardUnavailable
            A shard stayed down for too long.
        """
        question = asked(self._group.layout, table, keys)

        def of(shard: int) -> PullRows:
            reader = (self.worker, self.incarnation)
            return PullRows(shard, 0, *reader, 0, 0.0, table, question.keys[shard])

        read = await self._rows(list(question.keys), of)
        return question.answer({shard: rows.values for shard, rows in read.items()})

    async def pull_range(self, table: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Read the rows that exist with keys from `start` to below `stop`; errors as `pull_rows`.

        Returns
        -------
        keys
            int64, sorted.
        rows
            One for each key.
        """
        layout = self._group.layout
        layout.shards[0].table(table)
        start, stop = as_range(start, stop)

        def of(shard: int) -> PullRange:
            reader = (self.worker, self.incarnation)
            return PullRange(shard, 0, *reader, 0, 0.0, table, start, stop)

        read = (await self._rows(range(len(layout.shards)), of)).values()
        keys = np.concatenate([rows.keys for rows in read if rows.keys is not None])
        order = keys.argsort()
        return keys[order], np.concatenate([rows.values for rows in read])[order]

    async def _rows(
        self, shards: Sequence[int], of: Callable[[int], RowsAsked]
    ) -> dict[int, RowsRead]:
        """Ask shards for rows, again as another incarnation if this one was evicted."""
        while True:
            async with self._turn:
                await self._enter_if_given_up()
                incarnation = self.incarnation
            read = await self._at_once([self._shard_clients[s].pull_rows(of(s)) for s in shards])
            whole = {s: rows for s, rows in zip(shards, read, strict=True) if rows is not None}
            self.may_go_on()
            if len(whole) == len(shards):
                self._rows_read_as.add(incarnation)
                return whole

    async def apply(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        """Have a function run on every shard, once on each; return the results, shard by shard.

        Raises
        ------
        ConfigurationError
            There is no such function, or an argument cannot be sent. No shard has been asked.
        FunctionFailed
            It failed on some shards, which it left as they were.
        Evicted
            A later incarnation of this worker has called functions.
        ShardUnavailable
            A shard stayed down for too long.
        """
        call = known_call(self._group.functions, function, arguments)
        async with self._turn:
            self._calls += 1
            # Calls have numbers of their own: under BSP they are part of no round.
            number = UpdateId(f"{self.worker or DRIVER}{CALLS}", self.incarnation, self._calls)
        op = Operation("apply", number, call=call)
        came = await self._at_once([_outcome(shard.call(op)) for shard in self._shard_clients])
        self.may_go_on()
        return [unpack(result) for result in all_succeeded(came)]

    def read_point(self) -> ReadPoint:
        """What was read by now. Thread-safe."""
        return ReadPoint(tuple(shard_client.read for shard_client in self._shard_clients))

    def weights(self, point: ReadPoint | None = None) -> dict[str, np.ndarray]:
        """The weights that were read last by `point`, or by now, as read-only arrays.

        Thread-safe.
        """
        reads = (point or self.read_point()).shards
        return self._group.layout.scatter(
            {s: read.weights.values for s, read in enumerate(reads) if read.weights is not None}
        )

    def own_weights(
        self, point: ReadPoint, private: Callable[[np.ndarray], np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The weights that were read last by `point`, as arrays of the caller's own. Thread-safe.

        `private` makes memory that only the caller sees of a shard's buffer, or a read-only view.
        """
        reads = enumerate(point.shards)
        buffers = {s: private(r.weights.values) for s, r in reads if r.weights is not None}
        arrays = self._group.layout.scatter(buffers, frozen=False)
        return {n: each if each.flags.writeable else each.copy() for n, each in arrays.items()}

    def write_weights(self, out: FlatArrays, point: ReadPoint) -> None:
        """Write the weights that were read last by `point` into flat arrays. Thread-safe."""
        buffers = {s: r.weights.values for s, r in enumerate(point.shards) if r.weights is not None}
        self._group.layout.scatter_into(buffers, out)

    def empty(self, flat: FlatLayout) -> FlatArrays:
        """Return flat arrays to compute gradients into, not filled. Thread-safe."""
        return flat.over(self._transport.empty((flat.nbytes,), "uint8"))

    def versions(self) -> tuple[int, ...]:
        """The version of each shard's weights that were read last; -1 where none were."""
        return tuple(
            shard_client.base.version if shard_client.base else -1
            for shard_client in self._shard_clients
        )

    async def _take_part(self) -> None:
        """Do what the durability has workers do."""
        await self._leave_part()
        name, shard_clients = donor_name(self.worker, self.incarnation), self._shard_clients
        self._part = self._group.recovery.durability.worker_part(
            WorkerContext(
                name,
                self._group.rule,
                self._group.timings,
                self._transport,
                self.router,
                self._tasks,
                lambda shard: shard_clients[shard].base,
            )
        )

    async def _leave_part(self) -> None:
        part, self._part = self._part, None  # once, also if this is cancelled half-way
        if part is not None:
            await part.close()

    @property
    def _reader(self) -> UpdateId:
        return UpdateId(self.worker, self.incarnation, 0)

    @property
    def _is_gated(self) -> bool:
        return not isinstance(self._group.consistency, ASP)

    @property
    def _ticks(self) -> bool:
        """Whether a worker's clock must be the same on all shards, whatever its updates touch."""
        return self._is_gated or self._group.restores_together

    @property
    def _numbered(self) -> Iterable[tuple[int, ShardClient]]:
        return enumerate(self._shard_clients)

    async def _to_all(
        self,
        jobs: Mapping[int, Callable[[], Awaitable[None]]],
        lacking: Collection[int] | None = None,
    ) -> None:
        """Send something to those shards that lack it (None: all), and wait until all have it."""
        lacking = jobs if lacking is None else lacking
        if self._group.restores_together:
            await together(
                jobs,
                lacking,
                self.router,
                acked_in=lambda shard: self._shard_clients[shard].acked_in,
                refused=lambda: self._evicted,
                complete=self._receipts.all_acked,
            )
        else:
            await self._at_once([jobs[shard]() for shard in lacking])

    def _acked(self, shard: int, update: UpdateId, version: int, outcome: Outcome) -> None:
        if outcome == "dropped":
            self._dropped.add((shard, update))
        self._on_ack(shard, update, version, outcome)

    # -- the end of a training -------------------------------------------------------------------

    def _heard(self, table: Table) -> None:
        """Take note of what the table says of losses, and of the end."""
        self._known = table.version
        entered = self.worker and self.incarnation
        if self._receipts.heard(table.restorations) and (entered or self._receipts.accounts):
            self._tasks.start(self._renew())  # the coordinator waits for what this client was told
        if table.stops > self._stops:
            self._end(TrainingStopped(STOPPED))
        elif table.losses:
            self._end_if_wanted("a shard has lost acknowledged updates")

    def _lost(self, loss: Loss) -> None:
        self._on_loss(loss)
        self._end_if_wanted(f"of the updates of {self.worker}, {loss}")

    def _end_if_wanted(self, why: str) -> None:
        if self._group.on_loss == "raise":
            self._end(UpdatesLost(f"{why}. The training ends, as on_loss='raise' says"))

    def _end(self, error: DpsError) -> None:
        """Push and pull no more; have nobody wait for this worker as soon as that is certain.

        A client that is no worker goes on.
        """
        if self.worker and self._ended is None:
            self._ended = error
            self._ending = self._tasks.start(self._end_in_order())

    async def _end_in_order(self) -> None:
        await self._all_shard_clients(lambda shard_client: shard_client.at_rest())
        if self.incarnation:
            await self._exit(self._end_reason)

    @property
    def _end_reason(self) -> str:
        return "stopped" if isinstance(self._ended, TrainingStopped) else "failed"

    def may_go_on(self) -> None:
        """Raise an error if this worker is to push and pull no more.

        Raises
        ------
        TrainingStopped, UpdatesLost
            The training has ended.
        InternalError
            A background task of this client has failed.
        """
        if self._is_cancelled():
            self._end(TrainingStopped(f"the future of {self.worker} was cancelled"))
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))
        if self._failure is not None:
            raise internal_error(self._failure)

    def _fail(self, error: Exception) -> None:
        """Have a failure of a background task raised by the next request, and end the worker."""
        self._failure = error
        self._end(internal_error(error))

    @property
    def _statement(self) -> Statement:
        known = 0 if self._receipts.undecided else self._known
        return Statement(known, self._incarnations, self._receipts.accounts)

    async def _all_shard_clients(self, request: Callable[[ShardClient], Awaitable[None]]) -> None:
        await self._at_once([request(shard_client) for shard_client in self._shard_clients])

    async def _at_once(self, requests: Sequence[Awaitable[T]]) -> list[T]:
        """Wait for requests to shards.

        Where there is one shard, as most have, a task would take longer than the rest. Else each
        has one, also if it is alone: it would overtake others whose tasks are still to begin.
        """
        if len(self._shard_clients) == 1 and not self._group.restores_together:
            return [await request for request in requests]
        return list(await asyncio.gather(*requests))


async def _outcome(request: Awaitable[T]) -> T | Exception:
    """What comes of a request, be it an error."""
    try:
        return await request
    except Exception as error:  # noqa: BLE001 - raised when all have come
        return error


def _never() -> bool:
    return False


def _ignore_loss(loss: Loss) -> None:
    pass


def _ignore(shard: int, update: UpdateId, version: int, outcome: Outcome) -> None:
    pass
