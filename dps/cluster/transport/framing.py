"""Messages of frames as bytes on a stream.

A message is a head of fixed size, a description in MessagePack, and the bytes of the frames that
are not in shared memory. Large frames are received into their final arrays.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass, field
from enum import IntEnum
from math import prod
from typing import Any

import msgpack
import numpy as np

HEAD = struct.Struct("<BxxxIQ")  # kind, bytes of the description, number of the request
STAGING_BYTES = 1 << 18
MOST_DESCRIPTION = 1 << 26
DIRECT_BYTES = 1 << 14  # if this much of a frame is missing, it is received into the frame

INLINE = -1


class Kind(IntEnum):
    """The kind of a message."""

    REQUEST = 1
    REPLY = 2
    NOBODY = 3  # the key is not served here
    FAILED = 4  # the handler raised an exception
    NOTE = 5  # only reports ended loans and segments
    NO_MEMORY = 6  # this end cannot map a segment, and closes the connection


@dataclass(slots=True)
class Description:
    """The metadata of a message.

    Attributes
    ----------
    text, link
        Of a request: its key, and what its bytes are counted as. Of others: the reason.
    frames
        dtype, shape, index into `loans` (or `INLINE`), and offset in the segment.
    loans
        Numbers of the loan and of its segment.
    segments
        Number and size of each segment whose descriptor is sent along.
    ended
        Numbers of loans that have ended at the sender, negative if the segment is spoiled.
    retired
        Numbers of the sender's segments that are gone.
    """

    text: str = ""
    link: str = ""
    frames: list[tuple[str, tuple[int, ...], int, int]] = field(default_factory=list)
    loans: list[tuple[int, int]] = field(default_factory=list)
    segments: list[tuple[int, int]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    retired: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Message:
    """A complete message; frames in shared memory are still None."""

    kind: Kind
    number: int
    about: Description
    frames: list[np.ndarray | None]


def packed(kind: Kind, number: int, about: Description) -> bytes:
    """Head and description as bytes."""
    lent = about.loans, about.segments, about.ended, about.retired
    description: bytes = msgpack.packb((about.text, about.link, about.frames, *lent))
    return HEAD.pack(kind, len(description), number) + description


def described(frame: np.ndarray) -> tuple[str, tuple[int, ...], int, int]:
    """The description of an inline frame; `TypeError` if no other process could rebuild it."""
    if frame.dtype.hasobject or frame.dtype.names:
        raise TypeError(f"arrays of {frame.dtype} cannot cross the wire")
    return frame.dtype.str, frame.shape, INLINE, 0


def flat(frame: np.ndarray) -> memoryview:
    """The bytes of a frame; not copied if the frame is contiguous."""
    return np.ascontiguousarray(frame).reshape(-1).view(np.uint8).data


def as_described(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """View bytes as an array."""
    return data.view(_dtype(dtype)).reshape(shape)


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """The size of such an array in bytes."""
    return int(prod(shape) * _dtype(dtype).itemsize)


def _dtype(name: str) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(name)
    if found.hasobject:
        raise ValueError(f"arrays of {name} do not cross the wire")
    return found


class Reader:
    """Assembles received bytes into messages; `ValueError` if they are none."""

    def __init__(self) -> None:
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._start = self._end = 0
        self._about: Description | None = None
        self._kind, self._number = Kind.NOTE, 0
        self._frames: list[np.ndarray | None] = []
        self._left: deque[memoryview] = deque()

    def room(self) -> memoryview:
        """Where to receive the next bytes."""
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
        return self._about is None and self._start == self._end

    def take(self) -> Message | None:
        """The next message, if it is complete."""
        if self._about is None and not self._begin():
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
        assert self._about is not None
        message = Message(self._kind, self._number, self._about, self._frames)
        self._about, self._frames = None, []
        return message

    def _begin(self) -> bool:
        """Read head and description, and allocate the frames."""
        waiting = self._end - self._start
        if waiting < HEAD.size:
            self._move(len(self._staging))
            return False
        kind, size, self._number = HEAD.unpack_from(self._staging, self._start)
        self._kind = Kind(kind)
        if size > MOST_DESCRIPTION:
            raise ValueError(f"a description of {size} bytes")
        if waiting < HEAD.size + size:
            self._move(max(len(self._staging), HEAD.size + size))
            return False
        begin = self._start + HEAD.size
        self._start = begin + size
        self._about = Description(*msgpack.unpackb(self._staging[begin : self._start]))
        for dtype, shape, loan, _ in self._about.frames:
            self._frames.append(self._empty(dtype, tuple(shape)) if loan == INLINE else None)
        return True

    def _empty(self, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        data = np.empty(nbytes(dtype, shape), np.uint8)
        if data.size:
            self._left.append(data.data)
        data.flags.writeable = False  # but for the views in `_left`
        return as_described(data, dtype, shape)

    def _move(self, size: int) -> None:
        """Move staged bytes to the start of the buffer, which has at least `size` bytes then."""
        rest = bytes(self._staging[self._start : self._end])
        if size > len(self._staging):
            self._staging = memoryview(bytearray(size))
        self._staging[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
