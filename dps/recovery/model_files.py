"""Saved models: what `ParameterServer.save` writes and `dps.load` reads, without a cluster.

A saved model is a folder with one safetensors file for each shard and a manifest, which has the
layout, the names of the files and their checksums. The manifest is published last, so a folder that
is saved to again holds either the old or the new model, whole, even if saving is interrupted.
"""

from __future__ import annotations

import math
import posixpath
import re
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import fsspec
import numpy as np
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from dps.core.arguments import as_path
from dps.core.blocks import Block, Layout
from dps.core.ranges import listed
from dps.core.tables.key_routing import checked_rows
from dps.core.tables.table import Given, SparseSpec, partitions_of
from dps.errors import CheckpointCorrupt, ConfigurationError, DpsError, StoreUnavailable
from dps.protocol.wire import message
from dps.recovery.checkpoint_files import digest_of
from dps.recovery.files import NotAFile, contents, make_folder, publish
from dps.recovery.manifest import as_text, from_text

MANIFEST = "model.json"
_NAME = re.compile(r"shard-[\w.-]+")

Path = str | PathLike[str]
_Rows = Mapping[str, tuple[np.ndarray, np.ndarray]]


@message
@dataclass(frozen=True, slots=True)
class SavedModel:
    """The manifest: the layout and, for each shard, the version, the file and its SHA-256."""

    layout: Layout
    files: tuple[str, ...]
    digests: tuple[str, ...]
    versions: tuple[int, ...]

    def __post_init__(self) -> None:
        if not all(map(_NAME.fullmatch, self.files)):
            raise ValueError("it names files that are not of a saved model")
        if not len(self.files) == len(self.digests) == len(self.layout.shards):
            raise ValueError("expected one file for each shard")


class Model(dict[str, np.ndarray]):
    """Saved weights: a mapping of names to arrays, and the sparse tables.

    Start a group from it with ``ParameterServer(client, model, tables=model.tables)``.

    Attributes
    ----------
    tables
        The sparse tables; each starts with its saved rows, `spec.initial.rows` under
        `spec.initial.keys`.
    versions
        How many updates each shard had applied.

    Examples
    --------
    >>> from dps.testing import VirtualCluster
    >>> with VirtualCluster() as cluster, ParameterServer(cluster, {"w": np.ones(2)}) as ps:
    ...     ps.save("memory://model")
    >>> load("memory://model")["w"]
    array([1., 1.])
    """

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        tables: tuple[SparseSpec, ...],
        versions: tuple[int, ...],
    ) -> None:
        super().__init__(arrays)
        self.tables = tables
        self.versions = versions

    def __repr__(self) -> str:
        arrays = [f"{n}: {a.dtype}{list(a.shape)}" for n, a in self.items()]
        tables = [
            f"{spec.name}: {len(self.rows(spec.name)[0]):,} rows of {spec.width}"
            for spec in self.tables
        ]
        return f"<Model {listed([*arrays, *tables])}>"

    def rows(self, table: str) -> tuple[np.ndarray, np.ndarray]:
        """Return a table's sorted keys and their rows; raises `KeyError` without such a table."""
        initial = {spec.name: spec.initial for spec in self.tables}[table]
        assert isinstance(initial, Given)
        return np.asarray(initial.keys), np.asarray(initial.rows)


def save(
    path: Path,
    layout: Layout,
    arrays: Mapping[str, np.ndarray],
    rows: _Rows,
    versions: Sequence[int],
) -> None:
    """Write a model; an earlier one stays in the folder until all of it is written.

    `rows` has each table's keys, int64 and sorted, and their rows; `versions` those of the shards.
    Errors as for `ParameterServer.save`.
    """
    path = as_path("path", path)
    try:
        fs, folder = fsspec.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise ConfigurationError(f"save: {path}: {error}") from error
    written: list[str] = []
    digests = []
    try:
        make_folder(fs, folder)
        before = _files_of(fs, folder)
        for shard in range(len(layout.shards)):
            data = save_tensors(_tensors_of(layout, shard, arrays, rows))
            written.append(f"shard-{shard}-{uuid.uuid4().hex[:8]}.safetensors")
            publish(fs, folder, written[-1], data)
            digests.append(digest_of(data))
        saved = SavedModel(layout, tuple(written), tuple(digests), tuple(versions))
        publish(fs, folder, MANIFEST, as_text(saved))
    except Exception as error:
        _remove(fs, folder, written)
        if isinstance(error, DpsError):
            raise
        raise StoreUnavailable(f"save to {path}: {error}") from error
    _remove(fs, folder, before)


def _files_of(fs: Any, folder: str) -> tuple[str, ...]:
    path = posixpath.join(folder, MANIFEST)
    if not fs.exists(path):
        return ()
    try:
        return from_text(contents(fs, path), path, SavedModel).files
    except (CheckpointCorrupt, NotAFile) as error:
        raise ConfigurationError(
            f"{path} is not the manifest of a saved model: choose another folder, or remove it"
        ) from error


def _remove(fs: Any, folder: str, names: Sequence[str]) -> None:
    for name in names:
        with suppress(Exception):  # files without a manifest do no harm
            fs.rm(posixpath.join(folder, name))


def _tensors_of(
    layout: Layout, shard: int, arrays: Mapping[str, np.ndarray], rows: _Rows
) -> dict[str, np.ndarray]:
    blocks, tables = _names(layout, shard)
    tensors = {}
    for tensor, block in blocks:
        array = arrays[block.name]
        whole = block.start == 0 and block.stop == array.size
        part = array if whole else array.reshape(-1)[block.start : block.stop]
        tensors[tensor] = np.ascontiguousarray(part)
    for table, (keys_at, rows_at) in tables.items():
        keys, values = rows[table]
        here = np.array(layout.homes, np.int64)[partitions_of(keys)] == shard
        tensors |= {keys_at: keys[here], rows_at: np.ascontiguousarray(values[here])}
    return tensors


def _names(
    layout: Layout, shard: int
) -> tuple[list[tuple[str, Block]], dict[str, tuple[str, str]]]:
    """The names of a shard's tensors: of its blocks, and of each table's keys and rows."""
    sizes = {spec.name: math.prod(spec.shape) for spec in layout.arrays}
    taken = {"__metadata__"}

    def unused(name: str) -> str:
        while name in taken:  # a user's name may equal one that is made here
            name += "_"
        taken.add(name)
        return name

    blocks = []
    for block in (piece.block for piece in layout.shards[shard].joined):
        whole = block.start == 0 and block.stop == sizes[block.name]
        name = block.name if whole else f"{block.name}[{block.start}:{block.stop}]"
        blocks.append((unused(name), block))
    tables = {
        spec.name: (unused(f"{spec.name}.keys"), unused(f"{spec.name}.rows"))
        for spec in layout.tables
    }
    return blocks, tables


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
        A file is damaged or missing; the message names it.
    """
    path = as_path("path", path)
    try:
        fs, folder = fsspec.url_to_fs(path)
        data = contents(fs, posixpath.join(folder, MANIFEST))
    except FileNotFoundError as error:
        raise StoreUnavailable(
            f"{path}: no saved model ({MANIFEST} is missing); ParameterServer.save writes one, and "
            "ParameterServer.resume reads checkpoints"
        ) from error
    except Exception as error:
        raise StoreUnavailable(f"{path}: {error}") from error
    saved = from_text(data, f"{path}/{MANIFEST}", SavedModel)
    arrays = {spec.name: np.empty(spec.shape, spec.dtype) for spec in saved.layout.arrays}
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for shard, (name, digest) in enumerate(zip(saved.files, saved.digests, strict=True)):
        tensors = _tensors(fs, posixpath.join(folder, name), digest)
        blocks, tables = _names(saved.layout, shard)
        for tensor, block in blocks:
            arrays[block.name].reshape(-1)[block.start : block.stop] = tensors[tensor].reshape(-1)
        for table, (keys_at, rows_at) in tables.items():
            parts.setdefault(table, []).append((tensors[keys_at], tensors[rows_at]))
    specs = tuple(_with_rows(spec, parts[spec.name]) for spec in saved.layout.tables)
    return Model(arrays, specs, saved.versions)


def _tensors(fs: Any, path: str, digest: str) -> dict[str, np.ndarray]:
    try:
        data = contents(fs, path)
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{path} is missing") from error
    except NotAFile as error:
        raise CheckpointCorrupt(f"{path}: {error.strerror}") from error
    except OSError as error:
        raise StoreUnavailable(f"{path}: {error}") from error
    if digest_of(data) != digest:
        raise CheckpointCorrupt(f"{path} is damaged: its bytes do not match the checksum")
    return load_tensors(data)


def _with_rows(spec: SparseSpec, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> SparseSpec:
    keys, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    rows, otherwise = checked_rows(spec, values, keys), spec.initial
    assert not isinstance(otherwise, Given | np.ndarray)
    return replace(spec, initial=Given(rows.values, rows.keys, otherwise))
