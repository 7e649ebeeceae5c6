"""Checkpoints on disk: writing a shard's state to files, and finding, checking and reading it.

A checkpoint is a safetensors file with *units* of the state (a block of the buffer or rows of a
table, with their optimizer state) and a JSON manifest. The manifest holds the state's counters, the
file of each unit, and the checksums of every file and of itself. A whole checkpoint has all units
in its own file; a partial one has some of them (`dps.recovery.partial`). The manifest is published
last, so a checkpoint exists whole or not at all; one whose bytes do not match its manifest is
skipped. A replaced server cannot outrank or remove the checkpoints of its successor.
"""

from __future__ import annotations

import dataclasses
import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import fsspec
import numpy as np
from safetensors.numpy import load, save

from dps.core.leases import Applied
from dps.core.shard import Progress, ShardState
from dps.core.tables.table import Level, SparseTable
from dps.errors import CheckpointCorrupt, DpsError, StaleEpoch, StoreUnavailable
from dps.recovery.files import NotAFile, contents, make_folder, publish, sealed, unsealed

FORMAT = 4

_NAME = re.compile(r"e(\d+)-i(\d+)(?:-c(\d+))?(?:-[0-9a-f]{8})?\.(json|safetensors)(\.\w+\.tmp)?")

# The arrays of a unit: `values`, `slot.<name>` and, for rows, `keys`.
Unit = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Published:
    """A published checkpoint: the path of its manifest, and its state's epoch and index."""

    manifest: str
    epoch: int
    index: int
    cut: int | None = None  # the number of its consistent cut, if it belongs to one


@dataclass(frozen=True, slots=True)
class Copy:
    """A saved copy of a unit: its file with the checksum, and the state's version."""

    file: str
    sha256: str
    version: int


class CheckpointFiles:
    """The checkpoints of one shard below a path; one write at a time in each epoch."""

    def __init__(self, path: str, shard: int, keep: int) -> None:
        self._fs, root = fsspec.url_to_fs(path)
        self._folder = posixpath.join(root, f"shard-{shard}")
        self.shard = shard
        self._keep = keep

    def write(self, epoch: int, state: ShardState, cut: int | None = None) -> int:
        """Publish a checkpoint and remove those beyond the last `keep`; return the bytes written.

        A checkpoint of a `cut` stays until `prune_cuts`, as other shards may need that cut. Raises
        `StaleEpoch` if a server of a later epoch has written here, and `StoreUnavailable` if the
        path cannot be written; the earlier checkpoints are still there.
        """
        name = name_of(epoch, state.index) + ("" if cut is None else f"-c{cut:06d}")
        units = whole_units(state)
        data = packed(units, state)
        own = Copy(f"{name}.safetensors", digest_of(data), state.version)
        manifest = manifest_of(epoch, state, own, dict.fromkeys(units, own))
        return self._put(epoch, name, data, manifest, prune=cut is None)

    def _put(
        self, epoch: int, name: str, data: bytes, manifest: dict[str, Any], prune: bool = True
    ) -> int:
        """Publish the data of a checkpoint, then its manifest; return the number of bytes."""
        text = sealed(json.dumps(manifest)).encode()
        try:
            make_folder(self._fs, self._folder)
            self._refuse_if_replaced(epoch)
            publish(self._fs, self._folder, manifest["file"], data)
            publish(self._fs, self._folder, f"{name}.json", text)
            if prune:
                self._prune(epoch)
        except DpsError:
            raise
        except Exception as error:
            with suppress(Exception):  # the failure to write is raised instead
                if not self._fs.exists(posixpath.join(self._folder, f"{name}.json")):
                    self._fs.rm(posixpath.join(self._folder, manifest["file"]))
            raise StoreUnavailable(f"checkpoint to {self._folder}: {error}") from error
        return len(data) + len(text)

    def _refuse_if_replaced(self, epoch: int) -> None:
        newest = max((number[0] for number in self._files().values()), default=0)
        if newest > epoch:
            raise StaleEpoch(f"checkpoints in {self._folder} are in epoch {newest}, not {epoch}")

    def _prune(self, epoch: int) -> None:
        """Remove files older than the last `keep` checkpoints, also those of dead writers."""
        kept = self.published()[: self._keep]
        oldest = min(((f.epoch, f.index) for f in kept), default=(0, 0))
        # In order of names, the manifest goes first: a data file alone is no checkpoint.
        for path, number in self._files().items():
            if number[:2] < oldest and number[0] <= epoch:
                with suppress(FileNotFoundError):
                    self._fs.rm(path)

    def prune_cuts(self, epoch: int, oldest: int) -> None:
        """Remove the files of cuts before `oldest`; keep files that cannot be removed now."""
        with suppress(Exception):
            for path, (of_epoch, _, cut) in self._files().items():
                if cut is not None and cut < oldest and of_epoch <= epoch:
                    self._fs.rm(path)

    def published(self) -> list[Published]:
        """Return the published checkpoints, newest first."""
        try:
            files = self._files()
        except Exception as error:
            raise StoreUnavailable(f"checkpoints in {self._folder}: {error}") from error
        published = [Published(p, *number) for p, number in files.items() if p.endswith(".json")]
        return sorted(published, key=lambda f: (f.epoch, f.index), reverse=True)

    def in_writing(self) -> list[str]:
        """Return the names of unfinished checkpoints that are newer than all published ones."""
        files = self._files()
        whole = {(e, i) for path, (e, i, _) in files.items() if path.endswith(".json")}
        newest = max(whole, default=(0, -1))
        return [name_of(*at) for at in sorted({n[:2] for n in files.values() if n[:2] > newest})]

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

    def read(self, checkpoint: Published) -> ShardState:
        """Return a checkpoint's state.

        Raises `CheckpointCorrupt` if it is damaged, and `StoreUnavailable` if the path cannot be
        read now.
        """
        manifest = self.manifest(checkpoint)
        with self._reading(checkpoint.manifest):
            arrays = {}
            for file, digest in manifest["sources"].items():
                data = contents(self._fs, self._path(file))
                if digest_of(data) != digest:
                    wrong = f"the data in {file} do not match the checksum"
                    raise CheckpointCorrupt(f"{checkpoint.manifest}: {wrong}")
                arrays[file] = load(data)
            return self._assembled(manifest, arrays)

    def manifest(self, checkpoint: Published) -> dict[str, Any]:
        """Return the manifest of a checkpoint; errors as for `read`."""
        with self._reading(checkpoint.manifest):
            text = unsealed(contents(self._fs, checkpoint.manifest))
            manifest: dict[str, Any] = json.loads(text)
            if manifest["format"] != FORMAT:
                raise ValueError(f"of format {manifest['format']}, of another version of dps")
            return manifest

    def data_of(self, checkpoint: Published) -> str:
        """Return the path of a checkpoint's own data file; errors as for `read`."""
        return self._path(self.manifest(checkpoint)["file"])

    def _path(self, file: str) -> str:
        """The path of a data file that a manifest names; refuses files of other folders."""
        name = _NAME.fullmatch(file)
        if name is None or (name[4], name[5]) != ("safetensors", None):
            raise CheckpointCorrupt(f"{self._folder}: {file!r} is not a file of a checkpoint")
        return posixpath.join(self._folder, file)

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """Turn errors while the checkpoint of this manifest is read into those of `read`."""
        try:
            yield
        except DpsError:
            raise
        except (ValueError, LookupError, TypeError) as error:
            raise CheckpointCorrupt(f"{path}: {error!r}") from error
        except NotAFile as error:
            raise CheckpointCorrupt(f"{error.filename}: {error.strerror}") from error
        except FileNotFoundError as error:
            if not self._fs.exists(path):
                raise StoreUnavailable(f"{path} was removed during the read") from error
            raise CheckpointCorrupt(f"{path}: {error!r}") from error
        except Exception as error:
            raise StoreUnavailable(f"{path}: {error}") from error

    def _assembled(self, manifest: dict[str, Any], arrays: dict[str, Unit]) -> ShardState:
        values = np.zeros(manifest["size"], np.uint8)
        slots = {name: np.zeros_like(values) for name in manifest["slots"]}
        levels: dict[int, list[Level]] = {number: [] for number, _ in manifest["tables"]}
        pages: dict[int, list[Unit]] = {}
        for name, file in manifest["units"].items():
            unit = _named(f"{name}/", arrays[file])
            kind, place = name.split(".")[0], int(name.split(".")[1])
            if kind == "level":
                levels[place].append(_level(unit))
            elif kind == "page":
                pages.setdefault(place, []).append(unit)
            else:
                at = slice(place, place + unit["values"].nbytes)
                values[at] = unit["values"].view(np.uint8)
                for slot, buffer in slots.items():
                    buffer[at] = unit[f"slot.{slot}"].view(np.uint8)
        for place, units in pages.items():
            joined = {name: np.concatenate([unit[name] for unit in units]) for name in units[0]}
            order = np.argsort(joined["keys"], kind="stable")
            levels[place].append(_level({name: array[order] for name, array in joined.items()}))
        index, version, steps = (manifest[name] for name in ("index", "version", "steps"))
        workers = {name: Progress(**fields) for name, fields in manifest["workers"].items()}
        tables = {name: SparseTable(tuple(levels[number])) for number, name in manifest["tables"]}
        results = _named("result/", arrays[manifest["file"]])
        batches = {
            epoch: Applied(below, bytes.fromhex(bits))
            for epoch, (below, bits) in manifest["batches"].items()
        }
        return ShardState(index, version, steps, values, slots, workers, tables, results, batches)


def name_of(epoch: int, index: int) -> str:
    """Return the prefix of the names of a checkpoint's files."""
    return f"e{epoch:06d}-i{index:012d}"


def digest_of(data: bytes) -> str:
    """Return the checksum of a data file."""
    return sha256(data).hexdigest()


def whole_units(state: ShardState) -> dict[str, Unit]:
    """Return the units of a whole checkpoint: the buffer, and each level of the tables."""
    units = {"block.0": unit_of(state.values, state.slots)}
    for number, table in enumerate(state.tables.values()):
        for place, level in enumerate(table.levels):
            units[f"level.{number}.{place}"] = unit_of(level.values, level.slots, level.keys)
    return units


def unit_of(
    values: np.ndarray, slots: Mapping[str, np.ndarray], keys: np.ndarray | None = None
) -> Unit:
    """Return a unit with the arrays of a block or, with `keys`, of rows."""
    unit = {"values": values, **{f"slot.{name}": slot for name, slot in slots.items()}}
    return unit if keys is None else {"keys": keys, **unit}


def packed(units: Mapping[str, Unit], state: ShardState) -> bytes:
    """Return the bytes of a data file: some units, and the results of calls in the state."""
    arrays = {f"{at}/{name}": array for at, unit in units.items() for name, array in unit.items()}
    return save(arrays | {f"result/{caller}": result for caller, result in state.results.items()})


def manifest_of(
    epoch: int,
    state: ShardState,
    own: Copy,
    copies: Mapping[str, Copy],
    tables: Sequence[tuple[int, str]] | None = None,  # with their numbers; None: in order
) -> dict[str, Any]:
    """Return the manifest of a checkpoint with its own data file and the copy of each unit."""
    return {
        "format": FORMAT,
        "file": own.file,
        "epoch": epoch,
        "index": state.index,
        "version": state.version,
        "steps": state.steps,
        "workers": {name: dataclasses.asdict(p) for name, p in state.workers.items()},
        "batches": {epoch: (below, bits.hex()) for epoch, (below, bits) in state.batches.items()},
        "size": state.values.nbytes,
        "slots": list(state.slots),
        "tables": list(enumerate(state.tables)) if tables is None else tables,
        "units": {at: copy.file for at, copy in copies.items()},
        "versions": {at: copy.version for at, copy in copies.items()},
        "sources": {copy.file: copy.sha256 for copy in (own, *copies.values())},
    }


def _level(unit: Unit) -> Level:
    return Level(unit["keys"], unit["values"], _named("slot.", unit))


def _named(prefix: str, arrays: Unit) -> Unit:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
