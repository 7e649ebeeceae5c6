"""Non-blocking sockets under one interface: unix, which pass descriptors, TCP, and TCP with TLS.

Whoever connects proves first that it knows the secret of the process at the other end, which is
told through Dask's own connections alone; and is proven the same. The secret itself is not sent,
and each proof is of a number that the other end has just made up: one that was overheard is of no
use.
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
from collections.abc import Sequence

MAGIC = b"dps transport 2\n"
NONCE_BYTES, PROOF_BYTES = 16, 32
GREETING_SECONDS = 5.0
ENCRYPT_BYTES = 1 << 20  # that TLS is given before others have their turn
MOST_DESCRIPTORS = 64  # that one message brings
_ANCILLARY = socket.CMSG_SPACE(MOST_DESCRIPTORS * struct.calcsize("i"))
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Refused(ConnectionError):
    """Whoever is at the other end of a connection does not know the secret."""


class Line:
    """One connected stream of bytes. Used from one event loop.

    Attributes
    ----------
    passes_memory
        Whether descriptors can be sent along.
    descriptors
        Those that have come and were not taken yet, in the order in which they were sent.
    truncated
        Whether some that were sent could not be taken: this process has none left.
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
        """Receive into `room`; return how many bytes came, 0 at the end.

        Raises
        ------
        BlockingIOError
            There is nothing yet.
        OSError
            The connection is lost.
        """
        if not self.passes_memory:
            return self.sock.recv_into(room)
        count, ancillary, flags, _ = self.sock.recvmsg_into([room], _ANCILLARY, _CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                found = array.array("i")
                found.frombytes(data[: len(data) - len(data) % found.itemsize])
                self.descriptors.extend(found)
        self.truncated |= bool(flags & socket.MSG_CTRUNC)
        return count

    def send(self, buffers: Sequence[memoryview], descriptors: Sequence[int]) -> int:
        """Send what the system takes at once, the descriptors with the first byte; return how much.

        Raises
        ------
        BlockingIOError
            It takes nothing.
        OSError
            The connection is lost.
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
        """Close it, with the descriptors that nobody has taken."""
        self.sock.close()
        while self.descriptors:
            os.close(self.descriptors.popleft())


class TlsLine(Line):
    """A stream within TLS."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        self._tls = sock

    def receive(self, room: memoryview) -> int:
        """Receive as `Line` does."""
        try:
            return self._tls.recv_into(room)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            return 0

    def send(self, buffers: Sequence[memoryview], descriptors: Sequence[int]) -> int:
        """Send as `Line` does; no descriptors."""
        try:
            return self._tls.send(buffers[0][:ENCRYPT_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    @property
    def has_more(self) -> bool:
        """Whether something is decrypted already."""
        return self._tls.pending() > 0


async def to_unix(name: str, secret: bytes) -> Line:
    """Connect to a unix socket in the abstract namespace.

    Raises
    ------
    OSError
        Nobody listens there, or it is not who knows the secret.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, f"\0{name}")
        return await _greeted(Line(sock), secret)
    except BaseException:
        sock.close()
        raise


async def to_tcp(host: str, port: int, secret: bytes, tls: ssl.SSLContext | None) -> Line:
    """Connect to a TCP port, with TLS if the cluster has it; raises as `to_unix` does."""
    loop = asyncio.get_running_loop()
    family, kind, proto, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[
        0
    ]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        if tls is None:
            return await _greeted(Line(sock), secret)
        wrapped = tls.wrap_socket(sock, do_handshake_on_connect=False, server_hostname=host)
        sock = wrapped
        await _shake_hands(wrapped)
        return await _greeted(TlsLine(wrapped), secret)
    except BaseException:
        sock.close()
        raise


async def welcomed(sock: socket.socket, secret: bytes, tls: ssl.SSLContext | None) -> Line:
    """Hear out who has connected; return the line, or close it and raise `OSError`."""
    try:
        sock.setblocking(False)
        if sock.family == socket.AF_UNIX:
            _check_user(sock)
            line = Line(sock)
        elif tls is None:
            line = Line(sock)
        else:
            wrapped = tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            sock = wrapped
            await _shake_hands(wrapped)
            line = TlsLine(wrapped)
        mine = MAGIC + secrets.token_bytes(NONCE_BYTES)
        await _send(line, mine)
        theirs = await _receive(line, NONCE_BYTES)
        proof = await _receive(line, PROOF_BYTES)
        if not hmac.compare_digest(proof, _proof(secret, b">", mine + theirs)):
            raise Refused("whoever has connected does not know the secret")
        await _send(line, _proof(secret, b"<", mine + theirs))
    except BaseException:
        sock.close()
        raise
    return line


async def _greeted(line: Line, secret: bytes) -> Line:
    theirs = await _receive(line, len(MAGIC) + NONCE_BYTES)
    if not theirs.startswith(MAGIC):
        raise Refused("whoever listens there does not speak as dps does")
    mine = secrets.token_bytes(NONCE_BYTES)
    await _send(line, mine + _proof(secret, b">", theirs + mine))
    proof = await _receive(line, PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"<", theirs + mine)):
        raise Refused("whoever listens there does not know the secret")
    return line


def _proof(secret: bytes, way: bytes, numbers: bytes) -> bytes:
    return hmac.digest(secret, way + numbers, "sha256")


def _check_user(sock: socket.socket) -> None:
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(found)
    if uid != os.getuid():
        raise Refused(f"whoever has connected is user {uid}, not {os.getuid()}")


async def _shake_hands(sock: ssl.SSLSocket) -> None:
    while True:
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            await _ready(sock, writing=False)
        except ssl.SSLWantWriteError:
            await _ready(sock, writing=True)
        else:
            return


async def _send(line: Line, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[line.send([rest], ()) :]
        except BlockingIOError:
            await _ready(line.sock, writing=True)


async def _receive(line: Line, size: int) -> bytes:
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        try:
            count = line.receive(rest)
        except BlockingIOError:
            await _ready(line.sock, writing=False)
            continue
        if not count:
            raise Refused("the other end has closed the connection")
        rest = rest[count:]
    return bytes(found)


async def _ready(sock: socket.socket, writing: bool) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    add, remove = (
        (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
    )
    descriptor = sock.fileno()
    add(descriptor, _set, ready)
    try:
        await ready
    finally:
        remove(descriptor)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
