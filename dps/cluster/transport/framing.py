"""How a message of frames becomes bytes on a stream, and bytes a message again.

A message is a head of fixed size, a description as MessagePack, and the bytes of the frames that
are not in shared memory, as they are. Large frames are received right into the arrays that they
become.
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
DIRECT_BYTES = 1 << 14  # so much of a frame is received right into it

INLINE = -1


class Kind(IntEnum):
    """What a message is."""

    REQUEST = 1
    REPLY = 2
    NOBODY = 3  # there is no such key here
    FAILED = 4  # carrying the request out raised
    NOTE = 5  # only news of loans
    NO_MEMORY = 6  # this end cannot map what it was sent; it closes the connection


@dataclass(slots=True)
class Description:
    """What is said of a message.

    Attributes
    ----------
    text, link
        For a request the key of whom it is for and what its bytes count as; else why.
    frames
        dtype, shape, index into `loans` (or `INLINE`), and where in the segment it begins.
    loans
        The number of each loan, and that of the segment.
    segments
        Number and size of each segment whose descriptor comes with this message.
    ended
        Numbers of loans that the sender lets go of, negative where the segment is spoiled.
    retired
        Numbers of segments of the sender that are no more.
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
    """A message that has come whole: frames that are in shared memory are still None."""

    kind: Kind
    number: int
    about: Description
    frames: list[np.ndarray | None]


def packed(kind: Kind, number: int, about: Description) -> bytes:
    """Head and description as bytes."""
    told: bytes = msgpack.packb(
        (
            *(about.text, about.link, about.frames, about.loans),
            *(about.segments, about.ended, about.retired),
        )
    )
    return HEAD.pack(kind, len(told), number) + told


def described(frame: np.ndarray, loan: int, start: int) -> tuple[str, tuple[int, ...], int, int]:
    """What is said of a frame; raises `TypeError` for what no other process could rebuild."""
    if frame.dtype.hasobject or frame.dtype.names:
        raise TypeError(f"arrays of {frame.dtype} cannot cross the wire")
    return frame.dtype.str, frame.shape, loan, start


def flat(frame: np.ndarray) -> memoryview:
    """The bytes of a frame, without a copy where they lie in order."""
    return np.ascontiguousarray(frame).reshape(-1).view(np.uint8).data


def as_described(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array that bytes are."""
    return data.view(_dtype(dtype)).reshape(shape)


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """How many bytes such an array has."""
    return int(prod(shape) * _dtype(dtype).itemsize)


def _dtype(name: str) -> np.dtype[Any]:
    found: np.dtype[Any] = np.dtype(name)
    if found.hasobject:
        raise ValueError(f"arrays of {name} do not cross the wire")
    return found


class Reader:
    """Makes messages of what is received. `ValueError` says that it is no such stream."""

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
        """Take note that so many bytes are in the `room`."""
        if not self._end and self._left and len(self._left[0]) >= DIRECT_BYTES:
            self._left[0] = self._left[0][count:]
        else:
            self._end += count

    @property
    def is_between(self) -> bool:
        """Whether whatever has been received was taken: no message has come in part."""
        return self._about is None and self._start == self._end

    def take(self) -> Message | None:
        """The next message, if it has come whole."""
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
        """Read head and description, and make room for the frames."""
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
        data.flags.writeable = False  # once the reader has its own way in
        return as_described(data, dtype, shape)

    def _move(self, size: int) -> None:
        """Have what is staged begin at the front of a buffer of at least so many bytes."""
        rest = bytes(self._staging[self._start : self._end])
        if size > len(self._staging):
            self._staging = memoryview(bytearray(size))
        self._staging[: len(rest)] = rest
        self._start, self._end = 0, len(rest)
