"""The client: how a worker, an evaluator or a driver pushes to and pulls from the shards.

It has a shard client for each shard (`dps.protocol.client.shard_client`), numbers a worker's
updates, and keeps the worker a member of the group: it renews the worker's lease, and enters again
after an eviction.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dps.core.blocks import Arrays
from dps.core.consistency import ASP
from dps.core.functions import CALLS, DRIVER, all_succeeded, known_call, unpack
from dps.core.leases import Division
from dps.core.tables.key_routing import Gradients, as_range, asked
from dps.core.updates import Batch, Operation, UpdateId
from dps.errors import (
    DpsError,
    InternalError,
    NotServing,
    TrainingStopped,
    TransportError,
    UpdatesLost,
)
from dps.protocol import messages as msg
from dps.protocol.client.encoder import NO_ROWS, Encoder, MakeOutbox, Parts
from dps.protocol.client.read_point import ReadPoint
from dps.protocol.client.receipts import Receipts
from dps.protocol.client.routing_table import Router
from dps.protocol.client.shard_client import OnAck, Outcome, ShardClient, taken
from dps.protocol.group import Group
from dps.protocol.tasks import Tasks, internal_error
from dps.protocol.transport import Done, Transport, Watched
from dps.recovery.durability import WorkerContext

T = TypeVar("T")
SMALL = 1 << 14  # bytes of an update that may be pushed without a task
Pushed = Future[int] | asyncio.Future[int]  # gets the number of an update once it is acknowledged


@dataclass(frozen=True, slots=True)
class Caller:
    """The process that a client belongs to, and how the client asks and notifies it."""

    worker: str = ""  # a client without a name pushes no updates
    incarnation: int = 0  # of a caller of functions that is no worker
    stops: int = 0  # how often the training had been stopped when this worker was started
    on_ack: OnAck = lambda *outcome: None
    on_loss: Callable[[msg.Loss], None] = lambda loss: None  # again if it turns out to be larger
    is_cancelled: Callable[[], bool] = lambda: False
    watched: Callable[[], Watched | None] = lambda: None  # the monitor of this process, if any


class Client:
    """Pushes to and pulls from all shards. Used from one event loop."""

    def __init__(self, group: Group, transport: Transport, caller: Caller = Caller()) -> None:
        self.group = group
        self.worker = caller.worker
        self.incarnation = caller.incarnation
        self.leaving = False  # whether the worker was asked to leave
        self.router = Router(group, transport)
        self.encoder = Encoder(group, transport.empty)
        self.receipts = Receipts(group.restores_together, self._lost)
        self.tasks = Tasks(self._fail)
        self._caller = caller
        self._is_gated = not isinstance(group.consistency, ASP)
        # Whether shards that an update does not change must get the worker's clock too.
        self._ticks = self._is_gated or group.restores_together
        self._incarnations: tuple[int, ...] = (self.incarnation,)
        self._known = -1  # the version of the table that losses are known from
        self._ended: DpsError | None = None
        self._ending: asyncio.Task[None] | None = None
        self._part: tuple[Callable[[msg.Table], None], Tasks] | None = None  # of the durability
        self._seq = 0
        self._calls = 0
        self._place = ("", "", "")  # address, node and Dask task
        # Held while a request is prepared, and while the worker enters. The task that releases it
        # sends its request at once, so requests reach each shard in the order of their creation.
        self._turn = asyncio.Lock()
        self._under_way = 0  # requests to shards, whose tasks may not have begun
        self._is_closed = False
        self._given_up = False
        self._dropped: set[tuple[int, UpdateId]] = set()
        self._rows_read_as: set[int] = set()  # incarnations, since the last push
        self._shards = range(len(group.layout.shards))
        self._shard_clients = [ShardClient(shard, self) for shard in self._shards]
        self.router.listen(self._heard)

    # -- membership -------------------------------------------------------------------------------

    async def enter(self, address: str, node: str, task: str = "") -> msg.Returned | None:
        """Join the training under this client's name, as a Dask task.

        If the task's training function has returned before, return what is known of its result.
        """
        await self.router.table()
        self.may_go_on()
        self._place = address, node, task
        async with self._turn:
            return await self._enter()

    async def _enter(self) -> msg.Returned | None:
        """Begin a new incarnation of the worker, in turn: others wait until all shards know it."""
        self.may_go_on()  # otherwise others would wait for a worker that pushes no more
        token, caller = uuid.uuid4().hex, self._caller
        place = self._place
        request = msg.EnterWorker(self.worker, *place, token, caller.stops, caller.watched())
        reply: msg.Entered = await self.router.ask(request)
        if reply.returned is not None:
            return reply.returned
        await self._close_part()
        if not self.incarnation:
            self.tasks.repeat(self._renew, self.group.timings.renewal)
        self.incarnation, self._given_up = reply.incarnation, False
        self._incarnations = (*self._incarnations, self.incarnation)
        self._start_part()
        await self._push_to(self._shards, Operation("join", self._reader))
        # All shards begin with the same clock: some may be a round behind the others.
        clocks = [shard_client.clock for shard_client in self._shard_clients]
        self._seq = max(clocks)
        behind = [shard for shard in self._shards if self._ticks and clocks[shard] < self._seq]
        await self._push_to(behind, Operation("tick", self._reader._replace(seq=self._seq)))
        return None

    async def _push_to(self, shards: Sequence[int], op: Operation) -> None:
        await self._to_all(shards, lambda shard: self._shard_clients[shard].push(op, False))

    async def _present(self) -> UpdateId:
        """Enter again if the worker has been evicted; return its present name."""
        if self._given_up or self._evicted:
            await self._enter()
        return self._reader

    @property
    def _evicted(self) -> bool:
        return any(shard_client.evicted for shard_client in self._shard_clients)

    @property
    def _reader(self) -> UpdateId:
        return UpdateId(self.worker, self.incarnation, 0)

    async def _renew(self) -> None:
        if self.router.closed:
            return
        incarnation, statement = self.incarnation, self._statement
        request = msg.RenewWorker(self.worker, incarnation, statement, self._caller.watched())
        try:
            reply = await self.router.ask_once(request, self.group.timings.lease)
        except (TransportError, NotServing):
            return  # the next one is on its way
        self.receipts.sent(statement.accounts)
        self.leaving = reply.leaving or self.leaving
        if self.worker and not reply.granted and incarnation == self.incarnation:
            self._given_up = True

    async def leave(self, reason: str, returned: msg.Returned | None = None) -> None:
        """Leave the training, once the gradients that are buffered or withheld here are applied."""
        # The coordinator records `returned`, so that the same Dask task trains only once.
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
                    await asyncio.wait([self._ending])  # it may fail; `_ended` is the reason
                else:  # a pending request may yet be acked, and the statement must have that ack
                    self._ended = DpsError(f"{self.worker} has left the training")
                    await self._at_rest()
            finally:
                await self._exit(reason, returned)

    async def _exit(self, reason: str, returned: msg.Returned | None = None) -> None:
        if self.router.closed and self._caller.is_cancelled():
            return  # the group has been closed, so no coordinator needs the report
        name, called, statement = self.worker, self._calls > 0, self._statement
        request = msg.ExitWorker(name, self.incarnation, reason, called, statement, returned)
        await self.router.ask(request)

    async def close(self) -> None:
        """End the client's tasks; it cannot be used afterwards."""
        self._is_closed = True
        self.router.unlisten(self._heard)
        await self.tasks.close()
        await self._close_part()
        await self._at_once([shard_client.close() for shard_client in self._shard_clients])
        await self.router.close()

    def _start_part(self) -> None:
        tasks = Tasks(self._fail)
        context = WorkerContext(
            name=msg.donor_name(self.worker, self.incarnation),
            rule=self.group.rule,
            timings=self.group.timings,
            transport=self.router.transport,
            ask=self.router.ask,
            tasks=tasks,
            held=lambda shard: self._shard_clients[shard].read.weights,
        )
        on_table = self.group.recovery.durability.worker_part(context)
        if on_table is not None:
            self._part = on_table, tasks
            self.router.listen(on_table)

    async def _close_part(self) -> None:
        part, self._part = self._part, None  # once, also if this is cancelled half-way
        if part is not None:
            on_table, tasks = part
            self.router.unlisten(on_table)
            await tasks.close()

    # -- pushing ----------------------------------------------------------------------------------

    async def push(
        self,
        gradients: Arrays,
        pull: bool = False,
        rows: Gradients = NO_ROWS,
        computed_on: ReadPoint | None = None,
        batch: Batch | None = None,
    ) -> int:
        """Push gradients as one update: `Encoder.split`, then `begin_push` or `push_parts`."""
        self.may_go_on()
        parts = self.encoder.split(gradients, rows)
        pushed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self.begin_push(parts, pull, computed_on, batch, pushed):
            return await pushed
        return await self.push_parts(parts, pull, computed_on, batch)

    async def push_parts(
        self,
        parts: Parts,
        pull: bool = False,
        computed_on: ReadPoint | None = None,
        batch: Batch | None = None,
    ) -> int:
        """Push an update that was cut by `Encoder.split`; return its number.

        The gradients were computed from `computed_on` (None: from the last read), on a `batch` of
        leased data, if any: shards that have applied that batch apply nothing. With `pull`, the
        weights are read in the same round trip, and returned by `weights`. If the worker is evicted
        before the push, or has read the weights before it entered again, the gradients may be
        dropped as too stale, and counted.

        Raises `NonFiniteGradient`, and no shard has applied anything; `ShardUnavailable` if a shard
        stays down for too long; or what `may_go_on` raises, and it may have been applied.
        """
        self.may_go_on()
        point = computed_on or self.read_point()
        read_as = self._rows_read_as | {read.incarnation for read in point.shards}
        self._rows_read_as = set()
        async with self._turn:
            update = self._reader._replace(seq=self._seq + 1)
            operations: dict[int, Operation] = {}
            if self._is_gated and read_as - {self.incarnation, None}:
                # Others may be any number of updates ahead of what was computed from an earlier
                # incarnation's read. The round continues without it.
                for shard in {*parts.dense, *parts.rows}:
                    self.note_outcome(shard, update, 0, "dropped")
                batch = None
            else:
                operation = Operation("gradient", update, batch=batch)
                operations = await self.encoder.operations(operation, parts, point)
            self._seq += 1
        await self._send(Operation("tick", update, batch=batch), operations, pull)
        return await self._returned(update, pull)

    async def _returned(self, update: UpdateId, pull: bool) -> int:
        """Return the number of an update that was sent; enter again first if need be."""
        self.may_go_on()
        # A worker enters when all shards are served: joins are not buffered in an outage.
        enters = self._given_up and all(view.serving for view in (await self.router.table()).views)
        if enters or self._evicted:
            async with self._turn:
                await self._present()
            if pull:
                await self.pull()
        return update.seq

    def begin_push(
        self,
        parts: Parts,
        pull: bool,
        computed_on: ReadPoint | None,
        batch: Batch | None,
        pushed: Pushed,
    ) -> bool:
        """Push as `push_parts` does, without a task, if nothing is under way, and nothing unusual.

        Returns whether it has begun; then `pushed` gets what `push_parts` returns or raises.
        """
        self.may_go_on()
        touched = sorted({*parts.dense, *parts.rows})
        is_small = parts.nbytes <= SMALL and len(touched) == len(self._shards)
        is_plain = not (self._ticks or self.encoder.filters or (pull and self.group.pull_filters))
        is_well = not (self._under_way or self._given_up or self._evicted)
        if not (is_small and is_plain and is_well) or self.group.transport == "dask":
            return False
        if not taken(self._turn):
            return False
        self._turn.release()  # nothing is awaited below
        update = self._reader._replace(seq=self._seq + 1)
        point = computed_on or self.read_point()
        operation = Operation("gradient", update, batch=batch)
        operations = self.encoder.plain_operations(operation, parts, point)
        waiting, errors = {*touched}, []

        def ended(shard: int, outcome: Any) -> None:
            waiting.discard(shard)
            if outcome is not None:
                errors.append(outcome)
            if not waiting:
                self._end_push(update, pull, errors, pushed)

        for shard in touched:
            done, client = partial(ended, shard), self._shard_clients[shard]
            if not client.begin_push(operations[shard], pull, done):
                if shard == touched[0]:
                    return False
                self.run(client.push(operations[shard], pull), done)
            elif shard == touched[0]:
                self._under_way += 1
                self._seq += 1
                self._rows_read_as = set()
        return True

    def _end_push(
        self, update: UpdateId, pull: bool, errors: Sequence[Exception], pushed: Pushed
    ) -> None:
        self._under_way -= 1
        end = partial(_settle, pushed)
        if errors:
            end(errors[0])
        elif self._ended or self._given_up or self._evicted or self._caller.is_cancelled():
            self.run(self._returned(update, pull), end)
        else:
            end(update.seq)

    def run(self, work: Coroutine[Any, Any, Any], done: Done) -> None:
        """Run a coroutine as a task; call `done` with its result, or with an exception."""
        outcome: Any = DpsError("the client was closed before the call ended")

        async def run() -> None:
            nonlocal outcome
            try:
                outcome = await work
            except DpsError as error:
                outcome = error
            except Exception as error:  # noqa: BLE001 - raised by the caller
                self._fail(error)
                outcome = internal_error(error)

        def ended(task: object) -> None:
            work.close()  # if it was cancelled before it began
            done(outcome)

        if self._is_closed:
            ended(None)
        else:
            self.tasks.start(run()).add_done_callback(ended)

    async def _send(self, tick: Operation, operations: Mapping[int, Operation], pull: bool) -> None:
        """Send an update to the shards that it changes; to the others a tick, or a pull."""
        reader, ticks = tick.id._replace(seq=0), self._ticks or tick.batch is not None

        async def send(shard: int) -> None:
            shard_client = self._shard_clients[shard]
            if shard in operations:
                await shard_client.push(operations[shard], pull)
            elif ticks:
                await shard_client.push(tick, pull)
            else:
                await shard_client.pull(reader)

        await self._to_all(self._shards if ticks or pull else sorted(operations), send)

    async def _to_all(
        self, lacking: Sequence[int], send: Callable[[int], Coroutine[Any, Any, None]]
    ) -> None:
        """Send something to the shards that lack it, and wait until every shard has it."""
        # Where shards go back together, a shard that goes back before all of them have it is sent
        # it again. Otherwise it would miss what the others get afterwards, and no cut could be
        # taken. A shard that has it refuses it as a duplicate. Nothing is sent again once a shard
        # has refused it because the worker was evicted, or once it could not be sent to a shard.
        if not self.group.restores_together:
            await self._at_once([send(shard) for shard in lacking])
            return
        missing, all_have_it = set(lacking), asyncio.Event()

        async def deliver(shard: int) -> None:
            while not all_have_it.is_set():
                if shard not in missing:
                    table = await self.router.table()
                    if table.views[shard].epoch <= self._shard_clients[shard].acked_in:
                        await _either(all_have_it.wait(), self.router.newer(table.version))
                        continue
                    missing.add(shard)  # it went back
                try:
                    await send(shard)
                except BaseException:
                    missing.clear()
                    all_have_it.set()  # not all will have it: the others must not wait for that
                    raise
                missing.discard(shard)
                if self._evicted:
                    missing.clear()
                if not missing:  # nothing is sent again, so this ack counts, also after a refusal
                    all_have_it.set()
                    self.receipts.all_acked()

        if missing:
            await asyncio.gather(*map(deliver, self._shards))

    async def _push_withheld(self) -> None:
        """Send all that filters withhold as one last update, again where it is refused."""
        async with self._turn:  # after what is still being filtered
            operation = Operation("gradient", self._reader)
            left = await self.encoder.remainders(operation, self.read_point())
        while left:
            async with self._turn:
                reader = await self._present()  # which sets the number that it continues from
                self._seq += 1
                last = reader._replace(seq=self._seq)
            left = {shard: op._replace(id=last) for shard, op in left.items()}
            await self._send(Operation("tick", last), left, False)
            await self._drain()  # what is buffered here may be refused yet
            left = {shard: op for shard, op in left.items() if (shard, last) in self._dropped}

    async def _drain(self) -> None:
        await self._at_once([shard_client.drain() for shard_client in self._shard_clients])

    async def filter_by(self, make: MakeOutbox) -> None:
        """Filter gradients of arrays by other outboxes (see `Encoder.filter_by`)."""
        async with self._turn:  # after what is being filtered
            self.encoder.filter_by(make)

    def note_outcome(self, shard: int, update: UpdateId, version: int, outcome: Outcome) -> None:
        """Note the outcome of an update on a shard."""
        if outcome == "dropped":
            self._dropped.add((shard, update))
        self._caller.on_ack(shard, update, version, outcome)

    @property
    def filtered(self) -> dict[str, Any]:
        """The state of the filters (see `Encoder.state`)."""
        return self.encoder.state(sum(client.keys.saved_bytes for client in self._shard_clients))

    @property
    def dropped(self) -> int:
        """How many of this client's updates were refused as too stale, on one shard or more."""
        return len({update for _, update in self._dropped})

    # -- leased data ------------------------------------------------------------------------------

    async def take_lease(
        self, run: str, division: Division, last: int, held: Sequence[int], waits: bool = True
    ) -> msg.Leased:
        """Take batches to compute; `waits`: wait some time for those that others may return.

        `last` is the number of the last lease. Some pushes of the leases `held` have not ended.
        """
        waits &= not self._is_gated  # otherwise others wait for this worker
        while True:
            self.may_go_on()
            async with self._turn:
                reader = await self._present()
            request = msg.TakeLease(*reader[:2], run, division, last, tuple(held), waits)
            reply: msg.Leased = await self.router.ask(request)
            if not reply.given_up:
                return reply
            self._given_up = reader.incarnation == self.incarnation

    async def idle(self) -> None:
        """Finish earlier pushes, and under BSP and SSP push an update that changes nothing."""
        # That is for a worker without a batch to compute: the others would wait for its next
        # update.
        await self._drain()
        if self._is_gated:
            await self.push_parts(Parts({}, {}), pull=True)

    # -- reading ----------------------------------------------------------------------------------

    async def pull(self) -> None:
        """Read all weights, which `weights` returns; errors as `push_parts`."""
        read = False
        while not read:
            async with self._turn:
                reader = await self._present()
            await self._at_once([client.pull(reader) for client in self._shard_clients])
            self.may_go_on()
            read = reader == self._reader and not (self._given_up or self._evicted)

    async def pull_rows(self, table: str, keys: object) -> np.ndarray:
        """Read the rows of these keys, in their order; raises `ShapeMismatch` for invalid keys.

        The rows of a shard are of one version, not older than the last read of that shard.
        """
        question = asked(self.group.layout, table, keys)
        wanted = {shard: msg.RowsAsked(table, some) for shard, some in question.keys.items()}
        rows = await self._rows(wanted)
        return question.answer({shard: each.values for shard, each in rows.items()})

    async def pull_range(self, table: str, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Read the rows with keys from `start` to below `stop`; return sorted keys, and rows."""
        self.group.layout.shards[0].table(table)
        rows_asked = msg.RowsAsked(table, None, *as_range(start, stop))
        rows = (await self._rows(dict.fromkeys(self._shards, rows_asked))).values()
        keys = np.concatenate([each.keys for each in rows if each.keys is not None])
        order = keys.argsort()
        return keys[order], np.concatenate([each.values for each in rows])[order]

    async def _rows(self, wanted: Mapping[int, msg.RowsAsked]) -> dict[int, msg.RowsRead]:
        """Read rows of shards, again as another incarnation if this one was evicted."""
        while True:
            async with self._turn:
                reader = await self._present()
            clients = self._shard_clients
            requests = [clients[s].pull_rows(reader, rows) for s, rows in wanted.items()]
            replies = zip(wanted, await self._at_once(requests), strict=True)
            read = {shard: reply for shard, reply in replies if reply is not None}
            self.may_go_on()
            if len(read) == len(wanted):
                self._rows_read_as.add(reader.incarnation)
                return read

    def read_point(self) -> ReadPoint:
        """Return the last read of each shard. Thread-safe."""
        return ReadPoint(tuple(shard_client.read for shard_client in self._shard_clients))

    def weights(self) -> dict[str, np.ndarray]:
        """Return the weights of the last read, as read-only arrays. Thread-safe."""
        return self.group.layout.scatter(self.read_point().buffers)

    def own_weights(
        self, point: ReadPoint, private: Callable[[np.ndarray], np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return the weights of a read, as arrays of the caller's own. Thread-safe.

        `private` maps a shard's buffer to memory that only the caller sees, or returns a read-only
        view of it.
        """
        buffers = {shard: private(buffer) for shard, buffer in point.buffers.items()}
        arrays = self.group.layout.scatter(buffers, frozen=False)
        return {n: each if each.flags.writeable else each.copy() for n, each in arrays.items()}

    def versions(self) -> tuple[int, ...]:
        """The version of each shard's weights at the last read; -1 before it."""
        reads = [shard_client.read.weights for shard_client in self._shard_clients]
        return tuple(-1 if weights is None else weights.version for weights in reads)

    async def apply(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        """Run a function on every shard, once on each; return the results, shard by shard.

        Errors as `known_call` and `all_succeeded`; `Evicted` if a later incarnation of this worker
        has called functions.
        """
        call = known_call(self.group.functions, function, arguments)
        async with self._turn:
            self._calls += 1
            # Calls are numbered separately: under BSP they are part of no round.
            number = UpdateId(f"{self.worker or DRIVER}{CALLS}", self.incarnation, self._calls)
        op = Operation("apply", number, call=call)
        outcomes = await self._at_once([_outcome(shard.call(op)) for shard in self._shard_clients])
        self.may_go_on()
        return [unpack(result) for result in all_succeeded(outcomes)]

    # -- the end of a training --------------------------------------------------------------------

    def may_go_on(self) -> None:
        """Raise why this client may push and pull no more, if it may not.

        That is `TrainingStopped`, `UpdatesLost`, or `InternalError` after a background task failed.
        """
        if self._caller.is_cancelled():
            self._end(TrainingStopped(f"the future of {self.worker} was cancelled"))
        if self._ended is not None:
            raise type(self._ended)(str(self._ended)) from self._ended.__cause__

    def _heard(self, table: msg.Table) -> None:
        self._known = table.version
        entered = self.worker and self.incarnation
        if self.receipts.heard(table.restorations) and (entered or self.receipts.accounts):
            self.tasks.start(self._renew())  # the coordinator waits for this client's statement
        if table.stops > self._caller.stops:
            self._end(TrainingStopped(msg.STOPPED))
        elif table.losses:
            self._end_if_wanted("a shard has lost acknowledged updates")

    def _lost(self, loss: msg.Loss) -> None:
        self._caller.on_loss(loss)
        self._end_if_wanted(f"updates of {self.worker}: {loss}")

    def _end_if_wanted(self, why: str) -> None:
        if self.group.on_loss == "raise":
            self._end(UpdatesLost(f"{why}. on_loss='raise' ends the training"))

    def _fail(self, error: Exception) -> None:
        self._end(internal_error(error))

    def _end(self, error: DpsError) -> None:
        """Push and pull no more; a worker leaves as soon as nothing is under way."""
        # A client that is no worker continues, unless a background task has failed.
        if self._ended is None and (self.worker or isinstance(error, InternalError)):
            self._ended = error
            if self.worker:
                self._ending = self.tasks.start(self._end_in_order())

    async def _end_in_order(self) -> None:
        await self._at_rest()
        if self.incarnation:
            await self._exit(self._end_reason)

    async def _at_rest(self) -> None:
        await self._at_once([shard_client.at_rest() for shard_client in self._shard_clients])

    @property
    def _end_reason(self) -> str:
        return "stopped" if isinstance(self._ended, TrainingStopped) else "failed"

    @property
    def _statement(self) -> msg.Statement:
        known = 0 if self.receipts.undecided else self._known
        return msg.Statement(known, self._incarnations, self.receipts.accounts)

    async def _at_once(self, requests: Sequence[Awaitable[T]]) -> list[T]:
        """Wait for requests to shards."""
        # With one shard, a task would take longer than the rest. Otherwise each request has a task,
        # also a single one: it must not overtake others whose tasks have not begun.
        self._under_way += 1
        try:
            if len(self._shards) == 1 and not self.group.restores_together:
                return [await request for request in requests]
            return list(await asyncio.gather(*requests))
        finally:
            self._under_way -= 1


def _settle(pushed: Pushed, outcome: Any) -> None:
    if pushed.done():
        return  # it was cancelled
    if isinstance(outcome, Exception):
        pushed.set_exception(outcome)
    else:
        pushed.set_result(outcome)


async def _outcome(request: Awaitable[T]) -> T | Exception:
    try:
        return await request
    except Exception as error:  # noqa: BLE001 - raised by `all_succeeded`
        return error


async def _either(*works: Coroutine[Any, Any, Any]) -> None:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
