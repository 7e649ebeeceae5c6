"""Non-blocking sockets under one interface: unix, which pass descriptors, TCP, and TCP with TLS.

The two ends of a new connection prove to each other that they know the secret of the process that
accepts it, which peers learn through Dask's own connections alone. The secret itself is not sent,
and each proof covers a random number of the other end, so that a recorded proof is worthless.
"""

from __future__ import annotations

import array
import asyncio
import hmac
import os
import secrets
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

MAGIC = b"dps transport 2\n"
NONCE_BYTES, PROOF_BYTES = 16, 32
GREETING_SECONDS = 5.0
ENCRYPT_BYTES = 1 << 20  # that TLS encrypts before others have their turn
MOST_DESCRIPTORS = 64  # per message
_ANCILLARY = socket.CMSG_SPACE(MOST_DESCRIPTORS * struct.calcsize("i"))
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

T = TypeVar("T")


class Refused(ConnectionError):
    """The process at the other end of a connection does not know the secret."""


class Line:
    """One stream of bytes. Used from one event loop.

    Attributes
    ----------
    passes_memory
        Whether descriptors can be sent along.
    descriptors
        Received descriptors that were not taken yet, in the order in which they were sent.
    truncated
        Whether some descriptors could not be received, because this process has none left.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.passes_memory = sock.family == socket.AF_UNIX
        self.descriptors: deque[int] = deque()
        self.truncated = False
        if not self.passes_memory:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def receive(self, room: memoryview) -> int:
        """Receive into `room`; return the number of bytes, 0 at the end of the stream.

        `BlockingIOError` if there is nothing yet; another `OSError` if the connection is lost.
        """
        if not self.passes_memory:
            return self.sock.recv_into(room)
        count, ancillary, flags, _ = self.sock.recvmsg_into([room], _ANCILLARY, _CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                received = array.array("i")
                received.frombytes(data[: len(data) - len(data) % received.itemsize])
                self.descriptors.extend(received)
        self.truncated |= bool(flags & socket.MSG_CTRUNC)
        return count

    def send(self, buffers: Sequence[memoryview], descriptors: Sequence[int]) -> int:
        """Send as much as possible, the descriptors with the first byte; return the byte count.

        `BlockingIOError` if nothing can be sent now; another `OSError` if the connection is lost.
        """
        if not descriptors:
            return self.sock.sendmsg(buffers)
        rights = array.array("i", descriptors)
        return self.sock.sendmsg(buffers, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    @property
    def has_more(self) -> bool:
        """Whether there are bytes that the event loop does not know of."""
        return False

    def close(self) -> None:
        """Close it, and the descriptors that were not taken."""
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())


class TlsLine(Line):
    """A stream within TLS, which passes no descriptors."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._tls = sock

    async def shake_hands(self) -> None:
        """Do the handshake of TLS."""
        await _retried(self, self._tls.do_handshake)

    def receive(self, room: memoryview) -> int:
        """Receive as `Line` does."""
        try:
            return self._tls.recv_into(room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0

    def send(self, buffers: Sequence[memoryview], descriptors: Sequence[int]) -> int:
        """Send as `Line` does."""
        try:
            return self._tls.send(buffers[0][:ENCRYPT_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    @property
    def has_more(self) -> bool:
        """Whether bytes are decrypted already."""
        return self._tls.pending() > 0


async def to_unix(name: str, secret: bytes) -> Line:
    """Connect to a unix socket in the abstract namespace.

    `OSError` if no process listens there, or it does not know the secret.
    """
    return await _connected(socket.socket(socket.AF_UNIX), f"\0{name}", secret)


async def to_tcp(host: str, port: int, secret: bytes, tls: ssl.SSLContext | None) -> Line:
    """Connect to a TCP port, with TLS if the cluster has it; raises as `to_unix` does."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = infos[0]
    return await _connected(socket.socket(family, kind, protocol), address, secret, tls, host)


async def _connected(
    sock: socket.socket,
    address: Any,
    secret: bytes,
    tls: ssl.SSLContext | None = None,
    host: str | None = None,
) -> Line:
    line = Line(sock)
    try:
        await asyncio.get_running_loop().sock_connect(sock, address)
        if tls is not None:
            wrapped = tls.wrap_socket(sock, do_handshake_on_connect=False, server_hostname=host)
            line = secured = TlsLine(wrapped)
            await secured.shake_hands()
        await _greet(line, secret)
    except BaseException:
        line.close()
        raise
    return line


async def welcomed(sock: socket.socket, secret: bytes, tls: ssl.SSLContext | None) -> Line:
    """Return the line to a process that has connected, or close it and raise `OSError`."""
    line = Line(sock)
    try:
        if line.passes_memory:
            _check_user(sock)
        elif tls is not None:
            wrapped = tls.wrap_socket(sock, do_handshake_on_connect=False, server_side=True)
            line = secured = TlsLine(wrapped)
            await secured.shake_hands()
        mine = MAGIC + secrets.token_bytes(NONCE_BYTES)
        await _send(line, mine)
        theirs = await _receive(line, NONCE_BYTES)
        proof = await _receive(line, PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(secret, b">", mine + theirs)):
            raise Refused("the process that has connected does not know the secret")
        await _send(line, _proof(secret, b"<", mine + theirs))
    except BaseException:
        line.close()
        raise
    return line


async def _greet(line: Line, secret: bytes) -> None:
    theirs = await _receive(line, len(MAGIC) + NONCE_BYTES)
    if not theirs.startswith(MAGIC):
        raise Refused("the process that listens there does not use the protocol of dps")
    mine = secrets.token_bytes(NONCE_BYTES)
    await _send(line, mine + _proof(secret, b">", theirs + mine))
    proof = await _receive(line, PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"<", theirs + mine)):
        raise Refused("the process that listens there does not know the secret")


def _proof(secret: bytes, way: bytes, numbers: bytes) -> bytes:
    return hmac.digest(secret, way + numbers, "sha256")


def _check_user(sock: socket.socket) -> None:
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        raise Refused(f"the process that has connected is user {uid}, not {os.getuid()}")


async def _send(line: Line, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        sent = await _retried(line, lambda: line.send([rest], ()), writing=True)  # noqa: B023
        rest = rest[sent:]


async def _receive(line: Line, size: int) -> bytes:
    received = bytearray(size)
    rest = memoryview(received)
    while rest:
        count = await _retried(line, lambda: line.receive(rest))  # noqa: B023 - called at once
        if not count:
            raise Refused("the other end has closed the connection")
        rest = rest[count:]
    return bytes(received)


async def _retried(line: Line, act: Callable[[], T], writing: bool = False) -> T:
    """Call a function again, whenever the socket is ready, until it does not block."""
    loop, descriptor = asyncio.get_running_loop(), line.sock.fileno()
    while True:
        try:
            return act()
        except ssl.SSLWantReadError:
            writing = False
        except ssl.SSLWantWriteError:
            writing = True
        except BlockingIOError:
            pass
        ready = asyncio.Event()
        if writing:
            add, remove = loop.add_writer, loop.remove_writer
        else:
            add, remove = loop.add_reader, loop.remove_reader
        add(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            remove(descriptor)
