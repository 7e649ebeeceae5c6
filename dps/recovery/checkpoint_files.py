"""Checkpoints on disk: writing a shard's state to files, and finding, checking and reading it.

A checkpoint is a safetensors file and a JSON manifest, which holds the state's numbers and a
checksum. The manifest is published last, so a checkpoint is there whole or not at all; one whose
bytes do not match its manifest is skipped. A server that was replaced neither outranks nor removes
what its successor wrote.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import posixpath
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dps.core.shard import Progress, ShardState
from dps.core.tables.table import Level, SparseTable
from dps.errors import CheckpointCorrupt, DpsError, StaleEpoch, StoreUnavailable
from dps.recovery.files import NotAFile, contents, make_folder, publish
from dps.recovery.parts import put_together

FORMAT = 1
PARTIAL = 2  # the format of a part, which names the files that hold the rest

_NAME = re.compile(r"e(\d+)-i(\d+)(?:-c(\d+))?(?:-[0-9a-f]{8})?\.(json|safetensors)(\.\w+\.tmp)?")


@dataclass(frozen=True, slots=True)
class Published:
    """A published checkpoint: the path of its manifest, and the state that it holds.

    `cut` is the number of its consistent cut, if it belongs to one.
    """

    manifest: str
    epoch: int
    index: int
    cut: int | None = None


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
        """Publish a checkpoint and remove those beyond the last `keep`.

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
            The path cannot be written; the earlier checkpoints are still there.
        """
        name = name_of(epoch, state.index) + ("" if cut is None else f"-c{cut:06d}")
        tables = {name: len(table.levels) for name, table in state.tables.items()}
        manifest = {
            "format": FORMAT,
            "file": f"{name}.safetensors",
            **numbers_of(epoch, state),
            "tables": tables,
        }
        return self._put(epoch, name, save(_arrays(state)), manifest, prune=cut is None)

    def _put(
        self, epoch: int, name: str, data: bytes, manifest: dict[str, Any], prune: bool = True
    ) -> int:
        """Publish the data of a checkpoint, then its manifest; return the number of bytes."""
        sealed = json.dumps(_sealed(manifest, data), indent=1).encode()
        try:
            make_folder(self._fs, self._folder)
            self._refuse_if_replaced(epoch)
            publish(self._fs, self._folder, manifest["file"], data)
            publish(self._fs, self._folder, f"{name}.json", sealed)
            if prune:
                self._prune(epoch)
        except DpsError:
            raise
        except Exception as error:
            with suppress(Exception):  # the failure to write is what is raised
                if not self._fs.exists(posixpath.join(self._folder, f"{name}.json")):
                    self._fs.rm(posixpath.join(self._folder, manifest["file"]))
            raise StoreUnavailable(f"checkpoint to {self._folder}: {error}") from error
        return len(data) + len(sealed)

    def _refuse_if_replaced(self, epoch: int) -> None:
        newest = max((number[0] for number in self._files().values()), default=0)
        if newest > epoch:
            raise StaleEpoch(f"checkpoints in {self._folder} are in epoch {newest}, not {epoch}")

    def _prune(self, epoch: int) -> None:
        """Remove what is older than the last `keep`, and what dead writers left there.

        The files of later epochs stay, whatever they are.
        """
        kept = self.published()[: self._keep]
        oldest = min(((f.epoch, f.index) for f in kept), default=(0, 0))
        # By name, the manifest goes first: without it the data file is no checkpoint.
        for path, number in self._files().items():
            if number[:2] < oldest and number[0] <= epoch:
                with suppress(FileNotFoundError):
                    self._fs.rm(path)

    def prune_cuts(self, epoch: int, oldest: int) -> None:
        """Remove the files of cuts before `oldest`; what cannot be removed now stays."""
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

        Raises
        ------
        CheckpointCorrupt
            Its bytes are not whole; an older one may be.
        StoreUnavailable
            The path cannot be read now; the checkpoint may well be whole.
        """
        path = checkpoint.manifest
        try:
            manifest = json.loads(contents(self._fs, path))
            data = contents(self._fs, self.data_of(path, manifest))
            if _sealed(manifest, data) != manifest or manifest["format"] not in (FORMAT, PARTIAL):
                raise CheckpointCorrupt(f"{path}: the data do not match the checksum")
            if manifest["format"] == PARTIAL:
                return self._put_together(manifest, data)
            return _state(manifest, load(data))
        except (ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
            raise CheckpointCorrupt(f"{path}: {error!r}") from error
        except RecursionError as error:
            raise CheckpointCorrupt(f"{path}: it is nested too deeply") from error
        except NotAFile as error:
            raise CheckpointCorrupt(f"{error.filename}: {error.strerror}") from error
        except FileNotFoundError as error:
            if not self._fs.exists(path):
                raise StoreUnavailable(f"{path} was removed meanwhile") from error
            raise CheckpointCorrupt(f"{path}: {error!r}") from error
        except CheckpointCorrupt:
            raise
        except Exception as error:
            raise StoreUnavailable(f"{path}: {error}") from error

    def data_of(self, path: str, manifest: Any) -> str:
        """Return the path of the data file that a manifest names.

        Raises
        ------
        CheckpointCorrupt
            It names none, or one that is not its own: that may be any file, or a folder.
        """
        named = manifest.get("file") if isinstance(manifest, dict) else None
        stem = re.escape(posixpath.basename(path).removesuffix(".json"))
        own = rf"{stem}(-[0-9a-f]{{8}})?\.safetensors"
        if not isinstance(named, str) or not re.fullmatch(own, named):
            raise CheckpointCorrupt(f"{path}: it does not name its data")
        return posixpath.join(self._folder, named)

    def _put_together(self, manifest: dict[str, Any], data: bytes) -> ShardState:
        """Return the state of a part and of the files that its manifest names."""
        arrays: dict[str, dict[str, np.ndarray]] = {}
        for file, digest in manifest["sources"].items():
            of_file = data
            if file != manifest["file"]:
                name = _NAME.fullmatch(file)
                if name is None or (name[4], name[5]) != ("safetensors", None):
                    raise CheckpointCorrupt(f"{self._folder}: {file!r} is no file of a checkpoint")
                of_file = contents(self._fs, posixpath.join(self._folder, file))
            if hashlib.sha256(of_file).hexdigest() != digest:
                raise CheckpointCorrupt(f"{file}: the data do not match the checksum of the part")
            arrays[file] = load(of_file)
        units = {at: _named(f"{at}/", arrays[file]) for at, file in manifest["units"].items()}
        values, slots, tables = put_together(manifest, units)
        results = _named("result/", arrays.get(manifest["file"]) or load(data))
        numbers = manifest["index"], manifest["version"], manifest["steps"]
        return ShardState(*numbers, values, slots, _workers(manifest), tables, results)


def name_of(epoch: int, index: int) -> str:
    """Return what the names of a checkpoint's files begin with."""
    return f"e{epoch:06d}-i{index:012d}"


def numbers_of(epoch: int, state: ShardState) -> dict[str, Any]:
    """Return what every manifest has of a state: its numbers, and how far each worker is."""
    return {
        "epoch": epoch,
        "index": state.index,
        "version": state.version,
        "steps": state.steps,
        "workers": {name: dataclasses.asdict(p) for name, p in state.workers.items()},
    }


def _workers(manifest: dict[str, Any]) -> dict[str, Progress]:
    return {name: Progress(**fields) for name, fields in manifest["workers"].items()}


def _sealed(manifest: dict[str, Any], data: bytes) -> dict[str, Any]:
    """The manifest with the checksum of the data and of its other entries."""
    entries = {key: value for key, value in manifest.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True).encode())
    digest.update(data)
    return {**entries, "sha256": digest.hexdigest()}


def _arrays(state: ShardState) -> dict[str, np.ndarray]:
    """A state's arrays by name; tables by number, as their names could be like another array's."""
    arrays = {"values": state.values, **{f"slot.{k}": v for k, v in state.slots.items()}}
    arrays |= {f"result.{caller}": packed for caller, packed in state.results.items()}
    for table, of_table in enumerate(state.tables.values()):
        for number, level in enumerate(of_table.levels):
            at = f"table.{table}.{number}"
            arrays |= {f"{at}.keys": level.keys, f"{at}.values": level.values}
            arrays |= {f"{at}.slot.{k}": v for k, v in level.slots.items()}
    return arrays


def _state(manifest: dict[str, Any], arrays: dict[str, np.ndarray]) -> ShardState:
    """The state of these `_arrays`."""
    tables = {}
    for table, (name, levels) in enumerate(manifest["tables"].items()):
        places = [f"table.{table}.{number}" for number in range(levels)]
        tables[name] = SparseTable(
            tuple(
                Level(arrays[f"{at}.keys"], arrays[f"{at}.values"], _named(f"{at}.slot.", arrays))
                for at in places
            )
        )
    slots, results = _named("slot.", arrays), _named("result.", arrays)
    numbers = manifest["index"], manifest["version"], manifest["steps"]
    return ShardState(*numbers, arrays["values"], slots, _workers(manifest), tables, results)


def _named(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}
