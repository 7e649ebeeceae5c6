"""The port of a process: its connections to peers, and the choice of a transport to each.

A peer is asked through Dask's connection, with the security of the cluster, how it can be reached.
Processes of one user on one host share memory; others use a stream, with TLS if the cluster has it.
If neither works, Dask's connection is used. Small messages have a separate connection, so that
they do not wait behind large ones.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from distributed.core import ConnectionPool

from dps.cluster.platform import made_once, split_address
from dps.cluster.transport.connection import Connection, Handler
from dps.cluster.transport.memory import Pool, few_left, here
from dps.cluster.transport.stream import Line, greeted, to_tcp
from dps.protocol.transport import TransportChoice

if TYPE_CHECKING:
    import distributed

HANDLER = "dps_port"
NAME = "dps-port"
CONNECT_SECONDS = 3.0
GREETING_SECONDS = 5.0
ASK_SECONDS = 10.0
AGAIN_SECONDS = 30.0  # until a transport that did not work is tried again
REST_SECONDS = 1.0  # after a connection could not be accepted, for lack of descriptors
MAX_GREETING = 64  # connections that have not proven yet that they know the secret

Kind = Literal["shared_memory", "stream"]

_KINDS: dict[TransportChoice, tuple[Kind, ...]] = {
    "auto": ("shared_memory", "stream"),
    "shared_memory": ("shared_memory",),
    "stream": ("stream",),
    "dask": (),
}
_WHY = {"shared_memory": "on the same host", "stream": "as chosen"}
T = TypeVar("T")

_log = logging.getLogger("dps.transport")


@dataclass(frozen=True, slots=True)
class Way:
    """The transport to a peer, the reason, and the connection; None: Dask's."""

    transport: str
    why: str
    connection: Connection | None
    until: float = float("inf")  # when to look for a better one


AS_CHOSEN = Way("dask", "as chosen", None)


class _Impassable(Exception):
    """A kind of connection does not work to a peer; if `lasting`, it never will."""

    def __init__(self, why: str, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting


class Port:
    """The connections of one process, both ways. Used from its event loop, once it is made."""

    def __init__(
        self,
        rpc: ConnectionPool,
        address: Callable[[], str] | None = None,  # Dask's address; None: it cannot be called
        calling: ssl.SSLContext | None = None,  # the TLS of the cluster for each role
        called: ssl.SSLContext | None = None,
    ) -> None:
        self._rpc = rpc
        self._address = address
        self._calling = calling
        self._called = called
        self._users = 0
        self.handlers: dict[str, Handler] = {}  # of requests, by their keys
        # Those that were made here are to a peer, of a kind.
        self._connections: dict[Connection, tuple[str, Kind] | None] = {}
        self._listeners: dict[Kind, socket.socket] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._greeting: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._tested: set[Connection] = set()
        self._warned: set[Kind] = set()
        self._ways: dict[tuple[str, TransportChoice, bool], Way] = {}
        self._looking: dict[tuple[str, TransportChoice, bool], asyncio.Task[Way]] = {}
        # Kinds that do not work to a peer, why, and until when they are not tried again.
        self._avoided: dict[tuple[str, Kind], tuple[str, float]] = {}
        self._secret = secrets.token_bytes(32)
        self._place: dict[str, str] | _Impassable | None = None
        self.pool = Pool()

    def enter(self) -> None:
        """Add a user; the first one opens the port."""
        self._users += 1

    def exit(self) -> None:
        """Remove a user; the last one closes the port."""
        self._users -= 1
        if self._users:
            return
        for task in self._tasks:
            task.cancel()
        for listener in self._listeners.values():
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
        self._listeners.clear()
        for connection in list(self._connections):
            connection.close()
        self._ways.clear()
        self.pool.close()
        self.pool = Pool()
        self._place = None

    # -- being called ----------------------------------------------------------------------------

    async def offer(self, kind: Kind) -> dict[str, Any] | None:
        """Return how this process can be reached, for a peer that asks by Dask; None: it cannot."""
        if not self._users or self._address is None:
            return None
        try:
            if kind == "shared_memory":
                place, name = self._here(), self._listening(kind).getsockname()[1:].decode()
                return {"place": place, "name": name, "secret": self._secret}
            scheme, host, _ = split_address(self._address())
            if not host:
                return None
            port = self._listening(kind).getsockname()[1]
            return {"host": host, "port": port, "tls": scheme == "tls", "secret": self._secret}
        except _Impassable:
            return None
        except OSError as error:
            if kind not in self._warned:  # peers ask again and again
                self._warned.add(kind)
                _log.warning("no %s to this process: %s", kind, error)
            return None

    def _listening(self, kind: Kind) -> socket.socket:
        if kind not in self._listeners:
            if kind == "shared_memory":
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(f"\0dps-{secrets.token_hex(16)}")
            else:
                assert self._address is not None
                _, host, _ = split_address(self._address())
                family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
                listener = socket.create_server((host, 0), family=family)
            listener.setblocking(False)
            listener.listen()
            self._listeners[kind] = listener
            self._start(self._accept(listener))
        return self._listeners[kind]

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                _log.warning("a connection could not be accepted: %s", error)
                await asyncio.sleep(REST_SECONDS)  # it stays pending
                continue
            if self._greeting and (len(self._greeting) >= MAX_GREETING or few_left(sock.fileno())):
                # A greeting takes a moment: the oldest is the least likely to come from a peer.
                oldest = next(iter(self._greeting))
                del self._greeting[oldest]
                oldest.cancel()
            task = self._start(self._welcome(sock))
            self._greeting[task] = None
            task.add_done_callback(lambda task: self._greeting.pop(task, None))
            await asyncio.sleep(0)  # so that it starts, and others have their turn

    async def _welcome(self, sock: socket.socket) -> None:
        assert self._address is not None
        tls = self._called if split_address(self._address())[0] == "tls" else None
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                line = await greeted(sock, self._secret, tls)
        except (OSError, TimeoutError) as error:
            _log.info("a connection was refused: %s", error)
        else:
            self._connected(line, None)

    # -- calling ---------------------------------------------------------------------------------

    async def way(self, address: str, wanted: TransportChoice, large: bool) -> Way:
        """Return the way of a message to a peer; connect if there is no connection.

        `large` messages are those with large frames, or replies with them. `OSError` if the peer
        cannot be reached at all.
        """
        key = address, wanted, large
        known = self.known_way(*key)
        if known is not None:
            return known
        looking = self._looking.get(key)
        if looking is None:
            looking = self._looking[key] = self._start(self._look(*key))
            looking.add_done_callback(lambda task: self._looked(key, task))
        return await asyncio.shield(looking)  # others may wait for it too

    def known_way(self, address: str, wanted: TransportChoice, large: bool) -> Way | None:
        """Return the way that was found before, unless it is time to look for a better one."""
        known = self._ways.get((address, wanted, large))
        if known is None or known.until <= time.monotonic():
            return None
        return known  # it is not lost

    def doubt(self, connection: Connection) -> None:
        """Test a connection on which a reply is late."""
        peer = self._connections.get(connection)
        if peer is not None and connection not in self._tested:
            self._tested.add(connection)
            test = self._start(self._test(connection, *peer))
            test.add_done_callback(lambda _: self._tested.discard(connection))

    async def _test(self, connection: Connection, address: str, kind: Kind) -> None:
        try:
            await self._asked(address, kind)
        except OSError:
            return  # the peer does not answer on any connection
        if not connection.lost and not await connection.is_alive(ASK_SECONDS):
            # Messages use another transport for a while.
            connection.close(f"no message arrived by {kind}", avoid=True)

    def _looked(self, key: tuple[str, TransportChoice, bool], looking: asyncio.Task[Way]) -> None:
        del self._looking[key]
        if not looking.cancelled():
            looking.exception()  # asyncio would log it if no caller waits any more

    async def _look(self, address: str, wanted: TransportChoice, large: bool) -> Way:
        """Find the best way that works, and keep it; a connection that is in use is kept."""
        key = address, wanted, large
        before = self._ways.get(key, AS_CHOSEN)
        reasons: list[_Impassable] = []
        way = AS_CHOSEN
        for kind in _KINDS[wanted]:
            connection = before.connection if before.transport == kind else None
            try:
                if connection is None or connection.lost:
                    connection = self._connected(await self._line(address, kind), (address, kind))
            except _Impassable as reason:
                reasons.append(reason)
            except TimeoutError:  # the peer is busy, and would not answer about another kind either
                reasons.append(_Impassable(f"no answer about {kind} in {ASK_SECONDS:g} s"))
                if before.connection is not None and not before.connection.lost:
                    way = before
                break
            else:
                way = Way(kind, _WHY[kind], connection)
                break
        if reasons:
            lasting = way.connection is not None and all(reason.lasting for reason in reasons)
            until = float("inf") if lasting else time.monotonic() + AGAIN_SECONDS
            way = Way(way.transport, "; ".join(map(str, reasons)), way.connection, until)
        self._ways[key] = way
        if before.connection is not None and before.connection is not way.connection:
            before.connection.retire()
        return way

    async def _line(self, address: str, kind: Kind) -> Line:
        """Connect to a peer; `TimeoutError` if it does not answer on Dask's connection in time."""
        refusal, until = self._avoided.get((address, kind), ("", 0.0))
        if time.monotonic() < until:
            raise _Impassable(refusal)
        place = self._here() if kind == "shared_memory" else {}
        offer = await self._asked(address, kind)
        if offer is None:
            raise _Impassable(f"{address} offers no {kind}")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if kind == "stream":
                    if offer["tls"] and self._calling is None:
                        raise _Impassable("this process has no TLS", lasting=True)
                    tls = self._calling if offer["tls"] else None
                    return await to_tcp(offer["host"], offer["port"], offer["secret"], tls)
                for what, value in place.items():
                    if offer["place"][what] != value:
                        raise _Impassable(f"another {what}", lasting=True)
                sock, name = socket.socket(socket.AF_UNIX), f"\0{offer['name']}"
                return await greeted(sock, offer["secret"], address=name)
        except TimeoutError:
            why = f"no {kind} in {CONNECT_SECONDS:g} s"
        except OSError as error:
            why = f"no {kind}: {error}"
        _log.warning("to %s: %s", address, why)
        raise _Impassable(why)

    async def _asked(self, address: str, kind: Kind) -> dict[str, Any] | None:
        async with asyncio.timeout(ASK_SECONDS):
            offer: dict[str, Any] | None = await getattr(self._rpc(address), HANDLER)(kind=kind)
        return offer

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _connected(self, line: Line, peer: tuple[str, Kind] | None) -> Connection:
        connection = Connection(line, self.handlers, self.pool, self._lost)
        self._connections[connection] = peer
        return connection

    def _lost(self, connection: Connection, why: str, avoid: bool) -> None:
        peer = self._connections.pop(connection)
        # There may never be another call of this peer, so nothing is kept for it.
        self._ways = {key: way for key, way in self._ways.items() if way.connection != connection}
        if avoid and peer is not None:
            _log.warning("to %s: %s", peer[0], why)
            self._avoided[peer] = why, time.monotonic() + AGAIN_SECONDS

    def _here(self) -> dict[str, str]:
        """Return where this process is; raises `_Impassable` if it cannot share memory."""
        if self._place is None:
            try:
                self._place = here()
            except OSError as error:
                self._place = _Impassable(f"no shared memory in this process: {error}", True)
                _log.warning("%s", self._place)
        if isinstance(self._place, _Impassable):
            raise self._place.with_traceback(None)  # it would grow with each raise
        return self._place


def port_of(dask_worker: distributed.Worker) -> Port:
    """Return the port of a node's process, which everything in it shares."""

    def opened() -> Port:
        security = dask_worker.security
        calling = security.get_connection_args("worker").get("ssl_context")
        called = security.get_listen_args("worker").get("ssl_context")
        port = Port(dask_worker.rpc, lambda: dask_worker.address, calling, called)
        dask_worker.handlers[HANDLER] = port.offer
        return port

    return made_once(dask_worker, NAME, opened)


def port_of_driver(client: distributed.Client) -> Port:
    """Return a port of a process that calls nodes, and is not called."""
    return Port(client.rpc, None, client.security.get_connection_args("client").get("ssl_context"))
