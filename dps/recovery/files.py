"""Files on any path that fsspec knows: published whole, synced, and read only if regular.

`publish` renames a file into place after its bytes are on the disk, so a reader finds the whole
file or none.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import re
import stat
import uuid
from typing import Any, BinaryIO
from zlib import crc32

import fsspec
from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from dps.core.credentials import holds_secret, masked
from dps.errors import ConfigurationError


class NotAFile(OSError):
    """A path leads to a folder, a device or a pipe."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a local file for reading; raises `NotAFile` without blocking if it is not regular."""
    # Opening a pipe would block until there is a writer, and a device may have no end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        what = "Is a folder" if stat.S_ISDIR(kind) else "Is a device or a pipe"
        raise NotAFile(errno.EINVAL, f"{what}, expected a file", os.fspath(path))
    return open(descriptor, "rb")


def contents(fs: Any, path: str) -> bytes:
    """Return the bytes of a file; raises `NotAFile` for local paths that are no regular file."""
    if not isinstance(fs, LocalFileSystem):
        data: bytes = fs.cat_file(path)
        return data
    with open_regular(path) as file:
        return file.read()


def publish(fs: Any, folder: str, name: str, data: bytes) -> None:
    """Write a file, which then exists whole or not at all."""
    target = posixpath.join(folder, name)
    scratch = f"{target}.{uuid.uuid4().hex}.tmp"
    try:
        with fs.open(scratch, "wb") as file:
            file.write(data)
            file.flush()
            _sync(fs, file)
        fs.mv(scratch, target)
        _sync_folder(fs, folder)
    except Exception:
        if fs.exists(scratch):
            fs.rm(scratch)
        raise


def make_folder(fs: Any, folder: str) -> None:
    """Make a folder and its parents, and sync the name of each that is new."""
    made, at = [], folder
    can_sync = isinstance(fs, LocalFileSystem) or hasattr(fs, "sync_folder")
    while can_sync and at != posixpath.dirname(at) and not fs.exists(at):
        made.append(at)
        at = posixpath.dirname(at)
    fs.makedirs(folder, exist_ok=True)
    for each in made:
        _sync_folder(fs, posixpath.dirname(each))


def absolute(path: str) -> str:
    """Return a path that means the same in every working directory.

    Raises `ConfigurationError` if fsspec does not know its protocol.
    """
    kinds = _kinds(path)
    local = len(kinds) == 1 and issubclass(kinds[0], LocalFileSystem)
    return str(kinds[0]._strip_protocol(path)) if local else path


def in_memory(path: str) -> bool:
    """Whether only the process that writes files there can read them."""
    return any(issubclass(kind, MemoryFileSystem) for kind in _kinds(path))


def shared_path(path: str | None) -> str:
    """Return an absolute checkpoint path; refuse one that nodes cannot share or with a secret."""
    if path is None:
        raise ConfigurationError(
            "checkpoints need a path that all server nodes can reach: use "
            "recovery=Recovery(Checkpoint(path=...))"
        )
    if holds_secret(str(path)):
        raise ConfigurationError(
            f"the checkpoint path {masked(str(path))!r} contains a password, which would be stored "
            "with it: set it in the environment, as fsspec's package documents"
        )
    if in_memory(path):
        raise ConfigurationError(
            f"checkpoints in {path!r} would end with the process that wrote them; use a path that "
            "all server nodes can reach"
        )
    return absolute(path)


def _kinds(path: str) -> list[Any]:
    """The classes of a path's file systems: one, or caches and archives in front of another one."""
    # No file system is instantiated: that may wait for a server that does not answer.
    parts = path.split("::")
    kinds = []
    for part in parts:
        protocol, _ = split_protocol(part)
        if protocol is None:  # in a chain, a single word is the name of a file system
            protocol = part if len(parts) > 1 and part.isascii() and part.isalpha() else "file"
        try:
            kinds.append(fsspec.get_filesystem_class(protocol))
        except (ImportError, ValueError) as error:
            reason = f"checkpoints cannot be written to {path!r}: {error}"
            raise ConfigurationError(reason) from error
    return kinds


# A file system that can write its cache to the disk has `sync_file` and `sync_folder`.


def _sync(fs: Any, file: Any) -> None:
    if hasattr(fs, "sync_file"):
        fs.sync_file(file)
        return
    try:
        descriptor = file.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return  # it is in memory, or on another machine
    os.fsync(descriptor)


def _sync_folder(fs: Any, folder: str) -> None:
    if hasattr(fs, "sync_folder"):
        fs.sync_folder(folder)
    elif isinstance(fs, LocalFileSystem):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sealed(text: str) -> str:
    """Return a JSON object, as text, with a checksum as last key: it detects damage only."""
    return f'{text[:-1]},"crc":"{crc32(text.encode()):08x}"}}'


def unsealed(data: bytes) -> bytes:
    """Return the bytes of a text without its checksum; raises `ValueError` unless it fits."""
    sealed = re.fullmatch(rb'(.+),"crc":"([0-9a-f]{8})"\}', data, re.DOTALL)
    if sealed is None:
        raise ValueError("has no checksum: it was not written by dps, or was cut short")
    text = sealed[1] + b"}"
    if f"{crc32(text):08x}".encode() != sealed[2]:
        raise ValueError("does not match its checksum: it was changed after it was written")
    return text
