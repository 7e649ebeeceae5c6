"""The driver's side of a group: brings it up on a Dask cluster, and takes it down.

Only the driver makes host actors on nodes that join, and only it has the initial values.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dps.cluster.driver.news import IncidentWatch, News
from dps.cluster.driver.runs import must_be_sent
from dps.cluster.driver.setup import Start
from dps.cluster.driver.shard_hosts import ShardHosts
from dps.cluster.driver.training import Training
from dps.cluster.names import topic
from dps.cluster.node.logs import dropped
from dps.cluster.platform import platform_of, weakly
from dps.cluster.scheduler.plugin import CoordinatorPlugin, forget, take_out, widen
from dps.cluster.transport.calls import ClusterTransport, Meter
from dps.cluster.transport.port import port_of_driver
from dps.core.ranges import brief
from dps.errors import (
    CapacityError,
    DeadlineExceeded,
    DpsError,
    InternalError,
    LastStateNotSavedWarning,
    RemoteError,
    StoreUnavailable,
    UpdatesDroppedWarning,
)
from dps.events import EvaluationMissed, Event, from_dict
from dps.observe.history import History
from dps.observe.tracking import MlflowRun
from dps.protocol.client.client import Caller, Client
from dps.protocol.client.driver import Bootstrap, save_all
from dps.protocol.client.routing_table import Router
from dps.protocol.messages import CloseGroup, StopTraining
from dps.recovery.manifest import write_run

if TYPE_CHECKING:
    import distributed

T = TypeVar("T")

START_SECONDS = 60.0
LOOK_SECONDS = 0.05
DRAIN_SECONDS = 10.0


class GroupDriver:
    """A group as its driver runs it. Used from the client's event loop."""

    def __init__(self, client: distributed.Client, start: Start) -> None:
        self._port, wanted = port_of_driver(client), start.group.transport
        port = self._port if wanted != "dask" else None
        transport = ClusterTransport(client.rpc, Meter(), port=port, wanted=wanted)
        self.router = Router(start.group, transport)
        self.history = History(start.group.rule)
        self.news = News(client)
        self.incidents = IncidentWatch(self.router, self.news)
        self.hosts = ShardHosts(client, self.router, start.options, self.news, self._let_in)
        self.training = Training(client, start, self.hosts, self.incidents, self.history)
        self.connection = SchedulerConnection(client)
        self.runs: list[MlflowRun] = []  # the training is logged to these
        self.is_open = False  # any thread may read this and the next
        self.lost = False  # the connection broke before `close`
        self._client = client
        self._group = start.group
        self._start = start
        self._saves = start.group.recovery.durability.writes_checkpoints
        self._caller: Client | None = None
        self._events = topic("events", start.group.name)
        self._drops = topic("dropped", start.group.name)
        self._markers: Counter[str] = Counter()
        self._warned: set[type[Warning]] = set()
        self._seeding: list[asyncio.Task[None]] = []  # installs the initial values; empty at first

    # -- up ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring the group up, or leave the cluster as it was."""
        await self.hosts.assign()
        self._port.enter()
        self.is_open = True
        try:
            await self._bring_up()
        except BaseException:
            await self.close(checkpoint=False)
            raise

    async def _bring_up(self) -> None:
        client, group, start = self._client, self._group, self._start
        self.router.listen(self.incidents.heard)
        client.subscribe_topic(self._events, weakly(self._receive))
        client.subscribe_topic(self._drops, weakly(self._warn_of_drops))
        self.hosts.open()
        with must_be_sent("an object in functions= or another argument", "parts"):
            await client.register_plugin(CoordinatorPlugin(group, client.id))
        if self._saves:
            await asyncio.to_thread(write_run, start.run)
        states = start.saved.states if start.saved is not None else ()
        seeder = Bootstrap(self.router, start.initial, states, start.tables)
        self._seeding.append(asyncio.create_task(seeder.run()))
        try:
            async with asyncio.timeout(START_SECONDS):
                await self.hosts.make_hosts(self.hosts.nodes)
                table = await self.router.newer(-1)
                while not table.complete:
                    if isinstance(seeder.error, StoreUnavailable | RemoteError | InternalError):
                        raise seeder.error
                    table = await self.router.newer(table.version)
        except TimeoutError:
            raise CapacityError(
                f"not every shard has {group.replicas} replicas after {START_SECONDS:g} s; check "
                "the load of the Dask workers and their logs"
            ) from None

    # -- in use --------------------------------------------------------------------------------

    async def _let_in(self) -> None:
        """Start workers that wait for a node on nodes that joined after `run`."""
        # Dask restricts a task to the addresses known at first; a restarted node has another one.
        if not self.connection.can_break:
            return  # on virtual time workers end with their node
        places = {
            each.key: [
                node.address for node in self.hosts.for_workers if each.only_on in (None, node.name)
            ]
            for each in list(self.training.started.values())  # `run` may add some in its thread
        }
        await self._client.run_on_scheduler(widen, places)

    async def read(self, request: Callable[[Client], Awaitable[T]]) -> T:
        """Call `request` with a new protocol client; return the result."""
        reader = Client(self._group, self.router.transport)
        try:
            return await request(reader)
        finally:
            await reader.close()

    async def apply(self, function: str, arguments: Sequence[Any]) -> list[Any]:
        """Run a registered function on every shard."""
        if self._caller is None:
            # Distinguishes this caller from the one before the parameter server was resumed.
            caller = Caller(incarnation=self._start.run.generation)
            self._caller = Client(self._group, self.router.transport, caller)
        self.note_updates()
        return await self._caller.apply(function, arguments)

    async def checkpoint(self, limit: float) -> None:
        """Write a checkpoint of every shard within `limit` seconds."""
        await save_all(self.router, limit)
        if not self.training.holding():
            self.news.unsaved = ""

    def note_updates(self) -> None:
        """Note that from now on there may be updates that no checkpoint has."""
        if self._saves:
            self.news.unsaved = (
                f"parameter server {self._group.name} was not closed: updates since the last "
                f"checkpoint ({brief(self._group.recovery.durability)}) are not saved; call "
                "ps.close()"
            )

    async def stop(self) -> None:
        """End the training: return when no worker pushes any more."""
        self.training.stops += 1
        timings, loop = self._group.timings, asyncio.get_running_loop()
        until = loop.time() + timings.unavailable
        while left := await self.router.ask(StopTraining(self.training.stops, timings.hold)):
            if loop.time() >= until:
                raise DeadlineExceeded(f"{', '.join(left)}: still running after stop()")

    # -- what the group reports --------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Return when all events that live nodes have sent are here, or after `DRAIN_SECONDS`."""
        client, marker = self._client, platform_of(self._client).token()
        # Each node, and the scheduler, sends the marker after its events, on the same connection.
        send = partial(_send_marker, self._events, marker)
        sent = await client.run(send, workers=self.hosts.seated, on_error="ignore")
        await client.log_event(self._events, [{"marker": marker}])
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                while self._markers[marker] <= len(sent):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return  # a node was lost, and its last events with it
        finally:
            del self._markers[marker]

    async def _receive(self, event: tuple[float, Any]) -> None:
        for record in event[1]:
            if "marker" in record:
                self._markers[record["marker"]] += 1
            else:
                self._take(from_dict(record))

    def _take(self, event: Event) -> None:
        try:
            self.history.add(event)
        except Exception as error:  # noqa: BLE001 - users may report anything
            self.news.failed(f"{type(event).__name__} is missing in the history", error)
        sink = self._start.options.on_event
        if sink is not None:
            try:
                sink(event)
            except BaseException as error:  # noqa: BLE001 - the user's code must not end Dask's loop
                self.news.failed(f"on_event failed on {type(event).__name__}", error)
        elif isinstance(event, EvaluationMissed) and event.score_failed:
            self._warn_once(f"no evaluation, because {event.reason}", RuntimeWarning)

    async def _warn_of_drops(self, event: tuple[float, Any]) -> None:
        self._warn_once(dropped(self._group, str(event[1])), UpdatesDroppedWarning)

    def _warn_once(self, text: str, category: type[Warning]) -> None:
        if category not in self._warned:
            self._warned.add(category)
            self.news.warn(text, category)

    # -- down ----------------------------------------------------------------------------------

    async def close(self, checkpoint: bool) -> None:
        """Take the group down; if the scheduler is lost, release only this process's resources."""
        if not self.is_open:
            return
        self.is_open = False
        self.incidents.closing = True
        self.news.unsaved = ""
        checkpoint = checkpoint and self._saves
        if self.connection.can_break:
            await self._close_while_connected(checkpoint)
        else:
            await self._close_in_order(checkpoint)

    def let_go(self, checkpoint: bool) -> None:
        """Close without the event loop of the client, which was closed before."""
        if not self.is_open:
            return
        self.is_open = False
        self.news.unsaved = ""
        for end in self._endings():
            end()
        if checkpoint and self._saves:
            self._warn_of_last_state("the Dask client was closed before it")

    async def _close_while_connected(self, checkpoint: bool) -> None:
        """Take the group down; if the scheduler is lost, release this process's resources."""
        closing = asyncio.create_task(self._close_in_order(checkpoint))
        try:
            while not (closing.done() or self.connection.broken):
                await asyncio.wait((closing,), timeout=LOOK_SECONDS)
            if not self.connection.broken:
                closing.result()
                return
        finally:
            closing.cancel()
            await asyncio.gather(closing, return_exceptions=True)
        self.lost = self.connection.lost
        await self._stop(self.incidents.stop(), self.hosts.stop_moving(), self.hosts.stop())
        await self.router.close()
        self._port.exit()
        await asyncio.gather(*map(asyncio.to_thread, self._endings()))
        if checkpoint:
            self._warn_of_last_state("the connection to Dask's scheduler is gone")

    async def _close_in_order(self, checkpoint: bool) -> None:
        await asyncio.gather(self.hosts.stop_moving(), return_exceptions=True)
        await self._end_workers()
        if self._caller is not None:
            await self._caller.close()
        try:
            if checkpoint:
                await self._save_last_state()
            await self.incidents.stop()
            await self.incidents.look()
            if not self._group.recorded:  # the status is for display, and recording counts messages
                await self.training.look()
        finally:
            try:
                # Not before the last checkpoint: a server that was lost just now needs a node.
                await self._stop(self.hosts.stop())
                await self.hosts.finish_evaluators()
            finally:
                await self._take_down()

    async def _stop(self, *parts: Awaitable[None]) -> None:
        """Stop installing initial values, and await all `parts`, even if one raises."""
        for task in self._seeding:
            task.cancel()
        await asyncio.gather(*self._seeding, *parts, return_exceptions=True)

    async def _end_workers(self) -> None:
        """Make running workers fail, and cancel those that do not end within `Timings.call`."""
        left = [each for each in self.training.futures if not each.done()]
        if not left:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._group.timings.call):
                await self.router.ask(CloseGroup())
                await asyncio.gather(*left, return_exceptions=True)
        await self._client.cancel([future for future in left if not future.done()])

    async def _save_last_state(self) -> None:
        try:
            await self.checkpoint(self._group.timings.call)
        except DpsError as error:
            self._warn_of_last_state(
                f"it could not be written at the end ({error}). To be sure of the last state, call "
                "ps.checkpoint() before the end: it waits for longer, and raises an error"
            )

    def _warn_of_last_state(self, why: str) -> None:
        text = (
            f"the checkpoints of parameter server {self._group.name} lack its last state, because "
            f"{why}. ParameterServer.resume continues from them"
        )
        self.news.warn(text, LastStateNotSavedWarning)

    async def _take_down(self) -> None:
        """Leave the cluster as it was before the group, whose workers have ended."""
        await self.hosts.finish_hosts()
        self._port.exit()
        await self.router.close()
        key = self._group.coordinator.key
        await self._client.run_on_scheduler(take_out, key)
        # Only now have all senders of requests to hosts ended: other hosts and the coordinator.
        self.hosts.release_hosts()
        try:
            await self.catch_up()
        finally:
            self._client.unsubscribe_topic(self._events)
            self._client.unsubscribe_topic(self._drops)
        await asyncio.gather(*map(asyncio.to_thread, self._endings()))
        await self._client.run_on_scheduler(forget, self._group.name)

    def _endings(self) -> list[Callable[[], None]]:
        """Return functions that end the MLflow runs; to be called when the workers have ended."""
        runs, self.runs = self.runs, []
        failed = any(each.status == "failed" for each in self.training.workers())
        self.training.let_go()
        lost, failovers = self.incidents.updates_lost, len(self.incidents.failovers)
        numbers = {"updates_lost": lost, "failovers": failovers}
        return [partial(run.close, numbers, not failed) for run in runs]


class SchedulerConnection:
    """The connection that a Dask client has to its scheduler now. May be used in any thread."""

    def __init__(self, client: distributed.Client) -> None:
        self._client = client
        self._stream = getattr(client, "scheduler_comm", None)
        self.can_break = hasattr(client, "scheduler_comm")  # not on virtual time

    @property
    def broken(self) -> bool:
        """Whether it has ended, for any reason."""
        return self._was_replaced or (self._stream is not None and self._stream.comm.closed())

    @property
    def lost(self) -> bool:
        """Whether it broke, rather than being closed with the client in this process."""
        # Dask releases a stream that broke before it connects again or gives up.
        # When it breaks, the coordinator closes the group, even if Dask connects again.
        return self._was_replaced or (self.broken and not self.closed_here)

    @property
    def closed_here(self) -> bool:
        """Whether the client was closed in this process: its event loop may have ended."""
        return getattr(self._client, "status", None) in ("closing", "closed")

    @property
    def _was_replaced(self) -> bool:
        # None: it was broken already when this was created, and Dask is about to reconnect.
        there = self._client.scheduler_comm if self.can_break else None
        return self.can_break and (self._stream is None or there is not self._stream)


def _send_marker(topic: str, marker: str, dask_worker: Any) -> None:
    dask_worker.log_event(topic, [{"marker": marker}])
