"""A disk in memory, shared by all virtual nodes: an fsspec filesystem that counts bytes.

Operations of a process take effect at once. Operations of a dead process fail.
"""

from __future__ import annotations

import errno
import io
import posixpath
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem

from dps.virtual.loop import here

SCHEME = "virtualdisk"


class VirtualDisk(AbstractFileSystem):  # type: ignore[misc]
    """The files below `virtualdisk://<name>`. `fsspec` creates one object for each name."""

    protocol = SCHEME
    root_marker = "/"

    def __init__(self, name: str = "", **options: Any) -> None:
        super().__init__(name=name, **options)
        self.erase()

    def erase(self) -> None:
        """Remove all files."""
        self.files: dict[str, bytes] = {}
        self.moved = 0  # bytes read and written so far
        self._folders: set[str] = set()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix(f"{cls.protocol}://").strip("/")

    @classmethod
    def _get_kwargs_from_urls(cls, path: str) -> dict[str, str]:
        return {"name": cls._strip_protocol(path).split("/")[1]}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return the entries directly below a path."""
        folder = self._strip_protocol(path)
        inside = [p.removeprefix(f"{folder}/") for p in self.files if p.startswith(f"{folder}/")]
        names = [posixpath.join(folder, p.split("/")[0]) for p in inside]
        if not names and self.info(folder)["type"] == "file":
            names = [folder]
        return [self.info(p) if detail else p for p in dict.fromkeys(names)]

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return the size and type of a file or folder."""
        path = self._strip_protocol(path)
        if path in self.files:
            return {"name": path, "size": len(self.files[path]), "type": "file"}
        if path in self._folders or any(p.startswith(f"{path}/") for p in self.files):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(errno.ENOENT, "no such file or folder", path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder and its missing parents."""
        folder = self._strip_protocol(path)
        if posixpath.dirname(folder) != "/" and not self.exists(folder):  # the disk's own is there
            self.makedirs(posixpath.dirname(folder))
            self._make(folder)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        """Return the bytes of a file."""
        content = self.files[self._file(path)][start:end]
        self.moved += len(content)
        return content

    def mv(self, path1: str, path2: str, **options: Any) -> None:
        """Rename a file; an existing file of the new name is replaced."""
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        self._change(source, target)
        self.files[target] = self.files.pop(source)

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        path = self._file(path)
        self._change(path)
        del self.files[path]

    def append(self, path: str, data: bytes) -> None:
        """Append data from a writer."""
        must_live(path)
        self.moved += len(data)
        self.files[path] += data

    def _file(self, path: str) -> str:
        path = self._strip_protocol(path)
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return path

    def _open(self, path: str, mode: str = "rb", *args: Any, **options: Any) -> Any:
        if mode == "rb":
            return io.BytesIO(self.cat_file(path))
        path = self._strip_protocol(path)
        self._change(path)
        self.files[path] = b""
        return _Writer(self, path)

    def _make(self, folder: str) -> None:
        must_live(folder)
        self._folders.add(folder)

    def _change(self, *paths: str) -> None:
        """Check that the current process may change the entries at these paths."""
        must_live(paths[-1])


class _Writer(io.BytesIO):
    """A file that is being written; its content can be read at once."""

    def __init__(self, disk: VirtualDisk, path: str) -> None:
        super().__init__()
        self._disk = disk
        self.path = path

    def write(self, data: Any) -> int:
        self._disk.append(self.path, bytes(data))
        return len(data)


def must_live(path: str) -> None:
    """Raise an error if the current process has ended."""
    process = here.get()
    if process is not None and not process.alive:
        raise OSError(errno.EIO, "the process is gone", path)


fsspec.register_implementation(SCHEME, VirtualDisk, clobber=True)
