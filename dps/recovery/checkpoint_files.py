"""Checkpoints on disk: how a shard's state becomes files and is found and checked again.

A checkpoint is a safetensors file and, beside it, a JSON manifest with its checksum and the state's
numbers. The manifest is renamed into place last, so a checkpoint either is there whole or not at
all; one whose bytes do not match its manifest is passed over. Paths are any that fsspec knows. A
server that has been replaced neither outranks nor touches what its successor wrote.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import posixpath
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import fsspec
import numpy as np
from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dps.core.shard import Progress, ShardState
from dps.core.tables.table import Level, SparseTable
from dps.errors import (
    CheckpointCorrupt,
    ConfigurationError,
    DpsError,
    StaleEpoch,
    StoreUnavailable,
)
from dps.recovery.parts import put_together
from dps.recovery.regular import NotAFile, open_regular

FORMAT = 1
PARTIAL = 2  # of a part, with the names of others

_NAME = re.compile(r"e(\d+)-i(\d+)(?:-c(\d+))?(?:-[0-9a-f]{8})?\.(json|safetensors)(\.\w+\.tmp)?")


@dataclass(frozen=True, slots=True)
class Found:
    """A published checkpoint: where its manifest is, and which state it holds.

    `cut` is the number of the consistent cut that it belongs to, None if to none.
    """

    manifest: str
    epoch: int
    index: int
    cut: int | None = None


@dataclass(frozen=True, slots=True)
class Behind:
    """How far a partial checkpoint's units are behind its `version`: `older` of so many `units`.

    `oldest` is the version of the oldest of them.
    """

    version: int
    oldest: int
    older: int
    units: int


class CheckpointFiles:
    """The checkpoints of one shard below a path.

    Not thread-safe: one writer at a time.
    """

    def __init__(self, path: str, shard: int, keep: int) -> None:
        self._fs, root = fsspec.url_to_fs(path)
        self._folder = posixpath.join(root, f"shard-{shard}")
        self.shard = shard
        self._keep = keep

    def write(self, epoch: int, state: ShardState, cut: int | None = None) -> int:
        """Publish a checkpoint and delete those beyond the last `keep`.

        One of a cut stays until `prune_cuts`: whether it is needed depends on the other shards.

        Returns
        -------
        nbytes
            Bytes written, manifest included.

        Raises
        ------
        StaleEpoch
            A server of a later epoch has written here: this one has been replaced.
        StoreUnavailable
            The path cannot be written; what was there before is still there.
        """
        name = f"e{epoch:06d}-i{state.index:012d}" + ("" if cut is None else f"-c{cut:06d}")
        data = save(_arrays(state))
        return self._put(epoch, name, data, _manifest(name, epoch, state, data), cut is None)

    def _put(
        self, epoch: int, name: str, data: bytes, manifest: dict[str, Any], prune: bool = True
    ) -> int:
        """Publish the data of a checkpoint, then its manifest; return how many bytes they are."""
        sealed = json.dumps(_sealed(manifest, data), indent=1).encode()
        try:
            make_folder(self._fs, self._folder)
            self._refuse_if_replaced(epoch)
            self._publish(manifest["file"], data)
            self._publish(f"{name}.json", sealed)
            if prune:
                self._prune(epoch)
        except DpsError:
            raise
        except Exception as error:
            self._discard(name, manifest["file"])
            raise StoreUnavailable(f"checkpoint to {self._folder}: {error}") from error
        return len(data) + len(sealed)

    def prune_cuts(self, epoch: int, oldest: int) -> None:
        """Remove what belongs to cuts before `oldest`; what cannot be removed now stays."""
        with suppress(Exception):
            for path, (of_epoch, _, cut) in self._files().items():
                if cut is not None and cut < oldest and of_epoch <= epoch:
                    self._fs.rm(path)

    def found(self) -> list[Found]:
        """The published checkpoints, newest first."""
        try:
            files = self._files()
        except Exception as error:
            raise StoreUnavailable(f"checkpoints in {self._folder}: {error}") from error
        published = [Found(p, *number) for p, number in files.items() if p.endswith(".json")]
        return sorted(published, key=lambda f: (f.epoch, f.index), reverse=True)

    def in_writing(self) -> list[str]:
        """The checkpoints of which there is a part, newer than any that is published."""
        files = self._files()
        whole = {(e, i) for path, (e, i, _) in files.items() if path.endswith(".json")}
        newest = max(whole, default=(0, -1))
        parts = {(e, i) for e, i, _ in files.values() if (e, i) > newest}
        return [f"e{epoch:06d}-i{index:012d}" for epoch, index in sorted(parts)]

    def read(self, found: Found) -> ShardState:
        """Return a checkpoint's state.

        Raises
        ------
        CheckpointCorrupt
            Its bytes are not whole; an older one may be.
        StoreUnavailable
            The path cannot be read now; the checkpoint may well be whole.
        """
        try:
            manifest = json.loads(contents(self._fs, found.manifest))
            data = contents(self._fs, self.data_of(found.manifest, manifest))
            if _sealed(manifest, data) != manifest or manifest["format"] not in (FORMAT, PARTIAL):
                raise CheckpointCorrupt(f"{found.manifest}: the data do not match the checksum")
            if manifest["format"] == PARTIAL:
                return self._put_together(manifest, data)
            return _state(manifest, load(data))
        except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
            raise CheckpointCorrupt(f"{found.manifest}: {error!r}") from error
        except RecursionError as error:
            raise CheckpointCorrupt(f"{found.manifest}: it is nested too deeply") from error
        except NotAFile as error:
            raise CheckpointCorrupt(f"{error.filename}: {error.strerror}") from error
        except FileNotFoundError as error:
            if not self._fs.exists(found.manifest):
                raise StoreUnavailable(f"{found.manifest} was removed meanwhile") from error
            raise CheckpointCorrupt(f"{found.manifest}: {error!r}") from error
        except CheckpointCorrupt:
            raise
        except Exception as error:
            raise StoreUnavailable(f"{found.manifest}: {error}") from error

    def data_of(self, path: str, manifest: Any) -> str:
        """The path of the data file that a manifest names.

        Raises
        ------
        CheckpointCorrupt
            It names none, or one that is not its own: that may be any file, or a folder.
        """
        named = manifest.get("file") if isinstance(manifest, dict) else None
        if not isinstance(named, str) or not _is_data_of(path, named):
            raise CheckpointCorrupt(f"{path}: it does not name its data")
        return posixpath.join(self._folder, named)

    def _put_together(self, manifest: dict[str, Any], data: bytes) -> ShardState:
        """Return the state that a part makes with those that its manifest names."""
        arrays: dict[str, dict[str, np.ndarray]] = {}
        for file, digest in manifest["sources"].items():
            of_file = data
            if file != manifest["file"]:
                if not _is_data(file):
                    raise CheckpointCorrupt(f"{self._folder}: {file!r} is no file of a checkpoint")
                of_file = contents(self._fs, posixpath.join(self._folder, file))
            if hashlib.sha256(of_file).hexdigest() != digest:
                raise CheckpointCorrupt(f"{file}: the data do not match the checksum of the part")
            arrays[file] = load(of_file)
        units = {at: _named(f"{at}/", arrays[file]) for at, file in manifest["units"].items()}
        values, slots, tables = put_together(manifest, units)
        results = _named("result/", arrays.get(manifest["file"]) or load(data))
        workers = _workers(manifest)
        numbers = manifest["index"], manifest["version"], manifest["steps"]
        return ShardState(*numbers, values, slots, workers, tables, results)

    def behind(self, found: Found) -> Behind | None:
        """How far the units of a partial checkpoint, which was read, are behind it; else None.

        Raises
        ------
        StoreUnavailable
            It is not there any more.
        """
        try:
            manifest = json.loads(contents(self._fs, found.manifest))
        except Exception as error:
            raise StoreUnavailable(f"{found.manifest}: {error}") from error
        if manifest["format"] != PARTIAL:
            return None
        version, versions = manifest["version"], list(manifest["versions"].values())
        older = sum(of_unit < version for of_unit in versions)
        return Behind(version, min(versions, default=version), older, len(versions))

    def _files(self) -> dict[str, tuple[int, int, int | None]]:
        """Every file of a checkpoint, whole or not, with the epoch, index and cut in its name."""
        self._fs.invalidate_cache(self._folder)  # other processes write here too
        try:
            paths = self._fs.ls(self._folder, detail=False)
        except FileNotFoundError:
            return {}
        named = [(path, _NAME.fullmatch(posixpath.basename(path))) for path in sorted(paths)]
        return {
            path: (int(name[1]), int(name[2]), int(name[3]) if name[3] else None)
            for path, name in named
            if name
        }

    def _refuse_if_replaced(self, epoch: int) -> None:
        newest = max((number[0] for number in self._files().values()), default=0)
        if newest > epoch:
            raise StaleEpoch(f"checkpoints in {self._folder} are in epoch {newest}, not {epoch}")

    def _publish(self, name: str, data: bytes) -> None:
        publish(self._fs, self._folder, name, data)

    def _discard(self, name: str, file: str) -> None:
        """Remove the data of a checkpoint that was not published."""
        with suppress(Exception):  # the failure itself is what is told of
            if not self._fs.exists(posixpath.join(self._folder, f"{name}.json")):
                self._fs.rm(posixpath.join(self._folder, file))

    def _prune(self, epoch: int) -> None:
        """Remove what is older than the last `keep`, also what a writer that died left there.

        What a later epoch wrote is not ours to remove, whatever it is.
        """
        kept = self.found()[: self._keep]
        oldest = min(((f.epoch, f.index) for f in kept), default=(0, 0))
        # By name, the manifest goes first: without it the data file is no checkpoint.
        for path, number in self._files().items():
            if number[:2] < oldest and number[0] <= epoch:
                with suppress(FileNotFoundError):
                    self._fs.rm(path)


def publish(fs: Any, folder: str, name: str, data: bytes) -> None:
    """Have a file there whole, or not at all."""
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


def contents(fs: Any, path: str) -> bytes:
    """Return the bytes of a file; raises `NotAFile` for what is none, on local paths."""
    if not isinstance(fs, LocalFileSystem):
        data: bytes = fs.cat_file(path)
        return data
    with open_regular(path) as file:
        return file.read()


def absolute(path: str) -> str:
    """Return a path that means the same in every working directory.

    Raises
    ------
    ConfigurationError
        It is one of which fsspec knows nothing.
    """
    kinds = _kinds(path)
    local = len(kinds) == 1 and issubclass(kinds[0], LocalFileSystem)
    return str(kinds[0]._strip_protocol(path)) if local else path


def in_memory(path: str) -> bool:
    """Whether files there are seen only by the process that writes them."""
    return any(issubclass(kind, MemoryFileSystem) for kind in _kinds(path))


def _kinds(path: str) -> list[Any]:
    """The file systems of a path: one, or caches and archives in front of another one.

    None is made: that may ask a server that does not answer.
    """
    parts = path.split("::")
    found = []
    for part in parts:
        protocol, _ = split_protocol(part)
        if protocol is None:  # in a chain, a single word is the name of a file system
            protocol = part if len(parts) > 1 and part.isascii() and part.isalpha() else "file"
        try:
            found.append(fsspec.get_filesystem_class(protocol))
        except (ImportError, ValueError) as error:
            reason = f"checkpoints cannot be written to {path!r}: {error}"
            raise ConfigurationError(reason) from error
    return found


@runtime_checkable
class Synced(Protocol):
    """A filesystem with a cache of its own, of which it can be asked to empty a part."""

    def sync_file(self, file: Any) -> None:
        """Return when the bytes of an open file would survive a loss of power."""
        ...

    def sync_folder(self, folder: str) -> None:
        """Return when the names in a folder would."""
        ...


def make_folder(fs: Any, folder: str) -> None:
    """Have a folder there, and the names of all that had to be made reach the disk."""
    made = []
    if _has_cache(fs):
        at = folder
        while at != posixpath.dirname(at) and not fs.exists(at):
            made.append(at)
            at = posixpath.dirname(at)
    fs.makedirs(folder, exist_ok=True)
    for each in made:
        _sync_folder(fs, posixpath.dirname(each))


def _has_cache(fs: Any) -> bool:
    return isinstance(fs, LocalFileSystem | Synced)


def _sync(fs: Any, file: Any) -> None:
    """Have the bytes reach the disk, if that is where the file is."""
    if isinstance(fs, Synced):
        fs.sync_file(file)
        return
    try:
        descriptor = file.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return  # it is in memory, or on another machine
    os.fsync(descriptor)


def _sync_folder(fs: Any, folder: str) -> None:
    """Have the names in a folder reach the disk, if that is where it is."""
    if isinstance(fs, Synced):
        fs.sync_folder(folder)
    elif isinstance(fs, LocalFileSystem):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _manifest(name: str, epoch: int, state: ShardState, data: bytes) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "file": f"{name}.safetensors",
        "nbytes": len(data),
        "epoch": epoch,
        "index": state.index,
        "version": state.version,
        "steps": state.steps,
        "workers": {name: dataclasses.asdict(p) for name, p in state.workers.items()},
        "tables": {name: len(table.levels) for name, table in state.tables.items()},
    }


def _arrays(state: ShardState) -> dict[str, np.ndarray]:
    arrays = {"values": state.values, **{f"slot.{k}": v for k, v in state.slots.items()}}
    arrays |= {f"result.{caller}": packed for caller, packed in state.results.items()}
    for table, of_table in enumerate(state.tables.values()):
        for number, level in enumerate(of_table.levels):
            at = _level(table, number)
            arrays |= {f"{at}.keys": level.keys, f"{at}.values": level.values}
            arrays |= {f"{at}.slot.{k}": v for k, v in level.slots.items()}
    return arrays


def _level(table: int, number: int) -> str:
    """What the arrays of a table's level are called; a name of the user's might be mistaken."""
    return f"table.{table}.{number}"


def _sealed(manifest: dict[str, Any], data: bytes) -> dict[str, Any]:
    """The manifest with the checksum of the data and of all that it says itself."""
    said = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    digest.update(data)
    return {**said, "sha256": digest.hexdigest()}


def _is_data_of(manifest: str, named: str) -> bool:
    """Whether a name is that of a manifest's own data file."""
    stem = posixpath.basename(manifest).removesuffix(".json")
    pattern = rf"{re.escape(stem)}(-[0-9a-f]{{8}})?\.safetensors"
    return re.fullmatch(pattern, named) is not None


def _is_data(named: str) -> bool:
    """Whether a name is that of the data file of a checkpoint."""
    found = _NAME.fullmatch(named)
    return found is not None and (found[4], found[5]) == ("safetensors", None)


def _workers(manifest: dict[str, Any]) -> dict[str, Progress]:
    return {name: Progress(**fields) for name, fields in manifest["workers"].items()}


def _state(manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> ShardState:
    workers = _workers(manifest)
    return ShardState(
        manifest["index"],
        manifest["version"],
        manifest["steps"],
        arrays["values"],
        _named("slot.", arrays),
        workers,
        {
            name: _table(number, levels, arrays)
            for number, (name, levels) in enumerate(manifest["tables"].items())
        },
        _named("result.", arrays),
    )


def _named(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def _table(table: int, levels: int, arrays: dict[str, np.ndarray]) -> SparseTable:
    places = [_level(table, number) for number in range(levels)]
    return SparseTable(
        tuple(
            Level(arrays[f"{at}.keys"], arrays[f"{at}.values"], _named(f"{at}.slot.", arrays))
            for at in places
        )
    )
