"""How protocol messages travel: straight to the node, never through the scheduler.

They go through shared memory or a stream, as `dps.cluster.transport.port` finds for each peer; or
else over a connection pool of Dask's own, to the host's Dask actor by address and key, with
whatever security the cluster has. The `Actor` proxy is not used: it ties the life of tasks to the
actor's, and a call through it may never return when the node dies. Every call has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
from distributed import Worker
from distributed.comm import parse_address, parse_host_port
from distributed.core import ConnectionPool, RPCClosed
from distributed.protocol import to_serialize
from distributed.protocol.serialize import Serialize, Serialized, merge_and_deserialize

from dps.cluster.platform import state_of
from dps.cluster.transport.connection import LARGE_BYTES, NoSuchKey
from dps.cluster.transport.links import Links
from dps.cluster.transport.port import AS_CHOSEN, Port, Way
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
from dps.protocol.transport import Endpoint, TransportChoice

COORDINATOR_PREFIX = "dps_coordinator_"
PROBE_SECONDS = 0.25
LATE_SECONDS = 10.0  # later a connection is taken for broken on which the coordinator owes a reply
METER = "dps-meter"
SHARING: tuple[TransportChoice, ...] = ("auto", "shared_memory")

_log = logging.getLogger("dps.transport")


class Meter:
    """Counts the bytes of dps messages of one process, by link kind. Not locked: counts only grow
    and are written from one event loop; readers may be a moment behind."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()


def meter_of(dask_worker: Worker, group: str) -> Meter:
    """The meter of all workers of a group in a node's process, at the same time or in turn."""
    last, meter = state_of(dask_worker).get(METER, ("", None))
    if last != group:
        meter = Meter()
        state_of(dask_worker)[METER] = (group, meter)
    found: Meter = meter
    return found


class ClusterTransport:
    """Calls hosts and the coordinator, from the loop of a Dask connection pool.

    The coordinator is always called through that pool, by everybody several times a second. When it
    is late, calls that are given up must not keep it busy, or it never catches up: Dask would close
    the connection of each, and the next call would make another, which costs far more than an
    answer. So the connection is kept until the late reply has come, and nothing else is sent until
    then: it would have to wait too.

    Parameters
    ----------
    links
        Those of the process, which may be disturbed on purpose; None: they never are.
    port
        Of the process; None: Dask's connections do for all.
    wanted
        By what hosts are called: see `dps.protocol.transport.TransportChoice`.
    on_connected
        Called with the address of a host, what it is called by, and why, whenever that changes.
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
                reply = await self._send(to, link, frames, scope, type(message))
                if self._links.disturbed:
                    await self._links.passage("in")
        except (OSError, RPCClosed) as error:
            if scope.expired():  # any other TimeoutError is of some step on the way
                raise DeadlineExceeded(
                    f"{type(message).__name__} to {to.key} at {to.address}: "
                    f"no reply in {deadline:g} s"
                ) from None
            raise Unreachable(
                f"{type(message).__name__} to {to.key} at {to.address}: {error}"
            ) from error
        except ValueError as error:
            # So says tornado of a TLS connection whose peer ends while it is made.
            if "IOStream is not idle" not in str(error):
                raise
            raise Unreachable(
                f"{type(message).__name__} to {to.key} at {to.address}: {error}"
            ) from error
        except RuntimeError as error:
            if "ConnectionPool is closed" not in str(error):  # as Dask's says
                raise
            raise GroupClosed("the Dask client or node that it was used from is closed") from error
        except NoSuchKey:
            raise _absent(to) from None
        self._meter.received[link] += wire.size(reply)
        return wire.decode(reply)

    async def gone(self, address: str) -> bool:
        """Whether nobody listens at the address (see `dps.protocol.transport.Transport`).

        Dask's own connection attempts go on until their time is up, so this makes a bare one.
        """
        scheme, host, port = _parts(address)
        if scheme not in ("tcp", "tls"):
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
        """Return an array to be filled, which is sent to processes on this host as it lies.

        It is once it is frozen, for good, by ``array.flags.writeable = False``; before, it is
        copied as others are. Thread-safe.
        """
        nbytes = np.dtype(dtype).itemsize * prod(shape)
        if self._port is None or self._wanted not in SHARING or nbytes < LARGE_BYTES:
            return np.empty(shape, dtype)
        try:
            return self._port.pool.empty(shape, np.dtype(dtype))
        except OSError as error:
            self._port.pool.complain(error)
            return np.empty(shape, dtype)

    async def _send(
        self, to: Endpoint, link: str, frames: wire.Frames, scope: asyncio.Timeout, kind: type
    ) -> wire.Frames:
        if to.key.startswith(COORDINATOR_PREFIX):
            return await self._send_by_dask(to, link, frames, scope)
        asked = to.key, kind
        large = asked in self._large or _is_large(frames)
        way = AS_CHOSEN
        if self._port is not None:
            way = await self._port.way(to.address, self._wanted, large)
        self._note(to.address, way)
        if way.connection is None:
            return await self._send_by_dask(to, link, frames, scope)
        try:
            reply = await way.connection.call(to.key, link, frames)
        except asyncio.CancelledError:
            if scope.expired() and self._port is not None:
                self._port.doubt(way.connection)
            raise
        if not large and _is_large(reply):
            self._large.add(asked)
        return reply

    def _note(self, address: str, way: Way) -> None:
        if self._transports.get(address) != way.transport:
            self._transports[address] = way.transport
            if self._on_connected is not None:
                self._on_connected(address, way.transport, way.why)

    async def _send_by_dask(
        self, to: Endpoint, link: str, frames: wire.Frames, scope: asyncio.Timeout
    ) -> wire.Frames:
        peer = self._pool(to.address)
        if to.key.startswith(COORDINATOR_PREFIX):
            # The scheduler does not deserialize arrays; the coordinator is never sent any.
            ask = partial(getattr(peer, to.key), link=link, frames=frozen(frames))
            found = await self._ask(ask, scope)
            if found is None:  # what Dask replies to a request that it does not know
                raise NoSuchKey(to.key)
            return thawed(found)
        payload = [to_serialize(frame) for frame in frames]
        try:
            reply = await peer.actor_execute(actor=to.key, function="handle", args=[link, *payload])
        except KeyError as error:
            if error.args != (to.key,):  # by which Dask says that it has no such actor
                raise
            raise NoSuchKey(to.key) from None
        if reply["status"] == "error":
            raised = _deserialized(reply["exception"])
            raise RemoteError(f"{type(raised).__name__}: {raised}") from raised
        return list(_deserialized(reply["result"]))

    async def _ask(self, ask: Callable[[], Awaitable[Any]], scope: asyncio.Timeout) -> Any:
        """Ask the coordinator once no reply is late; this one is when `scope` times out."""
        while self._late:
            await asyncio.wait(self._late, return_when=asyncio.FIRST_COMPLETED)
        asking = asyncio.ensure_future(ask())
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
        return asking.result()

    def _came(self, asking: asyncio.Future[Any]) -> None:
        """Take note that a late reply has come, or will not; nobody wants to know what it is."""
        self._late.discard(asking)
        if not asking.cancelled():
            asking.exception()


def _absent(to: Endpoint) -> NotServing:
    if not to.key.startswith(COORDINATOR_PREFIX):
        return NotServing(f"there is no {to.key} at {to.address}")
    name = to.key.removeprefix(COORDINATOR_PREFIX)
    return CoordinatorGone(
        f"parameter server {name} is closed, or its Dask scheduler was started again: it takes no "
        "more workers, and what they ask for is not carried out"
    )


def _is_large(frames: wire.Frames) -> bool:
    return any(frame.nbytes >= LARGE_BYTES for frame in frames)


def _parts(address: str) -> tuple[str, str, int]:
    scheme, location = parse_address(address)
    if scheme not in ("tcp", "tls"):
        return scheme, location, 0
    return scheme, *parse_host_port(location)


def _deserialized(value: Any) -> Any:
    """The value itself; not every connection (the scheduler's, one in process) unpacks it."""
    if isinstance(value, Serialize):
        return value.data
    if isinstance(value, Serialized):
        return merge_and_deserialize(value.header, value.frames)
    return value


def frozen(frames: wire.Frames) -> list[bytes]:
    """Frames as bytes, which Dask passes on without serialization."""
    return [frame.tobytes() for frame in frames]


def thawed(frames: Sequence[bytes]) -> wire.Frames:
    """The frames of `frozen`."""
    return [np.frombuffer(frame, np.uint8) for frame in frames]


async def answer(handle: Any, meter: Meter, link: str, frames: wire.Frames) -> wire.Frames:
    """Decode a request, have `handle` carry it out, and return the frames of its reply."""
    meter.received[link] += wire.size(frames)
    try:
        reply = wire.encode(await handle(wire.decode(frames)))
    except DpsError as error:
        reply = wire.encode(error)
    except Exception as error:  # noqa: BLE001 - a defect: returned to the caller, which must not retry
        # As text: a log that keeps the traceback would keep the arrays, and their memory.
        _log.error("a request failed:\n%s", "".join(traceback.format_exception(error)))
        reply = wire.encode(RemoteError(f"{type(error).__name__}: {error}"))
    meter.sent[link] += wire.size(reply)
    return reply
