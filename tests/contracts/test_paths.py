"""What every kind of checkpoint path does: local, in memory, and another file system in front."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from dps.core.blocks import Layout
from dps.core.consistency import ASP
from dps.core.rules.rule import SGD
from dps.core.shard import Progress, ShardState
from dps.errors import CheckpointCorrupt, StaleEpoch, StoreUnavailable
from dps.protocol.group import Group
from dps.protocol.transport import Endpoint
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.checkpoint_files import CheckpointFiles
from dps.recovery.manifest import Saved, find_saved, write_run
from dps.recovery.strategy import Recovery
from tests.simulator.disk import SCHEME
from tests.simulator.world import run_of
from tests.support.worlds import same_state

LAYOUT = Layout.of({"w": np.zeros(10)}, 2)
PATHS: dict[str, Callable[[Path], str]] = {
    "local": lambda folder: str(folder / "checkpoints"),
    "local, a space and a sign": lambda folder: str(folder / "my runs %20"),
    "memory": lambda folder: f"memory://{uuid.uuid4().hex}",
    "a cache in front of a folder": lambda folder: f"simplecache::file://{folder}/checkpoints",
    "simulated disk": lambda folder: f"{SCHEME}://{uuid.uuid4().hex}/checkpoints",
}


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return PATHS[request.param](tmp_path)


def state(shard: int, index: int) -> ShardState:
    values = np.full(LAYOUT.shards[shard].nbytes, index % 256, np.uint8)
    return ShardState(
        index,
        index,
        index,
        values,
        {"m": values + 1},
        {"a": Progress(1, index, index, index, True)},
    )


def files(path: str, shard: int = 0, keep: int = 2) -> CheckpointFiles:
    return CheckpointFiles(path, shard, keep)


def test_what_is_written_is_found_and_read_by_another_process(path: str) -> None:
    nbytes = files(path).write(1, state(0, 5))
    assert nbytes > 0
    if not path.startswith(SCHEME):  # its files live in the instance
        fsspec.url_to_fs(path)[0].clear_instance_cache()
    (found,) = files(path).published()
    assert (found.epoch, found.index, found.cut) == (1, 5, None)
    assert same_state(files(path).read(found), state(0, 5))


def test_each_shard_keeps_its_own_last_ones_and_none_has_any_before(path: str) -> None:
    assert files(path).published() == []
    with pytest.raises(StoreUnavailable):
        find_saved(path)
    for index in range(1, 6):
        files(path, keep=3).write(1, state(0, index))
    files(path, 1).write(1, state(1, 7))
    assert [found.index for found in files(path).published()] == [5, 4, 3]
    (other,) = files(path, 1).published()
    assert same_state(files(path, 1).read(other), state(1, 7))


def test_a_worker_goes_on_after_the_last_incarnation_that_any_shard_knows() -> None:
    """A shard whose checkpoint is older may not know that it has entered again."""
    recovery = Recovery(Checkpoint(path="p"))
    group = Group("g", LAYOUT, SGD(0.5), ASP(), recovery, Endpoint("", ""))
    run = run_of(group, 0, 1.0)
    older, newer = (
        replace(state(0, 4), workers={"a": Progress(number, 1, 1, 1, True)}) for number in (2, 3)
    )
    for states in ((older, newer), (newer, older)):
        assert Saved(run, states).incarnations == {"a": 3}


def test_damage_is_noticed(path: str) -> None:
    for index in (1, 2):
        files(path).write(1, state(0, index))
    fs, root = fsspec.url_to_fs(path)
    newest = max(p for p in fs.find(root) if p.endswith(".safetensors"))
    fs.pipe_file(newest, fs.cat_file(newest)[:-1])
    damaged, before = files(path).published()
    with pytest.raises(CheckpointCorrupt):
        files(path).read(damaged)
    assert same_state(files(path).read(before), state(0, 1))


def test_a_writer_that_was_replaced_changes_nothing(path: str) -> None:
    files(path).write(1, state(0, 9))
    files(path).write(2, state(0, 3))
    with pytest.raises(StaleEpoch):
        files(path, keep=1).write(1, state(0, 10))
    assert [(found.epoch, found.index) for found in files(path).published()] == [(2, 3), (1, 9)]


def test_cuts_stay_until_they_are_not_needed(path: str) -> None:
    for cut in range(4):
        files(path, keep=1).write(1, state(0, 10 + cut), cut)
    assert [found.cut for found in files(path).published()] == [3, 2, 1, 0]
    files(path).prune_cuts(1, oldest=2)
    assert [found.cut for found in files(path).published()] == [3, 2]
    files(path).write(2, state(0, 20), 4)
    files(path).prune_cuts(1, oldest=9)
    assert [f.cut for f in files(path).published()] == [4], "what a later server wrote stays"


@pytest.mark.parametrize("scope", ["shard", "all"])
def test_a_run_is_found_again_with_the_states_that_belong_together(path: str, scope: str) -> None:
    recovery = Recovery(Checkpoint(path=path, scope=scope))  # type: ignore[arg-type]
    group = Group("g", LAYOUT, SGD(0.5), ASP(), recovery, Endpoint("", ""))
    run = run_of(group, 0, 1.0, '{"mine": [1, 2]}')
    write_run(run)
    with pytest.raises(StoreUnavailable, match="a shard has no complete checkpoint"):
        find_saved(path)
    cuts = {"shard": (None, None), "all": (1, 2)}[scope]
    for shard, last in ((0, 1), (1, 0)):
        for index, cut in list(zip((4, 6), cuts, strict=True))[: 1 + last]:
            files(f"{path}/g", shard).write(1, state(shard, index), cut)
    saved = find_saved(path)
    assert replace(saved.run, recovery=recovery) == run
    assert [s.index for s in saved.states] == ([6, 4] if scope == "shard" else [4, 4])
    assert saved.incarnations == {"a": 1}
    later = run_of(replace(group, name="h"), 1, 0.5)
    write_run(later)
    assert find_saved(path).run.name == "g", "the later one has nothing whole yet"
    for shard in range(2):
        files(f"{path}/h", shard).write(1, state(shard, 8), None if scope == "shard" else 0)
    assert find_saved(path).run.name == "h"
    assert find_saved(f"{path}/g").run.name == "g"


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path) -> None:
    path = str(tmp_path)
    recovery = Recovery(Checkpoint(path=path))
    group = Group("g", LAYOUT, SGD(0.5), ASP(), recovery, Endpoint("", ""))
    write_run(run_of(group, 0, 1.0))
    for shard in range(2):
        for index in (4, 6):
            files(f"{path}/g", shard).write(1, state(shard, index))
    assert find_saved(path).refused == ()
    newest = files(f"{path}/g", 1).published()[0].manifest
    Path(newest).with_suffix(".safetensors").write_bytes(b"damaged")
    saved = find_saved(path)
    assert [s.index for s in saved.states] == [6, 4]
    (refused,) = saved.refused
    assert (refused.shard, refused.path) == (1, newest)
    assert newest in refused.reason
