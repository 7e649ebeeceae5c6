"""Memory without a name that one process fills and others on its host map: segments and loans.

A segment is a memfd. Its maker alone can write to it: it is sealed before anybody else sees it, so
that it can neither shrink under a reader, who would be killed by that, nor be mapped for writing
again. Being nowhere in the file system, it is gone with the last process that maps it, whatever
ends them, and no size of /dev/shm bounds it.

Whoever uses a segment holds a reference to one `Held`; nothing else counts. When the last one is
let go, a segment of this process goes back to its `Pool` to be filled again, and the maker of one
that was lent by another process is told. So what anybody still looks at is never written to.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import resource
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

ALIGNMENT = 64  # of arrays in a segment: a line of the processor's cache
SMALLEST = 1 << 16
IDLE_BYTES = 512 << 20  # what a pool keeps for later
MOST_SEGMENTS = 256  # of a pool; each costs a descriptor here and in every process that maps it
_CLOEXEC_SEALABLE = 0x0001 | 0x0002  # MFD_CLOEXEC | MFD_ALLOW_SEALING
_NOEXEC = 0x0008  # MFD_NOEXEC_SEAL; Linux 6.3
# By number: this module is imported on systems that have none of them, too.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW = 0x0001, 0x0002, 0x0004
_FIXED_SIZE = _SHRINK | _GROW
_NO_WRITERS = 0x0010  # F_SEAL_FUTURE_WRITE: but for who maps it already; Linux 5.1
_FAILED = ctypes.c_void_p(-1).value

_log = logging.getLogger("dps.transport")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Mapping:
    """A segment as this process sees it; ends with the last reference to it.

    `mmap.mmap` is not used: it keeps a descriptor of its own for each.

    Attributes
    ----------
    address, size
        Where it begins in this process, and how many bytes it has.
    fd
        Its descriptor; -1 if it was closed, so that others cannot be given it.
    """

    def __init__(self, fd: int, size: int, writable: bool, private: bool = False) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        address = _libc.mmap(None, size, access, kind, fd, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "mmap")
        self.address: int = address
        self.size = size
        self.fd = -1 if private else fd

    def __del__(self, munmap: Callable[..., int] = _libc.munmap) -> None:
        if hasattr(self, "fd"):
            munmap(self.address, self.size)
            if self.fd >= 0:
                os.close(self.fd)


def create(size: int) -> Mapping:
    """Make a segment that this process can write to; its memory is there, not just promised.

    Raises
    ------
    OSError
        The system does not allow it, or has no memory or descriptors left.
    """
    fd = _memfd()
    try:
        os.posix_fallocate(fd, 0, size)
        made = Mapping(fd, size, writable=True)
    except BaseException:
        os.close(fd)
        raise
    _seal(fd)
    return made


def opened(fd: int, size: int) -> Mapping:
    """Map a segment of another process to read it; takes the descriptor over.

    Raises
    ------
    OSError
        It is not such a segment, or there is no room for it.
    """
    try:
        sealed = fcntl.fcntl(fd, _GET_SEALS)
        if sealed & _SHRINK == 0 or os.fstat(fd).st_size < size:
            raise OSError(errno.EINVAL, "memory that may shrink, or is too small")
        return Mapping(fd, size, writable=False)
    except BaseException:
        os.close(fd)
        raise


class Held:
    """What keeps a segment from being written to again: arrays over it hold on to this.

    Parameters
    ----------
    ended
        Called with the segment, and whether it is spoiled, when nobody holds it any more: in
        whatever thread that happens, between any two instructions.

    Attributes
    ----------
    spoiled
        Whether it must never be filled again: a process may look at it that cannot be asked.
    """

    __slots__ = ("__array_interface__", "__weakref__", "_ended", "mapping", "spoiled")

    def __init__(
        self,
        mapping: Mapping,
        shape: tuple[int, ...],
        dtype: np.dtype,
        writable: bool,
        ended: Callable[[Mapping, bool], object],
    ) -> None:
        self.mapping = mapping
        self.spoiled = False
        self._ended = ended
        self.__array_interface__ = {
            "data": (mapping.address, not writable),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }

    def __del__(self) -> None:
        self._ended(self.mapping, self.spoiled)


def array_of(held: Held) -> np.ndarray:
    """The array over a segment that is held; no view of it outlives the hold."""
    return np.asarray(held)


def held_by(array: np.ndarray) -> Held | None:
    """The segment that an array lies in, if nobody can write to it through numpy; else None.

    An array that was made by `Pool.empty` is such once its owner has frozen it, for good, by
    ``array.flags.writeable = False``.
    """
    found: object = array
    while isinstance(found, np.ndarray):
        if found.flags.writeable:
            return None
        found = found.base
    return found if isinstance(found, Held) else None


def private(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array in memory that only the caller sees, which may be written to.

    That is another mapping of the segment that it lies in, whose pages are copied as they are
    written to. Where that cannot be had it is a read-only view of the array.
    """
    held = held_by(array)
    if held is not None and held.mapping.fd >= 0:
        try:
            mapping = Mapping(held.mapping.fd, held.mapping.size, writable=True, private=True)
        except OSError:
            held = None
        else:
            own = Held(mapping, (mapping.size,), np.dtype(np.uint8), True, partial(_let_go, held))
            begin = array.ctypes.data - held.mapping.address
            return array_of(own)[begin : begin + array.nbytes].view(array.dtype)
    view = array.view()
    view.flags.writeable = False
    return view


def _let_go(held: Held, mapping: Mapping, spoiled: bool) -> None:
    """Do nothing: the segment is held for as long as this could be called."""


class Pool:
    """Segments of this process, to be filled again when nobody holds them. Thread-safe.

    A segment that is used again need not be faulted in again, neither here nor where it is known.

    Attributes
    ----------
    failed
        Whether there was no memory for a segment, at least once.
    """

    def __init__(self) -> None:
        self.failed = False
        self._lock = threading.Lock()
        self._ended: deque[tuple[Mapping, bool]] = deque()
        self._idle: deque[Mapping] = deque()
        self._all: weakref.WeakSet[Mapping] = weakref.WeakSet()
        self._closed = False

    def __len__(self) -> int:
        """How many segments there are, held or idle."""
        return len(self._all)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array to be filled, in a segment of its own.

        Once frozen (see `held_by`) it is sent without a copy.

        Raises
        ------
        OSError
            There is no memory for it.
        """
        size = max(1, prod(shape) * dtype.itemsize)
        return array_of(Held(self._take(size), shape, dtype, True, self._end))

    def filled(self, arrays: Sequence[np.ndarray]) -> tuple[Held, list[int]]:
        """Copy arrays into a segment; return it and where in it each begins.

        Raises
        ------
        OSError
            There is no memory for them.
        """
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        byte = np.dtype(np.uint8)
        held = Held(self._take(size), (size,), byte, True, self._end)
        room = array_of(held)
        for start, array in zip(starts, arrays, strict=True):
            place = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(place, array)
        return held, starts

    def complain(self, error: OSError) -> None:
        """Say once that there is no memory, and that arrays go through sockets instead."""
        if not self.failed:
            self.failed = True
            _log.warning("no memory to share (%s): arrays go through the socket instead", error)

    def close(self) -> None:
        """Let go of all that is idle, and of the rest as soon as nobody holds it."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            self._ended.clear()

    def _end(self, mapping: Mapping, spoiled: bool) -> None:
        # Called by the garbage collector, perhaps while this very thread has the lock.
        if not self._closed:
            self._ended.append((mapping, spoiled))

    def _take(self, size: int) -> Mapping:
        wanted = size_class(size)
        with self._lock:
            self._sort_out()
            for mapping in reversed(self._idle):  # the warmest first
                if mapping.size == wanted:
                    self._idle.remove(mapping)
                    return mapping
            if len(self._all) >= MOST_SEGMENTS and not self._idle:
                raise OSError(errno.EMFILE, f"{MOST_SEGMENTS} segments are in use")
            if len(self._all) >= MOST_SEGMENTS:
                self._idle.popleft()
        made = create(wanted)
        with self._lock:
            self._all.add(made)
        return made

    def _sort_out(self) -> None:
        """Have what nobody holds any more ready to be used again, as far as it may be."""
        while self._ended:
            mapping, spoiled = self._ended.popleft()
            if not spoiled:
                self._idle.append(mapping)
        idle = sum(mapping.size for mapping in self._idle)
        while idle > IDLE_BYTES:
            idle -= self._idle.popleft().size


def size_class(size: int) -> int:
    """The size of the segments that serve for so many bytes: at most a quarter more."""
    if size <= SMALLEST:
        return SMALLEST
    step = 1 << (size - 1).bit_length() - 3
    return -(-size // step) * step


def few_left(fd: int) -> bool:
    """Whether descriptors begin to run short: a new one is the lowest that is free."""
    return fd >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def _memfd() -> int:
    try:
        fd = os.memfd_create("dps", _CLOEXEC_SEALABLE | _NOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("dps", _CLOEXEC_SEALABLE)
    if few_left(fd):
        os.close(fd)
        raise OSError(errno.EMFILE, "few descriptors are left")
    return fd


def _seal(fd: int) -> None:
    try:
        fcntl.fcntl(fd, _ADD_SEALS, _FIXED_SIZE | _NO_WRITERS)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, _ADD_SEALS, _FIXED_SIZE)
    fcntl.fcntl(fd, _ADD_SEALS, _SEAL)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs, as far as it matters to whom it can pass memory.

    Attributes
    ----------
    boot
        Of the system: the same for all containers on one machine, and for no other machine.
    user
        Its number.
    network
        Which network it sees; abstract unix sockets belong to one.
    refusal
        Why it cannot share memory; empty: it can.
    """

    boot: str
    user: int
    network: str
    refusal: str = ""

    def apart(self, other: Place) -> str:
        """Why these two processes cannot share memory; empty: they can."""
        if self.boot != other.boot:
            return "on another host"
        if self.user != other.user:
            return "of another user"
        if self.network != other.network:
            return "in another network namespace"
        if self.refusal or other.refusal:
            return f"no shared memory: {self.refusal or other.refusal}"
        return ""


def here() -> Place:
    """Where this process runs; tries out whether it can share memory."""
    if not sys.platform.startswith("linux"):
        return Place("", -1, "", f"{sys.platform} has no memfd")
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = str(os.stat("/proc/self/ns/net").st_ino)
    except OSError as error:
        return Place("", -1, "", str(error))
    return Place(boot, os.getuid(), network, _refusal())


def _refusal() -> str:
    try:
        create(SMALLEST)
        with socket.socket(socket.AF_UNIX):
            return ""
    except OSError as error:
        return str(error)
