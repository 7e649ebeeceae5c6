"""Streams of bytes between processes, on unix sockets, TCP or TLS, and messages on them.

The two ends of a new connection prove to each other that they know the secret of the process that
accepts it, which peers learn through Dask's own connections alone. Each proof covers a random
number of the other end, so that a recorded proof is worthless.

A message is a head of fixed size, a description in MessagePack, and the bytes of the frames that
are not in shared memory. Large frames are received into their final arrays.
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
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import Any, TypeVar

import msgpack
import numpy as np

from dps.cluster.monitor import peer_of

MAGIC = b"dps transport 3\n"
NONCE_BYTES, PROOF_BYTES = 16, 32
TURN_BYTES = 1 << 20  # that TLS encrypts or decrypts before others have their turn
RECORD_BYTES = 1 << 14  # that TLS decrypts at most in one call
MAX_DESCRIPTORS = 64  # per message
_ANCILLARY = socket.CMSG_SPACE(MAX_DESCRIPTORS * struct.calcsize("i"))
_TRUNCATED = int(socket.MSG_CTRUNC)  # operators of enumerations are slow
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

HEAD = struct.Struct("<BxxxIQ")  # kind, bytes of the description, number of the request
STAGING_BYTES = 1 << 18
MAX_DESCRIPTION = 1 << 26
DIRECT_BYTES = 1 << 14  # if this much of a frame is missing, it is received into the frame
INLINE = -1

T = TypeVar("T")


class Refused(ConnectionError):
    """The process at the other end of a connection does not know the secret."""


# -- sockets ---------------------------------------------------------------------------------------


class Line:
    """One stream of bytes. Used from one event loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.passes_memory = sock.family == socket.AF_UNIX
        self.descriptors: deque[int] = deque()  # received and not taken yet, in order
        self.truncated = False  # some were not received, because this process has none left
        if not self.passes_memory:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Without TCP_USER_TIMEOUT, which also ends a stream to a peer that is busy and does not
            # read: `Port.doubt` finds those over which nothing passes.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def receive(self, room: memoryview) -> int:
        """Receive into `room`; return the number of bytes, 0 at the end of the stream.

        `BlockingIOError` if there is nothing yet; another `OSError` if the connection is lost.
        """
        if not self.passes_memory:
            return self.sock.recv_into(room)
        count, ancillary, flags, _ = self.sock.recvmsg_into([room], _ANCILLARY, _CLOEXEC)
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                whole = len(data) - len(data) % struct.calcsize("i")
                self.descriptors.extend(array.array("i", data[:whole]))
        self.truncated |= bool(flags & _TRUNCATED)
        return count

    def send(self, buffers: Sequence[memoryview], descriptors: Sequence[int]) -> int:
        """Send as much as possible, the descriptors with the first byte; return the byte count.

        `BlockingIOError` if nothing can be sent now; another `OSError` if the connection is lost.
        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        return self.sock.sendmsg(buffers, rights if descriptors else ())

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

    sock: ssl.SSLSocket

    def receive(self, room: memoryview) -> int:
        """Receive as `Line` does, but several records at once while they are full."""
        count, done = RECORD_BYTES, 0
        try:
            while count == RECORD_BYTES and done < min(len(room), TURN_BYTES):
                count = self.sock.recv_into(room[done:])
                done += count
        except OSError as error:
            if not done and isinstance(error, ssl.SSLWantReadError | ssl.SSLWantWriteError):
                raise BlockingIOError from None
            if not done and not isinstance(error, ssl.SSLZeroReturnError | ssl.SSLEOFError):
                raise
        return done  # the next call reports an error that came after these bytes

    def send(self, buffers: Sequence[memoryview], descriptors: Sequence[int]) -> int:
        """Send as `Line` does."""
        try:
            return self.sock.send(buffers[0][:TURN_BYTES])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    @property
    def has_more(self) -> bool:
        """Whether bytes are decrypted already."""
        return self.sock.pending() > 0


async def to_tcp(host: str, port: int, secret: bytes, tls: ssl.SSLContext | None) -> Line:
    """Connect to a TCP port, with TLS if the cluster has it; raises as `greeted` does."""
    infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = infos[0]
    return await greeted(socket.socket(family, kind, protocol), secret, tls, address)


async def greeted(
    sock: socket.socket, secret: bytes, tls: ssl.SSLContext | None = None, address: Any = None
) -> Line:
    """Return the line to a process that has connected, or connect to the address if one is given.

    Both ends prove that they know the secret; otherwise the line is closed, and `OSError` raised.
    """
    line, calls = Line(sock), address is not None
    try:
        if calls:
            await asyncio.get_running_loop().sock_connect(sock, address)
        elif line.passes_memory:
            _, uid = peer_of(sock)
            if uid != os.getuid():
                raise Refused(
                    f"the connected process belongs to user {uid}, expected {os.getuid()}"
                )
        if tls is not None and not line.passes_memory:
            end = {"server_hostname": address[0]} if calls else {"server_side": True}
            wrapped = tls.wrap_socket(sock, do_handshake_on_connect=False, **end)
            line = TlsLine(wrapped)
            await _retried(line, wrapped.do_handshake)
        own = secrets.token_bytes(NONCE_BYTES)
        _send(line, MAGIC + own)
        greeting = await _receive(line, len(MAGIC) + NONCE_BYTES)
        if not greeting.startswith(MAGIC):
            raise Refused("the process at the other end does not use the protocol of dps")
        other = greeting.removeprefix(MAGIC)
        numbers = own + other if calls else other + own
        proofs = [hmac.digest(secret, way + numbers, "sha256") for way in (b">", b"<")]
        _send(line, proofs[0 if calls else 1])
        proof = await _receive(line, PROOF_BYTES)
        if not hmac.compare_digest(proof, proofs[1 if calls else 0]):
            raise Refused("the process at the other end does not know the secret")
    except BaseException:
        line.close()
        raise
    return line


def _send(line: Line, data: bytes) -> None:
    # The buffer of a new socket takes all of it.
    if line.send([memoryview(data)], ()) < len(data):
        raise Refused("the other end does not read")


async def _receive(line: Line, size: int) -> bytes:
    received = bytearray(size)
    rest = memoryview(received)
    while rest:
        count = await _retried(line, lambda: line.receive(rest))  # noqa: B023 - called at once
        if not count:
            raise Refused("the other end closed the connection")
        rest = rest[count:]
    return bytes(received)


async def _retried(line: Line, act: Callable[[], T]) -> T:
    """Call a function again, whenever there is something to read, until it does not block."""
    loop, descriptor = asyncio.get_running_loop(), line.sock.fileno()
    while True:
        try:
            return act()
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        ready = asyncio.Event()
        loop.add_reader(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(descriptor)


# -- messages --------------------------------------------------------------------------------------


class Kind(IntEnum):
    """The kind of a message."""

    REQUEST = 1
    REPLY = 2
    NOBODY = 3  # the key is not served here
    NOTE = 4  # only reports ended loans and segments
    NO_MEMORY = 5  # this end cannot map a segment, and closes the connection
    FAILED = 6  # the request raised an exception, or its reply could not be sent


_KINDS = {int(kind): kind for kind in Kind}


@dataclass(slots=True)
class Description:
    """The metadata of a message."""

    text: str = ""  # the key of a request, otherwise the reason
    link: str = ""  # what the bytes of a request are counted as
    # dtype, shape, index into `loans` (or `INLINE`), and offset in the segment.
    frames: list[tuple[str, tuple[int, ...], int, int]] = field(default_factory=list)
    loans: list[tuple[int, int]] = field(default_factory=list)  # numbers of loan and segment
    # Number and size of each segment whose descriptor is sent along.
    segments: list[tuple[int, int]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # loans, negative if the segment is spoiled
    retired: list[int] = field(default_factory=list)  # the sender's segments that are gone


@dataclass(slots=True)
class Message:
    """A received message; frames in shared memory are still None."""

    kind: Kind
    number: int
    about: Description
    frames: list[np.ndarray | None]


def packed(kind: Kind, number: int, about: Description) -> bytes:
    """Return head and description as bytes."""
    lent = about.loans, about.segments, about.ended, about.retired
    description: bytes = msgpack.packb((about.text, about.link, about.frames, *lent))
    return HEAD.pack(kind, len(description), number) + description


def described(frame: np.ndarray) -> tuple[str, tuple[int, ...], int, int]:
    """Describe an inline frame; `TypeError` if no other process could rebuild it."""
    if frame.dtype.hasobject or frame.dtype.names:
        raise TypeError(f"arrays of {frame.dtype} cannot cross the wire")
    return frame.dtype.str, frame.shape, INLINE, 0


def dtype_of(name: str) -> np.dtype[Any]:
    """Return a received dtype; `ValueError` if it is one of objects."""
    dtype: np.dtype[Any] = np.dtype(name)
    if dtype.hasobject:
        raise ValueError(f"arrays of {name} cannot cross the wire")
    return dtype


class Reader:
    """Assembles received bytes into messages; `ValueError` if they are none."""

    def __init__(self) -> None:
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._start = self._end = 0
        self._message: Message | None = None  # whose frames are being received
        self._left: deque[memoryview] = deque()

    def room(self) -> memoryview:
        """Return where to receive the next bytes."""
        if self._start == self._end:
            self._start = self._end = 0
            if self._left and len(self._left[0]) >= DIRECT_BYTES:
                return self._left[0]
        elif self._end == len(self._staging):
            self._move(len(self._staging))
        return self._staging[self._end :]

    def received(self, count: int) -> None:
        """Take note of `count` bytes in the `room`."""
        if not self._end and self._left and len(self._left[0]) >= DIRECT_BYTES:
            self._left[0] = self._left[0][count:]
        else:
            self._end += count

    @property
    def is_between(self) -> bool:
        """Whether no message has been received in part."""
        return self._message is None and self._start == self._end

    def take(self) -> Message | None:
        """Return the next message, if it is complete."""
        message = self._message or self._begin()
        if message is None:
            return None
        while self._left:
            room = self._left[0]
            count = min(len(room), self._end - self._start)
            room[:count] = self._staging[self._start : self._start + count]
            self._start += count
            if count < len(room):
                self._left[0] = room[count:]
                return None
            self._left.popleft()
        self._message = None
        return message

    def _begin(self) -> Message | None:
        """Read head and description, and allocate the frames."""
        waiting = self._end - self._start
        if waiting < HEAD.size:
            self._move(len(self._staging))
            return None
        kind, size, number = HEAD.unpack_from(self._staging, self._start)
        if size > MAX_DESCRIPTION or kind not in _KINDS:
            raise ValueError(f"a description of {size} bytes, of kind {kind}")
        if waiting < HEAD.size + size:
            self._move(max(len(self._staging), HEAD.size + size))
            return None
        self._start += HEAD.size + size
        about = Description(*msgpack.unpackb(self._staging[self._start - size : self._start]))
        frames = [
            self._frame(dtype_of(name), shape) if loan == INLINE else None
            for name, shape, loan, _ in about.frames
        ]
        self._message = Message(_KINDS[kind], number, about, frames)
        return self._message

    def _frame(self, dtype: np.dtype[Any], shape: Sequence[int]) -> np.ndarray:
        """Return a frame that is here already, or one whose bytes are received into it."""
        nbytes = prod(shape) * dtype.itemsize
        if not self._left and nbytes <= self._end - self._start:
            self._start += nbytes
            here = bytes(self._staging[self._start - nbytes : self._start])
            return np.frombuffer(here, dtype).reshape(shape)
        data = np.empty(nbytes, np.uint8)
        self._left.append(data.data)
        data.flags.writeable = False  # but for the views in `_left`
        return data.view(dtype).reshape(shape)

    def _move(self, size: int) -> None:
        """Move staged bytes to the start of the buffer, which has at least `size` bytes then."""
        rest = bytes(self._staging[self._start : self._end])
        if size > len(self._staging):
            self._staging = memoryview(bytearray(size))
        self._staging[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
