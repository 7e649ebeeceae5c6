"""Segments of anonymous memory that one process fills and others on its host map.

A segment is a memfd, which only its maker can write to. It is sealed before another process maps
it: it cannot shrink, which would kill a reader, and cannot be mapped for writing again. It is gone
with the last process that maps it, and is not bounded by the size of /dev/shm.

Each use of a segment holds a `Held`. When the last reference to that is gone, a segment of this
process returns to its `Pool`, to be filled again; if another process has lent it, the end of the
loan is reported. So a segment in use is never written to.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import resource
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np

BYTE = np.dtype(np.uint8)
ALIGNMENT = 64  # of arrays in a segment: a line of the processor's cache
SMALLEST = 1 << 16
IDLE_BYTES = 512 << 20  # that a pool keeps for later
SOON = 64  # requests within which a pool keeps more
MAX_SEGMENTS = 256  # of a pool: each takes a descriptor here, and in each process that maps it
_CLOEXEC_SEALABLE = 0x0001 | 0x0002  # MFD_CLOEXEC | MFD_ALLOW_SEALING
_NOEXEC = 0x0008  # MFD_NOEXEC_SEAL; Linux 6.3
# Numbers, because this module is also imported on systems without these constants.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEAL, _SHRINK, _GROW = 0x0001, 0x0002, 0x0004
_NO_WRITERS = 0x0010  # F_SEAL_FUTURE_WRITE: no further mappings for writing; Linux 5.1
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
    """A mapped segment, which is unmapped with the last reference to this."""

    def __init__(self, fd: int, size: int, writable: bool, private: bool = False) -> None:
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        kind = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        # `mmap.mmap` would keep another descriptor for each mapping.
        address = _libc.mmap(None, size, access, kind, fd, 0)
        if address == _FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), "mmap")
        self.address: int = address
        self.size = size
        self.fd = -1 if private else fd  # -1: the segment cannot be passed on
        self.is_writable = writable
        # Whether a driver knows the memory; None: that was not tried.
        self.is_registered: bool | None = None
        self.before_unmapping: Callable[[int], object] | None = None  # is given the address

    def __del__(self, munmap: Callable[..., int] = _libc.munmap) -> None:
        if hasattr(self, "fd"):
            if self.before_unmapping is not None:
                self.before_unmapping(self.address)
            munmap(self.address, self.size)
            if self.fd >= 0:
                os.close(self.fd)


def create(size: int) -> Mapping:
    """Make a segment, and allocate its memory; `OSError` if the system does not allow it."""
    try:
        fd = os.memfd_create("dps", _CLOEXEC_SEALABLE | _NOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.memfd_create("dps", _CLOEXEC_SEALABLE)
    try:
        if few_left(fd):
            raise OSError(errno.EMFILE, "few file descriptors are left")
        os.posix_fallocate(fd, 0, size)
        made = Mapping(fd, size, writable=True)
    except BaseException:
        os.close(fd)
        raise
    with suppress(OSError):  # before Linux 5.1
        fcntl.fcntl(fd, _ADD_SEALS, _NO_WRITERS)
    fcntl.fcntl(fd, _ADD_SEALS, _SHRINK | _GROW | _SEAL)
    return made


def opened(fd: int, size: int) -> Mapping:
    """Map a segment of another process for reading, and own its descriptor from now on."""
    try:
        sealed = fcntl.fcntl(fd, _GET_SEALS)
        if sealed & _SHRINK == 0 or os.fstat(fd).st_size < size:
            raise OSError(errno.EINVAL, "the memory may shrink, or is too small")
        return Mapping(fd, size, writable=False)
    except BaseException:
        os.close(fd)
        raise


class Held:
    """Keeps a segment from being written to again; all arrays over it refer to this."""

    __slots__ = ("__array_interface__", "__weakref__", "_ended", "mapping", "spoiled")

    def __init__(
        self,
        mapping: Mapping,
        shape: tuple[int, ...],
        dtype: np.dtype,
        writable: bool,
        # Called in any thread, between any two instructions, with whether it is spoiled.
        ended: Callable[[Mapping, bool], object],
    ) -> None:
        self.mapping = mapping
        self.spoiled = False  # must never be filled again, because a lost peer may still read it
        self._ended = ended
        self.__array_interface__ = {
            "data": (mapping.address, not writable),
            "shape": shape,
            "typestr": dtype.str,
            "version": 3,
        }

    def __del__(self) -> None:
        self._ended(self.mapping, self.spoiled)


def held_by(array: np.ndarray) -> Held | None:
    """Return the segment of an array, if the array is frozen by ``flags.writeable = False``."""
    base: object = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return None
        base = base.base
    return base if isinstance(base, Held) else None


def segment_of(array: np.ndarray) -> Mapping | None:
    """Return the segment that an array lies in, if it does."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.mapping if isinstance(base, Held) else None


def private(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array as private memory, which may be written to."""
    # The pages of its segment are mapped again, and copied when they are written to. If that is
    # impossible, it is a read-only view of the array.
    held = held_by(array)
    if held is not None and held.mapping.fd >= 0:
        with suppress(OSError):
            mapping = Mapping(held.mapping.fd, held.mapping.size, writable=True, private=True)
            # The reference to `held` lasts as long as this could be called.
            own = Held(mapping, (mapping.size,), BYTE, True, lambda *_: held)
            begin = array.ctypes.data - held.mapping.address
            return np.asarray(own)[begin : begin + array.nbytes].view(array.dtype)
    view = array.view()
    view.flags.writeable = False
    return view


class Pool:
    """Segments of this process, which are reused when they are not in use. Thread-safe."""

    def __init__(self) -> None:
        self._failed = False
        self._lock = threading.Lock()
        self._ended: deque[tuple[Mapping, bool]] = deque()
        self._idle: deque[tuple[int, Mapping]] = deque()  # and the last request before
        self._requests = 0
        self._all: weakref.WeakSet[Mapping] = weakref.WeakSet()
        self._closed = False

    def __len__(self) -> int:
        """Return the number of segments, in use or idle."""
        return len(self._all)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array to be filled, in a separate segment; `OSError` if memory is short."""
        size = max(1, prod(shape) * dtype.itemsize)
        return np.asarray(Held(self._take(size), shape, dtype, True, self._end))

    def filled(self, arrays: Sequence[np.ndarray]) -> tuple[Held, list[int]]:
        """Copy arrays into a segment; return it and each offset; `OSError` if memory is short."""
        starts, size = [], 0
        for array in arrays:
            starts.append(size)
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        held = Held(self._take(size), (size,), BYTE, True, self._end)
        room = np.asarray(held)
        for start, array in zip(starts, arrays, strict=True):
            place = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(place, array)
        return held, starts

    def complain(self, error: OSError) -> None:
        """Warn, once, that there is no memory, so that arrays are sent through sockets."""
        if not self._failed:
            self._failed = True
            _log.warning("no shared memory (%s): arrays are sent through the socket instead", error)

    def close(self) -> None:
        """Free idle segments now, and the others at the end of their use."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            self._ended.clear()

    def _end(self, mapping: Mapping, spoiled: bool) -> None:
        # Called by the garbage collector, perhaps while this thread has the lock.
        if not self._closed:
            self._ended.append((mapping, spoiled))

    def _take(self, size: int) -> Mapping:
        step = 1 << max(0, (size - 1).bit_length() - 3)
        wanted = max(SMALLEST, -(-size // step) * step)  # at most a quarter more
        return self._reused(wanted) or self._created(wanted)

    def _reused(self, size: int) -> Mapping | None:
        # Reused memory causes no page faults, here or in other processes that have mapped it.
        given_up = []  # freed when this returns, because it may take long to unmap them
        with self._lock:
            self._requests += 1
            while self._ended:
                ended, spoiled = self._ended.popleft()
                if spoiled:
                    given_up.append(ended)
                else:
                    self._idle.append((self._requests, ended))
            # The warmest first, and before others are given up.
            segment = next((each for each in reversed(self._idle) if each[1].size == size), None)
            if segment is not None:
                self._idle.remove(segment)
            idle = sum(mapping.size for _, mapping in self._idle)
            while idle > IDLE_BYTES and self._requests - self._idle[0][0] >= SOON:
                given_up.append(self._idle.popleft()[1])
                idle -= given_up[-1].size
        return None if segment is None else segment[1]

    def _created(self, size: int) -> Mapping:
        """Make a segment; give up idle ones of other sizes while there are too many."""
        while True:
            try:
                if len(self._all) >= MAX_SEGMENTS:
                    raise OSError(errno.EMFILE, f"{MAX_SEGMENTS} segments are in use")
                made = create(size)
            except OSError as error:
                with self._lock:
                    if error.errno != errno.EMFILE or not self._idle:
                        raise
                    given_up = self._idle.popleft()
                del given_up  # without the lock: it may take long to unmap it
            else:
                with self._lock:
                    self._all.add(made)
                return made


def few_left(fd: int) -> bool:
    """Whether few descriptors are left; `fd` is a new one, so it has the lowest free number."""
    return fd >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def machine() -> str:
    """Return the boot id of this machine, the same for all containers on it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""  # not on Linux


def here() -> dict[str, str]:
    """Return what processes that share memory have in common; `OSError` if this one cannot."""
    if not sys.platform.startswith("linux"):
        raise OSError(f"{sys.platform} has no memfd")
    create(SMALLEST)
    return {
        "host": machine(),
        "user": str(os.getuid()),
        "network namespace": str(os.stat("/proc/self/ns/net").st_ino),
    }
