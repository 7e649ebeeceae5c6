"""The port of a process: which way its messages take to each peer, and the connections to them.

A peer is asked through Dask's own connection, which is as secure as the cluster is, how it can be
reached. Processes of one user on one host share memory; others are sent a stream, with TLS if the
cluster has it; and where neither works, Dask's connection does. Messages that are small have a
connection of their own, so that they need not wait behind large ones.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from distributed.comm import parse_address, parse_host_port
from distributed.core import ConnectionPool

from dps.cluster.platform import made_once
from dps.cluster.transport.connection import Connection, Handler
from dps.cluster.transport.memory import Place, Pool, few_left, here
from dps.cluster.transport.sockets import GREETING_SECONDS, Line, to_tcp, to_unix, welcomed
from dps.protocol.transport import TransportChoice

if TYPE_CHECKING:
    import distributed

HANDLER = "dps_port"
NAME = "dps-port"
CONNECT_SECONDS = 3.0
ASK_SECONDS = 10.0
AGAIN_SECONDS = 30.0  # until a better way is looked for than the one that was found
REST_SECONDS = 1.0  # after a connection could not be accepted, for want of descriptors
BACKLOG = 128
MOST_GREETING = 64  # connections at a time that have not proven yet that they know the secret

Kind = Literal["shared_memory", "stream"]

_log = logging.getLogger("dps.transport")


@dataclass(frozen=True, slots=True)
class Way:
    """How messages get to a peer: by what, why so, and the connection; None: Dask's."""

    transport: str
    why: str
    connection: Connection | None
    until: float = float("inf")  # by this process's clock, when to look for a better one

    @property
    def is_current(self) -> bool:
        """Whether it can be used without looking again."""
        if self.connection is not None and self.connection.lost:
            return False
        return self.until > time.monotonic()


AS_CHOSEN = Way("dask", "as chosen", None)


class _Impassable(Exception):
    """A kind of connection does not work between two processes; says why.

    `lasting` says that it will not as long as these processes live.
    """

    def __init__(self, why: str, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting


class _Silent(_Impassable):
    """A peer does not say in time how it can be reached."""


class Port:
    """The connections of one process, both ways. Used from its event loop, once it is made.

    Parameters
    ----------
    rpc
        Dask's connections, to ask peers.
    address
        Of this process in Dask; None: nobody can call it.
    calling, called
        The cluster's TLS for each role, if it has TLS.
    """

    def __init__(
        self,
        rpc: ConnectionPool,
        address: Callable[[], str] | None = None,
        calling: ssl.SSLContext | None = None,
        called: ssl.SSLContext | None = None,
    ) -> None:
        self._rpc = rpc
        self._address = address
        self._calling = calling
        self._called = called
        self._users = 0
        self._handlers: dict[str, Handler] = {}
        self._connections: set[Connection] = set()
        self._listeners: dict[Kind, socket.socket] = {}
        self._greeting: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._ways: dict[tuple[str, TransportChoice, bool], Way] = {}
        self._looking: dict[tuple[str, TransportChoice, bool], asyncio.Task[Way]] = {}
        # Which kinds do not work to which peer, why, and until when they are not tried again.
        self._avoided: dict[tuple[str, Kind], tuple[str, float]] = {}
        self._peers: dict[Connection, tuple[str, Kind]] = {}
        self._tests: dict[Connection, asyncio.Task[None]] = {}
        self._warned = False
        self._secret = b""
        self._place: Place | None = None
        self.pool = Pool()

    # -- lifetime --------------------------------------------------------------------------------

    def enter(self) -> None:
        """Have one user more; it opens with the first."""
        self._users += 1

    def exit(self) -> None:
        """Have one user less; with the last it closes whatever is open."""
        self._users -= 1
        if not self._users:
            self._close()

    def serve(self, key: str, handler: Handler) -> None:
        """Have requests for a key carried out: called with the link and the frames."""
        self._handlers[key] = handler

    def withdraw(self, key: str) -> None:
        """Carry out no more requests for a key."""
        self._handlers.pop(key, None)

    def _close(self) -> None:
        for task in (*self._looking.values(), *self._greeting, *self._tests.values()):
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
        """How this process can be reached; None: not so. Called by Dask for a peer that asks."""
        try:
            return self._offer(kind) if self._users and self._address is not None else None
        except OSError as error:
            if not self._warned:
                self._warned = True
                _log.warning("no %s to this process: %s", _NAMES[kind], error)
            return None

    def _offer(self, kind: Kind) -> dict[str, Any] | None:
        assert self._address is not None
        self._secret = self._secret or secrets.token_bytes(32)
        if kind == "shared_memory":
            place = self._here()
            name = "" if place.refusal else str(self._listening(kind).getsockname()[1:].decode())
            return {"place": asdict(place), "name": name, "secret": self._secret}
        scheme, host = host_of(self._address())
        if not host:
            return None
        port = self._listening(kind).getsockname()[1]
        return {"host": host, "port": port, "tls": scheme == "tls", "secret": self._secret}

    def _listening(self, kind: Kind) -> socket.socket:
        if kind not in self._listeners:
            listener = self._unix() if kind == "shared_memory" else self._tcp()
            listener.setblocking(False)
            listener.listen(BACKLOG)
            loop = asyncio.get_running_loop()
            loop.add_reader(listener.fileno(), self._accept, listener)
            self._listeners[kind] = listener
        return self._listeners[kind]

    def _unix(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0dps-{secrets.token_hex(16)}")
        return listener

    def _tcp(self) -> socket.socket:
        assert self._address is not None
        _, host = host_of(self._address())
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, 0), family=family)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError | InterruptedError | ConnectionError):
                _log.warning("a connection could not be accepted: %s", error)
                self._rest(listener)
            return
        if self._greeting and (len(self._greeting) >= MOST_GREETING or few_left(sock.fileno())):
            # A greeting takes a moment: the oldest is the least likely to be one of a peer.
            oldest = next(iter(self._greeting))
            del self._greeting[oldest]
            oldest.cancel()
        task = asyncio.ensure_future(self._welcome(sock))
        self._greeting[task] = None
        task.add_done_callback(lambda task: self._greeting.pop(task, None))

    def _rest(self, listener: socket.socket) -> None:
        """Accept nothing for a while: who waits stays there, and would be tried without end."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener.fileno())
        loop.call_later(REST_SECONDS, self._go_on, listener)

    def _go_on(self, listener: socket.socket) -> None:
        if listener in self._listeners.values():
            asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    async def _welcome(self, sock: socket.socket) -> None:
        tls = self._called if self._address and host_of(self._address())[0] == "tls" else None
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                line = await welcomed(sock, self._secret, tls)
        except (OSError, TimeoutError) as error:
            _log.info("a connection was refused: %s", error)
            return
        self._connected(line)

    # -- calling ---------------------------------------------------------------------------------

    async def way(self, address: str, wanted: TransportChoice, large: bool) -> Way:
        """How a message gets to a peer; a connection is made where there is none.

        Parameters
        ----------
        wanted
            What was chosen: "auto", or the one kind to try before Dask's connection.
        large
            Whether it, or its reply, has large frames.

        Raises
        ------
        OSError
            The peer cannot be reached at all.
        """
        key = address, wanted, large
        known = self._ways.get(key)
        if known is not None and known.is_current:
            return known
        looking = self._looking.get(key)
        if looking is None:
            looking = self._looking[key] = asyncio.ensure_future(self._look(*key))
            looking.add_done_callback(lambda task: self._found(key, task))
        # Whoever gives up must not end it for others.
        return await asyncio.shield(looking)

    def doubt(self, connection: Connection) -> None:
        """A reply has not come in time by a connection: find out whether it is of no use any more.

        If nothing comes by it although the peer can be asked by Dask, it is ended, and messages go
        another way for a while.
        """
        if connection in self._peers and connection not in self._tests:
            test = self._test(connection, *self._peers[connection])
            task = self._tests[connection] = asyncio.ensure_future(test)
            task.add_done_callback(lambda _: self._tests.pop(connection, None))

    async def _test(self, connection: Connection, address: str, kind: Kind) -> None:
        try:
            await self._asked(address, kind)
        except (_Impassable, OSError):
            return  # it is the peer that does not answer, by whatever connection
        if connection.lost or await connection.is_alive(ASK_SECONDS):
            return
        why = f"nothing came by {_NAMES[kind]}"
        _log.warning("to %s: %s; another way is used for %g s", address, why, AGAIN_SECONDS)
        self._avoid(address, kind, why)
        connection.close(why)

    def _found(self, key: tuple[str, TransportChoice, bool], looking: asyncio.Task[Way]) -> None:
        self._looking.pop(key, None)
        if looking.cancelled() or looking.exception() is not None:
            return
        before, way = self._ways.get(key), looking.result()
        self._ways[key] = way
        old = before.connection if before is not None else None
        if old is not None and old is not way.connection:
            old.retire()

    async def _look(self, address: str, wanted: TransportChoice, large: bool) -> Way:
        """Find the best way that works; one that works already stays as it is."""
        before = self._ways.get((address, wanted, large))
        found: list[_Impassable] = []
        for kind in _KINDS[wanted]:
            connection = before.connection if before and before.transport == kind else None
            try:
                if connection is None or connection.lost:
                    connection = self._connected(await self._line(address, kind), address, kind)
            except _Impassable as reason:
                found.append(reason)
                if isinstance(reason, _Silent):
                    break  # it would not say more of another kind
                continue
            lasting = all(reason.lasting for reason in found)
            return Way(kind, _told(found) or _WHY[kind], connection, _until(lasting))
        return Way("dask", _told(found), None, _until(False)) if found else AS_CHOSEN

    async def _line(self, address: str, kind: Kind) -> Line:
        """Connect to a peer; raises `_Impassable` if this kind of connection does not work."""
        refusal, until = self._avoided.get((address, kind), ("", 0.0))
        if time.monotonic() < until:
            raise _Impassable(refusal)
        offer = await self._asked(address, kind)
        if offer is None:
            raise _Impassable(f"{address} offers no {_NAMES[kind]}")
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if kind == "shared_memory":
                    return await self._to_memory(offer)
                return await self._to_stream(offer)
        except TimeoutError:
            why = f"no {_NAMES[kind]} in {CONNECT_SECONDS:g} s"
        except OSError as error:
            why = f"no {_NAMES[kind]}: {error}"
        _log.warning("to %s: %s", address, why)
        raise _Impassable(why)

    async def _asked(self, address: str, kind: Kind) -> dict[str, Any] | None:
        """What a peer offers; raises `_Silent` if it does not say so in time."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                offer: dict[str, Any] | None = await getattr(self._rpc(address), HANDLER)(kind=kind)
        except TimeoutError:
            raise _Silent(f"no word of {_NAMES[kind]} in {ASK_SECONDS:g} s") from None
        return offer

    async def _to_memory(self, offer: dict[str, Any]) -> Line:
        apart = self._here().apart(Place(**offer["place"]))
        if apart:
            raise _Impassable(apart, lasting=True)
        return await to_unix(offer["name"], offer["secret"])

    async def _to_stream(self, offer: dict[str, Any]) -> Line:
        if offer["tls"] and self._calling is None:
            raise _Impassable("this process has no TLS", lasting=True)
        tls = self._calling if offer["tls"] else None
        return await to_tcp(offer["host"], offer["port"], offer["secret"], tls)

    # -- connections of both kinds -------------------------------------------------------------

    def _connected(self, line: Line, address: str = "", kind: Kind = "stream") -> Connection:
        connection = Connection(line, self._handlers, self.pool, self._lost)
        self._connections.add(connection)
        if address:
            self._peers[connection] = address, kind
        return connection

    def _lost(self, connection: Connection, why: str, no_memory: bool) -> None:
        self._connections.discard(connection)
        # Nobody may ever ask for this peer again: one that has ended has no successor there.
        self._ways = {key: way for key, way in self._ways.items() if way.connection != connection}
        address, kind = self._peers.pop(connection, ("", "shared_memory"))
        if no_memory:
            _log.warning("no shared memory with %s: %s", address or "a peer", why)
            if address:
                self._avoid(address, kind, why)

    def _avoid(self, address: str, kind: Kind, why: str) -> None:
        now = time.monotonic()
        self._avoided = {key: known for key, known in self._avoided.items() if known[1] > now}
        self._avoided[address, kind] = why, now + AGAIN_SECONDS

    def _here(self) -> Place:
        if self._place is None:
            self._place = here()
            if self._place.refusal:
                _log.warning("no shared memory in this process: %s", self._place.refusal)
        return self._place


_KINDS: dict[TransportChoice, tuple[Kind, ...]] = {
    "auto": ("shared_memory", "stream"),
    "shared_memory": ("shared_memory",),
    "stream": ("stream",),
    "dask": (),
}
_NAMES = {"shared_memory": "shared memory", "stream": "stream"}
_WHY = {"shared_memory": "on the same host", "stream": "as chosen"}


def _told(found: list[_Impassable]) -> str:
    return "; ".join(map(str, found))


def _until(lasting: bool) -> float:
    return float("inf") if lasting else time.monotonic() + AGAIN_SECONDS


def host_of(address: str) -> tuple[str, str]:
    """Scheme and host of an address of Dask's; no host: it is not reached over a network."""
    scheme, location = parse_address(address)
    return scheme, parse_host_port(location)[0] if scheme in ("tcp", "tls") else ""


def port_of(dask_worker: distributed.Worker) -> Port:
    """The port of a node's process: the same for all that runs in it."""

    def opened() -> Port:
        calling = dask_worker.security.get_connection_args("worker").get("ssl_context")
        called = dask_worker.security.get_listen_args("worker").get("ssl_context")
        port = Port(dask_worker.rpc, lambda: dask_worker.address, calling, called)
        dask_worker.handlers[HANDLER] = port.offer
        return port

    return made_once(dask_worker, NAME, opened)


def port_of_driver(client: distributed.Client) -> Port:
    """A port of a process that calls nodes, and is never called."""
    return Port(client.rpc, None, client.security.get_connection_args("client").get("ssl_context"))
