"""The simulated disk: a disk in memory that fails like a real one.

All processes see the same files. Operations take effect at once, but a process can be made to crash
between two of its operations, and operations of a dead process fail. Each machine has a cache: data
that was not synced is lost when the machine loses power. File bytes and names in folders are
synced separately.
"""

from __future__ import annotations

import errno
import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fsspec

from dps.virtual.disk import VirtualDisk, must_live
from dps.virtual.loop import here
from tests.simulator.network import Process

SCHEME = "simdisk"


@dataclass(frozen=True, slots=True)
class _Change:
    """A cached change of names in a folder, with the previous content.

    `made` is the created folder, if any. A content of None means that the file did not exist.
    """

    machine: str
    folder: str
    before: tuple[tuple[str, bytes | None], ...] = ()
    made: str = ""


class SimDisk(VirtualDisk):
    """The files below `simdisk://<name>`. `fsspec` creates one object for each name.

    Attributes
    ----------
    on_write
        Called with the path when a process starts to write a file.
    may_be_damaged
        Returns, for a file's path, whether the checkpoint of the file may be damaged.
    """

    protocol = SCHEME

    def erase(self) -> None:
        """Remove all files and faults."""
        super().erase()
        self._unsynced: dict[str, str] = {}  # files whose bytes are in a machine's cache
        self._changes: list[_Change] = []
        self.on_write: Callable[[str], None] = _ignore
        self.may_be_damaged: Callable[[str], bool] = _always
        self.repair()

    def repair(self) -> None:
        """End every fault; existing damage stays."""
        self._full = ""
        self._stuck = ""
        self._torn = ""
        self._crash: tuple[str, int, Callable[[], None]] | None = None

    # -- faults ----------------------------------------------------------------------------------

    def fill(self, part: str) -> None:
        """Fail writes to paths that contain `part` for lack of space; "" ends the fault."""
        self._full = part

    def jam(self, part: str) -> None:
        """Refuse renames in paths that contain `part`; "" ends the fault."""
        self._stuck = part

    def tear(self, part: str) -> None:
        """Silently keep only half of a data file in paths that contain `part`.

        The fault hits the next file that may be damaged. "" ends it.
        """
        self._torn = part

    def flip(self, part: str, which: float) -> bool:
        """Flip a bit of a published file, at position `which` from 0 to 1; return False if none.

        The file is part of the newest checkpoint (names sort by age), if that may be damaged.
        """
        published = sorted(p for p in self.files if part in p and not p.endswith(".tmp"))
        if not published or not self.may_be_damaged(published[-1]):
            return False
        newest = posixpath.splitext(published[-1])[0]
        chosen = [path for path in published if path.startswith(newest)]
        path = chosen[min(int(which * len(chosen)), len(chosen) - 1)]
        content = bytearray(self.files[path])
        if not content:
            return False
        at = int((which * len(chosen) % 1) * len(content))
        content[at] ^= 1 << at % 8
        self.files[path] = bytes(content)
        return True

    def crash_after(self, part: str, operations: int, crash: Callable[[], None]) -> None:
        """Crash the process that writes to paths with `part` in them, after some operations."""
        self._crash = (part, operations, crash)

    def lose_power(self, machine: str, kept: float = 0.0) -> None:
        """Lose the contents of a machine's cache, except the share `kept` of the name changes.

        Name changes reach the disk in order. A file whose name but not its bytes is kept is empty.
        """
        changes = [change for change in self._changes if change.machine == machine]
        for change in reversed(changes[int(kept * (len(changes) + 1)) :]):
            self._undo(change)
        self._changes = [change for change in self._changes if change.machine != machine]
        for path in [path for path, whose in self._unsynced.items() if whose == machine]:
            del self._unsynced[path]
            if path in self.files:
                self.files[path] = b""

    def _undo(self, change: _Change) -> None:
        for path, content in change.before:
            if content is None:
                self.files.pop(path, None)
            else:
                self.files[path] = content
        if change.made:
            self._folders.discard(change.made)
            inside = f"{change.made}/"
            self.files = {p: data for p, data in self.files.items() if not p.startswith(inside)}

    # -- the filesystem ----------------------------------------------------------------------------

    def sync_file(self, file: Any) -> None:
        """Sync the bytes of an open file, so that they survive a loss of power."""
        must_live(file.path)
        self._unsynced.pop(file.path, None)

    def sync_folder(self, folder: str) -> None:
        """Sync the names in a folder, so that they survive a loss of power."""
        folder = self._strip_protocol(folder)
        must_live(folder)
        machine = _machine()
        self._changes = [
            change
            for change in self._changes
            if (change.machine, change.folder) != (machine, folder)
            # Whoever has synced what is in it has had it from the disk itself.
            and not (change.made == folder and change.machine != machine)
        ]

    def _change(self, *paths: str) -> None:
        """Record an upcoming change in one folder or between two."""
        before = tuple((path, self.files.get(path)) for path in paths)
        self._changes.append(_Change(_machine(), posixpath.dirname(paths[-1]), before))

    def _make(self, folder: str) -> None:
        super()._make(folder)
        self._changes.append(_Change(_machine(), posixpath.dirname(folder), made=folder))

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        """Rename a file; an existing file of the new name is replaced."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        self._step(target)
        if self._stuck and self._stuck in target:
            raise OSError(errno.EIO, "the rename failed", target)
        super().mv(path1, path2)
        self._unsynced.pop(target, None)
        if source in self._unsynced:
            self._unsynced[target] = self._unsynced.pop(source)

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self._step(self._strip_protocol(path))
        super().rm_file(path)

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        path = self._strip_protocol(path)
        if mode != "rb":
            self._step(path)
            self.on_write(path)
            self._unsynced[path] = _machine()
        return super()._open(path, mode)

    def append(self, path: str, data: bytes) -> None:
        """Append data from a writer."""
        self._step(path)
        torn = self._torn and self._torn in path and ".safetensors" in path
        if torn and self.may_be_damaged(path):
            self._torn, data = "", data[: len(data) // 2]
        if self._full and self._full in path:
            self.files[path] += data[: len(data) // 2]
            raise OSError(errno.ENOSPC, "no space left on device", path)
        super().append(path, data)

    def _step(self, path: str) -> None:
        """Count a changing operation, at which a process can be made to crash."""
        if self._crash is not None and self._crash[0] in path:
            part, left, crash = self._crash
            self._crash = (part, left - 1, crash) if left else None
            if not left:
                crash()
        must_live(path)


def _machine() -> str:
    """The machine of the current process; "" outside of all processes."""
    process = here.get()
    return process.machine if isinstance(process, Process) else ""


def _ignore(path: str) -> None:
    pass


def _always(path: str) -> bool:
    return True


def disk(name: str) -> SimDisk:
    """The disk of that name, erased."""
    found: SimDisk = fsspec.filesystem(SCHEME, name=name)
    found.erase()
    return found


fsspec.register_implementation(SCHEME, SimDisk, clobber=True)
