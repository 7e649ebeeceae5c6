"""Calls of protocol messages: directly to the node, never through the scheduler.

They use shared memory or a stream, as `dps.cluster.transport.port` chooses for each peer. Otherwise
they use a connection pool of Dask, with the security of the cluster, and the key of the host's
actor. The `Actor` proxy is not used: it ties the life of tasks to the actor's, and a call through
it may never return when the node dies. Every call has a deadline.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import numpy as np
from distributed import Worker
from distributed.core import ConnectionPool
from distributed.protocol import to_serialize
from distributed.protocol.serialize import Serialize, Serialized, merge_and_deserialize

from dps.cluster.platform import made_once, split_address, state_of
from dps.cluster.transport.connection import (
    JOIN_BYTES,
    LARGE_BYTES,
    Connection,
    Lost,
    NoSuchKey,
    log_failure,
)
from dps.cluster.transport.port import AS_CHOSEN, Port
from dps.errors import (
    CoordinatorGone,
    DeadlineExceeded,
    DpsError,
    GroupClosed,
    NotServing,
    RemoteError,
    Unreachable,
)
from dps.protocol import wire
from dps.protocol.transport import Done, Endpoint, TransportChoice

COORDINATOR_PREFIX = "dps_coordinator_"
PROBE_SECONDS = 0.25
LATE_SECONDS = 10.0  # after which a connection without the coordinator's late reply is given up
METER = "dps-meter"
SHARING: tuple[TransportChoice, ...] = ("auto", "shared_memory")


@dataclass
class Meter:
    """The bytes of dps messages of one process, by link. Written from one event loop only."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)


def meter_of(dask_worker: Worker, group: str) -> Meter:
    """Return the meter of all workers of a group in a node's process, at once or in turn."""
    last, meter = state_of(dask_worker).get(METER, ("", Meter()))
    if last != group:
        meter = Meter()
        state_of(dask_worker)[METER] = (group, meter)
    return meter  # type: ignore[no-any-return]


# -- injected conditions ---------------------------------------------------------------------------

Handle = Callable[[Any], Awaitable[Any]]  # carries out a message
Direction = Literal["in", "out"]
BOTH: tuple[Direction, ...] = ("in", "out")


@dataclass(frozen=True, slots=True)
class Condition:
    """Delay messages in these directions; without `seconds` until it ends, as TCP does."""

    ways: tuple[Direction, ...]
    seconds: float | None = None


@dataclass(slots=True)
class _Imposed:
    condition: Condition
    over: asyncio.Event
    timer: asyncio.TimerHandle
    affected: int = 0


class Links:
    """Injected conditions on the dps messages of one process. Used from its event loop.

    Dask's own messages are not affected, so that conditions can be lifted. Every condition ends
    after its time, even if the process that imposed it is gone.
    """

    def __init__(self) -> None:
        self.disturbed = False  # all that a message looks up while there is no condition
        self._imposed: dict[int, _Imposed] = {}  # those that have ended as well, for `affected`

    def impose(self, number: int, condition: Condition, seconds: float) -> None:
        """Impose a condition, known by a number, for some seconds."""
        timer = asyncio.get_running_loop().call_later(seconds, self.lift, number)
        self._imposed[number] = _Imposed(condition, asyncio.Event(), timer)
        self.disturbed = True

    def lift(self, number: int) -> None:
        """End a condition, if it has not ended; messages that it held back pass."""
        if number in self._imposed:
            self._imposed[number].timer.cancel()
            self._imposed[number].over.set()
        self.disturbed = bool(self._current)

    def lift_all(self) -> None:
        """End every condition."""
        for number in self._imposed:
            self.lift(number)

    @property
    def cut_off(self) -> bool:
        """Whether all messages that the process sends are held back."""
        conditions = [imposed.condition for imposed in self._current]
        return any(each.seconds is None and "out" in each.ways for each in conditions)

    def affected(self, number: int) -> int:
        """Return the number of messages that a condition has held back or delayed."""
        imposed = self._imposed.get(number)
        return 0 if imposed is None else imposed.affected

    async def passage(self, way: Direction) -> None:
        """Wait until a message may pass."""
        for imposed in self._current:
            if way in imposed.condition.ways:
                imposed.affected += 1
                seconds = imposed.condition.seconds
                await (imposed.over.wait() if seconds is None else asyncio.sleep(seconds))

    @property
    def _current(self) -> list[_Imposed]:
        return [imposed for imposed in self._imposed.values() if not imposed.over.is_set()]


def links_of(dask_worker: Worker) -> Links:
    """Return the links of a node's process: the same for all that runs in it."""
    return made_once(dask_worker, "dps-links", Links)


# -- calls -----------------------------------------------------------------------------------------


class ClusterTransport:
    """Calls hosts and the coordinator, from the loop of a Dask connection pool.

    The coordinator is always called through that pool, several times per second by each process. If
    it is late, calls that time out must not keep it from catching up: Dask would close the
    connection of each, and a new connection costs far more than a reply. So the connection is kept
    until the late reply has come, and other calls wait until then.

    Without a `port` only Dask's connections are used. `on_connected` is called with the address of
    a host, the transport to it and the reason, on each change.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        meter: Meter,
        links: Links | None = None,
        port: Port | None = None,
        wanted: TransportChoice = "auto",
        on_connected: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self._port = port
        self._wanted = wanted
        self._on_connected = on_connected
        self._transports: dict[str, str] = {}
        self._large: set[tuple[str, type]] = set()  # whose replies were large
        self._pool = pool
        self._meter = meter
        self._links = links if links is not None else Links()
        self._late: set[asyncio.Future[Any]] = set()

    async def call(self, to: Endpoint, message: Any, deadline: float, link: str = "control") -> Any:
        """Send a message and return the reply (see `dps.protocol.transport.Transport`)."""
        frames = wire.encode(message)
        self._meter.sent[link] += wire.size(frames)
        try:
            async with asyncio.timeout(deadline) as scope:
                if self._links.disturbed:
                    await self._links.passage("out")
                if to.key.startswith(COORDINATOR_PREFIX):
                    reply = await self._ask_coordinator(to, link, frames, scope)
                else:
                    reply = await self._send(to, link, frames, type(message), scope)
                if self._links.disturbed:
                    await self._links.passage("in")
        except (OSError, ValueError) as error:
            # tornado raises such a ValueError if the peer of a new TLS connection ends.
            if isinstance(error, ValueError) and "IOStream is not idle" not in str(error):
                raise
            if scope.expired():  # any other TimeoutError is of a step on the way
                raise _late(to, type(message), deadline) from None
            raise _unreachable(to, type(message), error) from error
        except RuntimeError as error:
            if "ConnectionPool is closed" not in str(error):  # a message of Dask
                raise
            raise GroupClosed("its Dask client or node is closed") from error
        except NoSuchKey:
            name = to.key.removeprefix(COORDINATOR_PREFIX)
            if name == to.key:
                raise _not_serving(to) from None
            raise CoordinatorGone(
                f"parameter server {name} is closed, or its Dask scheduler was restarted: it "
                "accepts no more workers or requests"
            ) from None
        self._meter.received[link] += wire.size(reply)
        return wire.decode(reply)

    def begin(
        self, to: Endpoint, message: Any, deadline: float, link: str, done: Done
    ) -> Callable[[], None] | None:
        """Send a small message at once (see `dps.protocol.transport.Transport`)."""
        kind = type(message)
        if self._port is None or self._links.disturbed or (to.key, kind) in self._large:
            return None
        way = self._port.known_way(to.address, self._wanted, large=False)
        if way is None or way.connection is None:
            return None
        if self._transports.get(to.address) != way.transport:
            return None  # `call` reports it
        frames = wire.encode(message)
        nbytes = wire.size(frames)
        if nbytes > JOIN_BYTES:
            return None
        try:
            begun = _Begun(self, way.connection, to, kind, frames, deadline, link, done)
        except Lost:
            return None
        self._meter.sent[link] += nbytes
        return begun.give_up

    def took(self, to: Endpoint, kind: type, link: str, reply: wire.Frames) -> None:
        """Count a reply to `begin`."""
        self._meter.received[link] += wire.size(reply)
        if _is_large(reply):
            self._large.add((to.key, kind))

    @property
    def disturbed(self) -> bool:
        """Whether a condition may hold messages back."""
        return self._links.disturbed

    def doubt(self, connection: Connection) -> None:
        """Test a connection on which a reply is late."""
        if self._port is not None:
            self._port.doubt(connection)

    async def gone(self, address: str) -> bool:
        """Whether no process listens at the address (see `dps.protocol.transport.Transport`)."""
        # Dask's own connections are retried until their timeout, so this makes a plain one.
        _, host, port = split_address(address)
        if not host:
            return False
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                _, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError):
            return False
        writer.close()
        return False

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return an array to fill, which is sent without a copy once it is frozen. Thread-safe."""
        nbytes = np.dtype(dtype).itemsize * prod(shape)
        if self._port is not None and self._wanted in SHARING and nbytes >= LARGE_BYTES:
            try:
                return self._port.pool.empty(shape, np.dtype(dtype))
            except OSError as error:
                self._port.pool.complain(error)
        return np.empty(shape, dtype)

    async def _send(
        self, to: Endpoint, link: str, frames: wire.Frames, kind: type, scope: asyncio.Timeout
    ) -> wire.Frames:
        asked = to.key, kind
        large = asked in self._large or _is_large(frames)
        way = AS_CHOSEN
        if self._port is not None:
            way = await self._port.way(to.address, self._wanted, large)
        if self._transports.get(to.address) != way.transport:
            self._transports[to.address] = way.transport
            if self._on_connected is not None:
                self._on_connected(to.address, way.transport, way.why)
        if way.connection is None:
            return await self._send_by_dask(to, link, frames)
        try:
            reply = await way.connection.call(to.key, link, frames)
        except asyncio.CancelledError:
            if scope.expired():
                self.doubt(way.connection)
            raise
        if not large and _is_large(reply):
            self._large.add(asked)
        return reply

    async def _send_by_dask(self, to: Endpoint, link: str, frames: wire.Frames) -> wire.Frames:
        payload = [to_serialize(frame) for frame in frames]
        execute = self._pool(to.address).actor_execute
        try:
            reply = await execute(actor=to.key, function="handle", args=[link, *payload])
        except KeyError as error:
            if error.args != (to.key,):  # Dask raises this if it has no such actor
                raise
            raise NoSuchKey(to.key) from None
        if reply["status"] == "error":
            raised = _deserialized(reply["exception"])
            raise RemoteError(f"{type(raised).__name__}: {raised}") from raised
        return list(_deserialized(reply["result"]))

    async def _ask_coordinator(
        self, to: Endpoint, link: str, frames: wire.Frames, scope: asyncio.Timeout
    ) -> wire.Frames:
        """Ask once no reply is late; the reply to this request is late when `scope` times out."""
        while self._late:
            await asyncio.wait(self._late, return_when=asyncio.FIRST_COMPLETED)
        # The scheduler does not deserialize arrays; the coordinator is never sent any.
        ask = getattr(self._pool(to.address), to.key)
        asking = asyncio.ensure_future(ask(link=link, frames=frozen(frames)))
        try:
            await asyncio.wait([asking])
        except asyncio.CancelledError:
            if scope.expired():
                self._late.add(asking)
                asking.add_done_callback(self._came)
                asyncio.get_running_loop().call_later(LATE_SECONDS, asking.cancel)
            else:
                asking.cancel()
                await asyncio.wait([asking])
            raise
        reply = asking.result()
        if reply is None:  # Dask returns None to a request that it does not know
            raise NoSuchKey(to.key)
        return thawed(reply)

    def _came(self, asking: asyncio.Future[Any]) -> None:
        self._late.discard(asking)
        if not asking.cancelled():
            asking.exception()  # so that asyncio does not log it


class _Begun:
    """A request that was sent by `ClusterTransport.begin`: where its reply arrives."""

    def __init__(
        self,
        transport: ClusterTransport,
        connection: Connection,
        to: Endpoint,
        kind: type,
        frames: wire.Frames,
        deadline: float,
        link: str,
        done: Done,
    ) -> None:
        self._transport, self._connection = transport, connection
        self._to, self._kind, self._link = to, kind, link
        self._deadline, self._done = deadline, done
        self._number = connection.begin(to.key, link, frames, self)
        self._timer = asyncio.get_running_loop().call_later(deadline, self._expire)

    def done(self) -> bool:
        return False  # the connection forgets it at its end

    def set_result(self, frames: wire.Frames) -> None:
        self._transport.took(self._to, self._kind, self._link, frames)
        if self._transport.disturbed:  # `call` waits until the reply may pass
            return self.give_up()
        try:
            reply = wire.decode(frames)
        except Exception as error:  # noqa: BLE001 - raised by the caller
            reply = error
        self._end(reply)

    def set_exception(self, error: Exception) -> None:
        if isinstance(error, NoSuchKey):
            error = _not_serving(self._to)
        elif isinstance(error, OSError):
            error = _unreachable(self._to, self._kind, error)
        self._end(error)

    def give_up(self) -> None:
        self._end(TimeoutError())

    def _expire(self) -> None:
        self._transport.doubt(self._connection)
        self._end(_late(self._to, self._kind, self._deadline))

    def _end(self, reply: Any) -> None:
        self._timer.cancel()
        self._connection.forget(self._number)
        self._done(reply)


def _late(to: Endpoint, kind: type, deadline: float) -> DeadlineExceeded:
    call = f"{kind.__name__} to {to.key} at {to.address}"
    return DeadlineExceeded(f"{call}: no reply in {deadline:g} s")


def _unreachable(to: Endpoint, kind: type, error: Exception) -> Unreachable:
    return Unreachable(f"{kind.__name__} to {to.key} at {to.address}: {error}")


def _not_serving(to: Endpoint) -> NotServing:
    return NotServing(f"{to.key} does not exist at {to.address}")


def _is_large(frames: wire.Frames) -> bool:
    return any(frame.nbytes >= LARGE_BYTES for frame in frames)


def _deserialized(value: Any) -> Any:
    """Deserialize a value, which not every connection (the scheduler's, an inproc one) does."""
    if isinstance(value, Serialize):
        return value.data
    if isinstance(value, Serialized):
        return merge_and_deserialize(value.header, value.frames)
    return value


def frozen(frames: wire.Frames) -> list[bytes]:
    """Return frames as bytes, which Dask does not serialize."""
    return [frame.tobytes() for frame in frames]


def thawed(frames: Sequence[bytes]) -> wire.Frames:
    """Return the frames of `frozen`."""
    return [np.frombuffer(frame, np.uint8) for frame in frames]


async def answer(handle: Handle, meter: Meter, link: str, frames: wire.Frames) -> wire.Frames:
    """Decode a request, pass it to `handle`, and return the frames of its reply."""
    reply = begin_answer(lambda message: None, handle, meter, link, frames)
    return reply if isinstance(reply, list) else await reply


def begin_answer(
    at_once: Callable[[Any], Any], handle: Handle, meter: Meter, link: str, frames: wire.Frames
) -> wire.Frames | Coroutine[Any, Any, wire.Frames]:
    """Decode a request and pass it to `at_once` or, if that returns None, to `handle`.

    Returns the frames of its reply, or what to await for them.
    """
    meter.received[link] += wire.size(frames)
    try:
        message = wire.decode(frames)
        reply = at_once(message)
        if reply is None:
            return _answered(handle, meter, link, message)
        frames = wire.encode(reply)
    except Exception as error:  # noqa: BLE001 - raised at the other end
        frames = _raised(error)
    meter.sent[link] += wire.size(frames)
    return frames


async def _answered(handle: Handle, meter: Meter, link: str, message: Any) -> wire.Frames:
    try:
        frames = wire.encode(await handle(message))
    except Exception as error:  # noqa: BLE001 - raised at the other end
        frames = _raised(error)
    meter.sent[link] += wire.size(frames)
    return frames


def _raised(error: Exception) -> wire.Frames:
    # Any other error is a defect: the caller must not retry.
    return wire.encode(error if isinstance(error, DpsError) else RemoteError(log_failure(error)))
