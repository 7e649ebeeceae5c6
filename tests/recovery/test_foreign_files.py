"""Files that somebody else has put there: no other file is read, and no pipe is waited for."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save as save_tensors

from dps import ASP, SGD, Checkpoint, Recovery
from dps.core.blocks import Layout
from dps.core.shard import ShardState, initial_state
from dps.errors import CheckpointCorrupt, StoreUnavailable
from dps.recovery.checkpoint_files import CheckpointFiles
from dps.recovery.files import sealed, unsealed
from dps.recovery.manifest import FILE, Run, find_saved, write_run
from dps.recovery.partial import PartialFiles

SECONDS = 10.0
PARAMS = {"w": np.zeros(400), "b": np.zeros(64, "float32")}
LAYOUT = Layout.of(PARAMS, shards=1, block_bytes=256)
STATE: ShardState = initial_state(LAYOUT.gather(0, PARAMS)[0], SGD(0.1))


def raised_by(work: Callable[[], object]) -> BaseException | None:
    """What some work raises, which must not take long; None: it raises nothing."""
    found: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
            found.append(None)
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it waits for the writer of a pipe, or reads without end"
    return found[0]


def pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def run_of(folder: Path, name: str = "g") -> Run:
    recovery = Recovery(Checkpoint(path=str(folder)))
    return Run(name, 1, 0.0, LAYOUT, SGD(0.1), ASP(), recovery, "{}")


def group_in(folder: Path) -> CheckpointFiles:
    """A group with a checkpoint, in a folder of its own."""
    write_run(run_of(folder))
    files = CheckpointFiles(str(folder / "g"), 0, 2)
    files.write(1, STATE)
    return files


@pytest.mark.parametrize("what", ["*.json", "*.safetensors"])
def test_a_checkpoint_that_is_no_file_is_damaged(tmp_path: Path, what: str) -> None:
    files = group_in(tmp_path)
    (file,) = (tmp_path / "g" / "shard-0").glob(what)
    pipe(file)
    error = raised_by(lambda: files.read(files.published()[0]))
    assert isinstance(error, CheckpointCorrupt)
    assert f"{file}: Is a device or a pipe" in str(error)
    assert isinstance(raised_by(lambda: find_saved(str(tmp_path))), StoreUnavailable)


@pytest.mark.parametrize("name", ["/{0}", "../shard-1/{1}"])
def test_a_part_may_name_no_file_but_those_of_its_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "shard-0"
    files = PartialFiles(str(tmp_path), 0, 1, 0.25, LAYOUT.shards[0])
    files.write(1, STATE)
    (manifest,) = folder.glob("*.json")
    (unit, *_) = json.loads(manifest.read_text())["units"]
    secret = save_tensors({f"{unit}/values": np.full(256, 7.0)})
    for place in (tmp_path, tmp_path / "shard-1", folder):
        place.mkdir(exist_ok=True)
        (place / "e000009-i000000000009.safetensors").write_bytes(secret)
        (place / "e000009-i000000000009.safetensors.json").write_bytes(secret)
    other = "e000009-i000000000009.safetensors"
    named = name.format(str(tmp_path / other).lstrip("/"), other)

    said = json.loads(unsealed(manifest.read_bytes()))
    said["units"][unit] = named
    said["sources"][named] = hashlib.sha256(secret).hexdigest()
    manifest.write_text(sealed(json.dumps(said)))
    error = raised_by(lambda: CheckpointFiles(str(tmp_path), 0, 1).read(files.published()[0]))
    assert isinstance(error, CheckpointCorrupt)
    assert f"{named!r} is not a file of a checkpoint" in str(error)


def test_a_group_goes_on_from_its_own_folder_whatever_its_name_was(tmp_path: Path) -> None:
    """It may have been renamed; and a name of another one beside it leads to nothing there."""
    group_in(tmp_path / "mine")
    (tmp_path / "mine" / "g").rename(tmp_path / "mine" / "renamed")
    assert find_saved(str(tmp_path / "mine")).updates == 0
    assert find_saved(str(tmp_path / "mine" / "renamed")).updates == 0
    (tmp_path / "empty" / "h").mkdir(parents=True)
    write_run(run_of(tmp_path / "mine"))
    (tmp_path / "mine" / "g" / FILE).rename(tmp_path / "empty" / "h" / FILE)
    (tmp_path / "mine" / "renamed").rename(tmp_path / "empty" / "g")
    with pytest.raises(StoreUnavailable, match="no complete checkpoint"):
        find_saved(str(tmp_path / "empty" / "h"))
