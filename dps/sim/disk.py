"""The simulated disk: an fsspec filesystem in memory that fails in the ways that disks do.

Files are seen by all processes. What a process does to it happens at once, but a process may be
made to crash between two of its operations, and what a dead process still tries fails. Each machine
has a cache: what was not synced is lost with the machine's power, the bytes of files and the names
in folders each by themselves.
"""

from __future__ import annotations

import errno
import io
import posixpath
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from dps.sim.process import here

SCHEME = "simdisk"


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of names in a folder that is in a machine's cache, and what was there before.

    `made` is the folder that it made, if it did. A file's content is None where there was no file.
    """

    machine: str
    folder: str
    before: tuple[tuple[str, bytes | None], ...] = ()
    made: str = ""


class SimDisk(AbstractFileSystem):  # type: ignore[misc]
    """The files below `simdisk://<name>`. `fsspec` makes one object for each name.

    Attributes
    ----------
    files
        What is in each file.
    moved
        How many bytes were read and written so far.
    on_write
        Called when a process begins to write a file, with its path.
    may_be_damaged
        Whether the checkpoint that a file belongs to may be damaged, by the file's path.
    """

    protocol = SCHEME
    root_marker = "/"

    def __init__(self, name: str = "", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.erase()

    def erase(self) -> None:
        """Start anew: no files, no faults."""
        self.files: dict[str, bytes] = {}
        self.moved = 0
        self._folders: set[str] = set()
        self._unsynced: dict[str, str] = {}  # files whose bytes are in a machine's cache
        self._changes: list[_Change] = []
        self.on_write: Callable[[str], None] = _ignore
        self.may_be_damaged: Callable[[str], bool] = _always
        self.repair()

    def repair(self) -> None:
        """End every fault; what is broken stays broken."""
        self._full = ""
        self._stuck = ""
        self._torn = ""
        self._crash: tuple[str, int, Callable[[], None]] | None = None

    # -- faults ----------------------------------------------------------------------------------

    def fill(self, part: str) -> None:
        """Have no room for more in paths with `part` in them; "" ends it."""
        self._full = part

    def jam(self, part: str) -> None:
        """Refuse to rename anything in paths with `part` in them; "" ends it."""
        self._stuck = part

    def tear(self, part: str) -> None:
        """Keep only half of a data file in paths with `part` in them, and say nothing.

        It is the next one that may be damaged. "" ends it.
        """
        self._torn = part

    def flip(self, part: str, which: float) -> bool:
        """Flip a bit of a published file; `which`, from 0 to 1, says where. False: there is none.

        It is one of the newest checkpoint (names sort by age), if that may be damaged.
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
        """Have whoever writes in paths with `part` in them crash after so many operations."""
        self._crash = (part, operations, crash)

    def lose_power(self, machine: str, kept: float = 0.0) -> None:
        """Lose what is in a machine's cache; of the changes of names a share was `kept`.

        They reach the disk in their order. A file whose name is there, but not its bytes, is empty.
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
        """Have the bytes of an open file survive a loss of power."""
        _must_live(file.path)
        self._unsynced.pop(file.path, None)

    def sync_folder(self, folder: str) -> None:
        """Have the names in a folder survive a loss of power."""
        folder = self._strip_protocol(folder)
        _must_live(folder)
        machine = _machine()
        self._changes = [
            change
            for change in self._changes
            if (change.machine, change.folder) != (machine, folder)
            # Whoever has synced what is in it has had it from the disk itself.
            and not (change.made == folder and change.machine != machine)
        ]

    def _changing(self, *paths: str) -> None:
        """Take note of what is to be changed in one folder, or between two."""
        before = tuple((path, self.files.get(path)) for path in paths)
        self._changes.append(_Change(_machine(), posixpath.dirname(paths[-1]), before))

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix(f"{SCHEME}://").strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        return {"name": SimDisk._strip_protocol(path).split("/")[1]}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """What lies directly below a path."""
        folder = self._strip_protocol(path)
        if folder in self.files:
            return [self.info(folder)] if detail else [folder]
        inside = [
            p[len(folder) + 1 :].split("/")[0] for p in self.files if p.startswith(f"{folder}/")
        ]
        if not inside and folder not in self._folders:
            raise FileNotFoundError(errno.ENOENT, "no such folder", folder)
        names = [posixpath.join(folder, name) for name in dict.fromkeys(inside)]
        return [self.info(name) for name in names] if detail else names

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """The size and type of a file or folder."""
        path = self._strip_protocol(path)
        if path in self.files:
            return {"name": path, "size": len(self.files[path]), "type": "file"}
        if path in self._folders or any(p.startswith(f"{path}/") for p in self.files):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(errno.ENOENT, "no such file", path)

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Make a folder, and those above it."""
        self.makedirs(path, exist_ok=True)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a folder, and those above it."""
        at, missing = self._strip_protocol(path), []
        while posixpath.dirname(at) != "/" and not self.exists(at):  # the disk's own is there
            missing.append(at)
            at = posixpath.dirname(at)
        for folder in reversed(missing):
            _must_live(folder)
            self._folders.add(folder)
            self._changes.append(_Change(_machine(), posixpath.dirname(folder), made=folder))

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        """The bytes of a file."""
        try:
            found = self.files[self._strip_protocol(path)][start:end]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from None
        self.moved += len(found)
        return found

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Write a file whole."""
        with self._open(path, "wb") as file:
            file.write(value)

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        """Rename a file; what had the new name is replaced."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        self._step(target)
        if self._stuck and self._stuck in target:
            raise OSError(errno.EIO, "the rename failed", target)
        self._changing(source, target)
        self.files[target] = self.files.pop(source)
        self._unsynced.pop(target, None)
        if source in self._unsynced:
            self._unsynced[target] = self._unsynced.pop(source)

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        path = self._strip_protocol(path)
        self._step(path)
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        self._changing(path)
        del self.files[path]

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        path = self._strip_protocol(path)
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        self._step(path)
        self.on_write(path)
        self._changing(path)
        self.files[path] = b""
        self._unsynced[path] = _machine()
        return _Writer(self, path)

    def append(self, path: str, data: bytes) -> None:
        """Take what a writer gives."""
        self._step(path)
        self.moved += len(data)
        torn = self._torn and self._torn in path and ".safetensors" in path
        if torn and self.may_be_damaged(path):
            self._torn, data = "", data[: len(data) // 2]
        if self._full and self._full in path:
            self.files[path] += data[: len(data) // 2]
            raise OSError(errno.ENOSPC, "no space left on device", path)
        self.files[path] += data

    def _step(self, path: str) -> None:
        """One operation that changes something: where a process may be made to crash."""
        if self._crash is not None and self._crash[0] in path:
            part, left, crash = self._crash
            self._crash = (part, left - 1, crash) if left else None
            if not left:
                crash()
        _must_live(path)


class _Writer(io.BytesIO):
    """A file that is being written; what is in it can be read at once."""

    def __init__(self, disk: SimDisk, path: str) -> None:
        super().__init__()
        self._disk = disk
        self.path = path

    def write(self, data: Any) -> int:
        self._disk.append(self.path, bytes(data))
        return len(data)

    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


def _must_live(path: str) -> None:
    process = here.get()
    if process is not None and not process.alive:
        raise OSError(errno.EIO, "the process is gone", path)


def _machine() -> str:
    """The machine of whoever does something now; "" outside of all processes."""
    process = here.get()
    return process.machine if process is not None else ""


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
