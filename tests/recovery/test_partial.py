"""Partial checkpoints: what is put together from them, what is kept, and what damage costs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path

import fsspec
import numpy as np
import pytest

from dps.core.blocks import Layout
from dps.core.rules.rule import Momentum
from dps.core.shard import Progress, ShardState, StateMachine, initial_state
from dps.core.tables.table import KEYS, SparseSpec
from dps.core.updates import Operation, UpdateId
from dps.errors import CheckpointCorrupt, StaleEpoch, StoreUnavailable
from dps.recovery.checkpoint_files import CheckpointFiles
from dps.recovery.partial import PartialFiles, parts_until_all

SHARE = 0.25
PARAMS = {"w": np.zeros(400), "b": np.zeros(64, "float32")}
LAYOUT = Layout.of(PARAMS, shards=1, block_bytes=256).shards[0]
RULE = Momentum(0.1)
_numbers = count()


@pytest.fixture
def path() -> str:
    return f"memory://parts-{next(_numbers)}"


def files(path: str, keep: int = 1) -> PartialFiles:
    return PartialFiles(path, 0, keep, SHARE, LAYOUT)


def states(number: int, seed: int = 0) -> list[ShardState]:
    """A shard's states, each one update later than the one before."""
    random = np.random.default_rng(seed)
    found = [initial_state(LAYOUT_VALUES.copy(), RULE)]
    for seq in range(1, number):
        parts = [
            random.standard_normal((end - begin) // np.dtype(d).itemsize).astype(d)
            for begin, end, d in LAYOUT.runs
        ]
        gradient = np.concatenate([part.view(np.uint8) for part in parts])
        op = Operation("gradient", UpdateId("a", 1, seq), gradient=gradient)
        found.append(StateMachine(LAYOUT, RULE).apply(found[-1], op).state)
    return found


LAYOUT_VALUES = np.zeros(LAYOUT.nbytes, np.uint8)


def newest(path: str) -> ShardState:
    """What is put together by whoever knows nothing of parts, such as a group that is resumed."""
    reader = CheckpointFiles(path, 0, 1)
    return reader.read(reader.published()[0])


def test_each_block_is_as_it_was_in_the_newest_part_that_has_it_with_its_slots(path: str) -> None:
    writer, history = files(path), states(40)
    whole = writer.write(1, history[0])
    sizes = [writer.write(1, state) for state in history[1:]]
    read = newest(path)
    assert (read.version, read.workers) == (39, history[39].workers)
    found = set()
    for piece in LAYOUT.pieces:
        mine = piece.view(read.values)
        version = next(s.version for s in history if np.array_equal(piece.view(s.values), mine))
        slots = history[version].slots
        assert all(np.array_equal(piece.view(read.slots[k]), piece.view(slots[k])) for k in slots)
        found.add(version)
    assert len(found) > 1, "they are of several versions"
    assert max(found) == 39
    assert 39 - min(found) < parts_until_all(SHARE)
    manifest = writer.manifest(writer.published()[0])
    assert (manifest["version"], min(manifest["versions"].values())) == (39, min(found))
    assert len(manifest["versions"]) == len(LAYOUT.pieces)
    assert np.mean(sizes) < 0.6 * whole


def test_what_changes_most_is_saved_more_often(path: str) -> None:
    """A block that changes by far more than all others is in every part."""
    writer, history = files(path), states(30)
    loud = LAYOUT.pieces[3]
    for number, state in enumerate(history):
        values = state.values.copy()
        loud.view(values)[:] = 1000.0 * number
        state = replace(state, values=values)
        writer.write(1, state)
        assert (loud.view(newest(path).values) == 1000.0 * number).all()


def test_another_epoch_begins_with_the_whole_state(path: str) -> None:
    """A server of an earlier one may have written what nobody goes on from."""
    history = states(9)
    zombie, successor = files(path), files(path)
    for state in history[:4]:
        zombie.write(1, state)
    successor.write(2, history[2])
    read = newest(path)
    assert read.version == 2
    assert np.array_equal(read.values, history[2].values)
    with pytest.raises(StaleEpoch):
        zombie.write(1, history[5])
    successor.write(3, history[6])
    assert np.array_equal(newest(path).values, history[6].values), "also with the same server"


def test_nothing_is_expected_in_a_part_whose_write_failed(tmp_path: Path) -> None:
    writer, history = files(f"{tmp_path}/files"), states(12)
    writer.write(1, history[0])
    (tmp_path / "files").rename(tmp_path / "away")
    (tmp_path / "files").touch()  # where no folder can be made
    for state in history[1:3]:
        with pytest.raises(StoreUnavailable):
            writer.write(1, state)
    (tmp_path / "files").unlink()
    (tmp_path / "away").rename(tmp_path / "files")
    for state in history[3:]:
        writer.write(1, state)
        assert newest(f"{tmp_path}/files").version == state.version


def test_a_damaged_part_is_noticed_by_all_that_need_it_and_those_before_it_are_whole(
    path: str,
) -> None:
    writer, history = files(path), states(30)
    for state in history[:20]:
        writer.write(1, state)
    damaged = writer.published()[0]
    fs, _ = fsspec.url_to_fs(path)
    data = next(
        p
        for p in fs.ls(damaged.manifest.rsplit("/", 1)[0], detail=False)
        if f"i{damaged.index:012d}" in p and p.endswith("safetensors")
    )
    content = bytearray(fs.cat_file(data))
    content[-1] ^= 1
    fs.pipe_file(data, bytes(content))
    for state in history[20:25]:
        writer.write(1, state)
    whole, needing = [], 0
    # Older ones are there for the blocks in them alone.
    for found in writer.published()[: parts_until_all(SHARE) + 1]:
        sources = json.loads(fs.cat_file(found.manifest))["sources"]
        if data.rsplit("/", 1)[1] not in sources:
            whole.append(writer.read(found).version)
            continue
        needing += 1
        with pytest.raises(CheckpointCorrupt):
            writer.read(found)
    assert needing > 1, "its own, and those of later parts"
    assert 18 in whole


def test_no_more_is_kept_than_is_needed(path: str) -> None:
    writer = files(path, keep=1)
    for state in states(60):
        writer.write(1, state)
    fs, _ = fsspec.url_to_fs(path)
    kept = fs.ls(f"{path}/shard-0", detail=False)
    assert len(kept) == 2 * (2 * parts_until_all(SHARE) + 1), "a manifest and data each"
    assert writer.read(writer.published()[parts_until_all(SHARE)]).version == 51


def test_rows_of_tables_are_saved_by_pages_with_their_optimizer_state(path: str) -> None:
    spec = SparseSpec("emb", 2, "float64")
    layout = replace(LAYOUT, tables=(spec,))
    writer = PartialFiles(path, 0, 1, SHARE, layout)
    state = initial_state(LAYOUT_VALUES.copy(), RULE)
    keys = np.arange(300)
    history = []
    for seq in range(1, 30):
        rows = {"emb": (keys[: 10 * seq], np.full((10 * seq, 2), -1.0))}
        state = _with_rows(layout, state, seq, rows)
        history.append(state)
        writer.write(1, state)
    read = newest(path).tables["emb"]
    held, now = read.between(0, KEYS, spec), state.tables["emb"].between(0, KEYS, spec)
    assert np.array_equal(held.keys[:250], now.keys[:250])
    behind = (now.values - held.values[: len(now)])[:250] if len(held) == len(now) else None
    assert behind is None or (behind >= 0).all()
    full, bare = read.compacted(), history[-1].tables["emb"].compacted()
    assert full is not None
    assert bare is not None
    assert full.slots.keys() == bare.slots.keys()
    assert np.array_equal(full.slots["velocity"], -full.values), "of the same version, row by row"


def _with_rows(
    layout: object, state: ShardState, seq: int, rows: dict[str, tuple[np.ndarray, np.ndarray]]
) -> ShardState:
    from dps.core.tables.table import Level, table_of

    keys, values = rows["emb"]
    table = table_of(state.tables, "emb")
    level = Level(keys, np.full(values.shape, float(seq)), {"velocity": values * seq})
    workers = {"a": Progress(1, seq, seq, seq, active=True)}
    tables = {"emb": table.written(level)}
    return replace(state, index=seq, version=seq, steps=seq, workers=workers, tables=tables)
