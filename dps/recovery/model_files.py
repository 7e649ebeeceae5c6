"""Saved models: what `ParameterServer.save` writes and `dps.load` reads, without a cluster.

A saved model is a folder with one safetensors file for each shard and a manifest, which has the
place of each array and table and the checksum of every file. The manifest is published last and
names its files, so a folder that is saved to again holds the old model or the new one, whole,
whenever saving ends.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import Any

import fsspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from dps.core.arguments import as_path
from dps.core.blocks import DTYPES, Layout
from dps.core.ranges import listed
from dps.core.tables.key_routing import checked_rows
from dps.core.tables.table import Given, Level, Normal, SparseSpec, Uniform, Zeros, partitions_of
from dps.errors import CheckpointCorrupt, ConfigurationError, DpsError, StoreUnavailable
from dps.recovery.files import NotAFile, contents, make_folder, publish, sealed, unsealed

MANIFEST = "model.json"
FORMAT = 1

Path = str | PathLike[str]
_Rows = Mapping[str, tuple[np.ndarray, np.ndarray]]
_DRAWN: dict[str, type[Zeros | Uniform | Normal]] = {
    cls.__name__: cls for cls in (Zeros, Uniform, Normal)
}


class Model(Mapping[str, np.ndarray]):
    """Saved weights: a mapping of names to arrays, and the sparse tables.

    Start a group from it with ``ParameterServer(client, model, tables=model.tables)``.

    Attributes
    ----------
    tables
        The sparse tables; each starts with its saved rows, `spec.initial.rows` under
        `spec.initial.keys`.
    versions
        How many updates each shard had applied.
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        tables: Sequence[SparseSpec] = (),
        versions: Sequence[int] = (),
    ) -> None:
        self._arrays = dict(arrays)
        self.tables = tuple(tables)
        self.versions = tuple(versions)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __repr__(self) -> str:
        arrays = [f"{n}: {a.dtype}{list(a.shape)}" for n, a in self._arrays.items()]
        tables = [
            f"{spec.name}: {len(self.rows(spec.name)[0]):,} rows of {spec.width}"
            for spec in self.tables
            if isinstance(spec.initial, Given)
        ]
        return f"<Model {listed([*arrays, *tables])}>"

    def rows(self, table: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of a table, sorted, and the row of each; `KeyError`: there is none."""
        for spec in self.tables:
            if spec.name == table and isinstance(spec.initial, Given):
                keys, values = spec.initial.keys, spec.initial.rows
                assert isinstance(keys, np.ndarray)
                assert isinstance(values, np.ndarray)
                return keys, values
        raise KeyError(table)


def save(
    path: Path,
    layout: Layout,
    arrays: Mapping[str, np.ndarray],
    rows: _Rows,
    versions: Sequence[int],
) -> None:
    """Write a model; an earlier one stays in the folder until all of it is written.

    Parameters
    ----------
    arrays
        All arrays of the layout.
    rows
        For each table its keys, int64 and sorted, and their rows.
    versions
        The version of each shard.

    Raises
    ------
    StoreUnavailable
        It cannot be written. An earlier model there is whole.
    ConfigurationError
        fsspec does not know the path's protocol, or the folder has another kind of manifest.
    """
    path = as_path("path", path)
    try:
        fs, folder = fsspec.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise ConfigurationError(f"save: {path}: {error}") from error
    written: list[str] = []
    try:
        make_folder(fs, folder)
        before = _files_of(fs, folder)
        files = []
        for shard, tensors, parts in _parts(layout, arrays, rows):
            name = f"shard-{shard}-{uuid.uuid4().hex[:8]}.safetensors"
            data = save_tensors(tensors)
            written.append(name)
            publish(fs, folder, name, data)
            digest = hashlib.sha256(data).hexdigest()
            files.append({"file": name, "sha256": digest, "version": versions[shard], **parts})
        manifest = {
            "format": FORMAT,
            "arrays": [[spec.name, list(spec.shape), spec.dtype] for spec in layout.arrays],
            "tables": [_table(spec) for spec in layout.tables],
            "files": files,
        }
        publish(fs, folder, MANIFEST, sealed(json.dumps(manifest, separators=(",", ":"))).encode())
    except Exception as error:
        for name in written:
            with suppress(Exception):  # the failure to write is what is raised
                fs.rm(posixpath.join(folder, name))
        if isinstance(error, DpsError):
            raise
        raise StoreUnavailable(f"save to {path}: {error}") from error
    for name in before:
        with suppress(Exception):  # files without a manifest do no harm
            fs.rm(posixpath.join(folder, name))


def _files_of(fs: Any, folder: str) -> list[str]:
    """The files of the model that is in the folder already."""
    path = posixpath.join(folder, MANIFEST)
    if not fs.exists(path):
        return []
    try:
        manifest = json.loads(unsealed(contents(fs, path)))
        return [str(entry["file"]) for entry in manifest["files"] if _is_name(entry["file"])]
    except (ValueError, LookupError, TypeError, NotAFile) as error:
        raise ConfigurationError(
            f"{path} is no manifest of a saved model ({error!r}): give another folder, or remove it"
        ) from error


def _parts(
    layout: Layout, arrays: Mapping[str, np.ndarray], rows: _Rows
) -> Iterator[tuple[int, dict[str, np.ndarray], dict[str, Any]]]:
    """For each shard its tensors by name, and their entries in the manifest."""
    homes = {
        table: np.array(layout.homes, np.int64)[partitions_of(keys)]
        for table, (keys, _) in rows.items()
    }
    for shard, laid_out in enumerate(layout.shards):
        tensors: dict[str, np.ndarray] = {}
        blocks, of_tables = [], []
        for block in (piece.block for piece in laid_out.joined):
            array = arrays[block.name]
            whole = block.start == 0 and block.stop == array.size
            name = block.name if whole else f"{block.name}[{block.start}:{block.stop}]"
            name = _unused(name, tensors)
            part = array if whole else array.reshape(-1)[block.start : block.stop]
            tensors[name] = np.ascontiguousarray(part)
            blocks.append([name, block.name, block.start, block.stop])
        for table, (keys, values) in rows.items():
            here = homes[table] == shard
            at = _unused(f"{table}.keys", tensors), _unused(f"{table}.rows", tensors)
            tensors |= {at[0]: keys[here], at[1]: np.ascontiguousarray(values[here])}
            of_tables.append([*at, table])
        yield shard, tensors, {"blocks": blocks, "rows": of_tables}


def _unused(name: str, tensors: Mapping[str, Any]) -> str:
    """A name that no tensor has: a user's name may be like one that is made here."""
    while name in tensors or name == "__metadata__":
        name += "_"
    return name


def _table(spec: SparseSpec) -> dict[str, Any]:
    drawn = spec.initial
    names = [name for name in ("limit", "std", "seed") if hasattr(drawn, name)]
    kind = {"kind": type(drawn).__name__, **{name: getattr(drawn, name) for name in names}}
    return {"name": spec.name, "width": spec.width, "dtype": spec.dtype, "initial": kind}


def load(path: Path) -> Model:
    """Read weights that `ParameterServer.save` has written; no cluster is needed.

    Parameters
    ----------
    path
        The folder, as any path that fsspec knows.

    Raises
    ------
    StoreUnavailable
        There is no saved model, or it cannot be read.
    CheckpointCorrupt
        A file is damaged, or missing; the message says which.
    """
    path = as_path("path", path)
    try:
        fs, folder = fsspec.url_to_fs(path)
        if not fs.exists(posixpath.join(folder, MANIFEST)):
            raise StoreUnavailable(
                f"{path}: no saved model ({MANIFEST} is not there); ParameterServer.save makes "
                "one, and ParameterServer.resume resumes from checkpoints"
            )
        data = contents(fs, posixpath.join(folder, MANIFEST))
    except DpsError:
        raise
    except Exception as error:
        raise StoreUnavailable(f"{path}: {error}") from error
    try:
        return _read(fs, folder, json.loads(unsealed(data)))
    except (ValueError, LookupError, TypeError, AttributeError, DpsError) as error:
        if isinstance(error, CheckpointCorrupt | StoreUnavailable):
            raise
        raise CheckpointCorrupt(f"{path}: {MANIFEST} is damaged: {error}") from error


def _read(fs: Any, folder: str, manifest: dict[str, Any]) -> Model:
    if manifest["format"] != FORMAT:
        raise StoreUnavailable(
            f"{folder}: a model of format {manifest['format']!r}, of another version of dps"
        )
    arrays, missing = {}, {}
    for name, shape, dtype in manifest["arrays"]:
        if dtype not in DTYPES:
            raise CheckpointCorrupt(f"{folder}: {name!r} is {dtype}")
        arrays[name] = np.empty(tuple(shape), dtype)
        missing[name] = arrays[name].size
    parts: dict[str, list[Level]] = {table["name"]: [] for table in manifest["tables"]}
    for entry in manifest["files"]:
        tensors = _tensors(fs, folder, entry)
        for tensor, name, start, stop in entry["blocks"]:
            arrays[name].reshape(-1)[start:stop] = tensors[tensor].reshape(-1)
            missing[name] -= stop - start
        for keys, values, table in entry["rows"]:
            parts[table].append(Level(tensors[keys], tensors[values]))
    if left := [name for name, elements in missing.items() if elements]:
        raise CheckpointCorrupt(f"{folder}: not all of {left[0]!r} is there")
    tables = [_with_rows(table, parts[table["name"]]) for table in manifest["tables"]]
    return Model(arrays, tables, [entry["version"] for entry in manifest["files"]])


def _tensors(fs: Any, folder: str, entry: Mapping[str, Any]) -> dict[str, np.ndarray]:
    name = entry["file"]
    if not _is_name(name):
        raise CheckpointCorrupt(f"{folder}: {name!r} is no name of a file")
    at = posixpath.join(folder, name)
    try:
        data = contents(fs, at)
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{at} is missing") from error
    except NotAFile as error:
        raise CheckpointCorrupt(f"{at}: {error.strerror}") from error
    except OSError as error:
        raise StoreUnavailable(f"{at}: {error}") from error
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise CheckpointCorrupt(f"{at} is damaged: its bytes do not match the checksum")
    try:
        return load_tensors(data)
    except SafetensorError as error:
        raise CheckpointCorrupt(f"{at}: {error}") from error


def _is_name(name: object) -> bool:
    return isinstance(name, str) and posixpath.basename(name) == name and name.startswith("shard-")


def _with_rows(table: Mapping[str, Any], parts: Sequence[Level]) -> SparseSpec:
    settings = dict(table["initial"])
    otherwise = _DRAWN[settings.pop("kind")](**settings)
    spec = SparseSpec(table["name"], table["width"], table["dtype"], otherwise)
    keys = np.concatenate([part.keys for part in parts])
    rows = checked_rows(spec, np.concatenate([part.values for part in parts]), keys)
    return SparseSpec(spec.name, spec.width, spec.dtype, Given(rows.values, rows.keys, otherwise))
