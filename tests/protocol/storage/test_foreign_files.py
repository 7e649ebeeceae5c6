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

from dps import ASP, SGD, Checkpoint, Recovery, SparseSpec
from dps.chaos.files import damage
from dps.core.blocks import Layout
from dps.core.checksum import sealed
from dps.core.shard import ShardState, initial_state
from dps.core.tables.spec import Given
from dps.errors import CheckpointCorrupt, ConfigurationError, DpsError, StoreUnavailable
from dps.protocol.storage import checkpoint_files, model_files
from dps.protocol.storage.checkpoint_files import CheckpointFiles
from dps.protocol.storage.manifest import FILE, Run, find_saved, write_run
from dps.protocol.storage.partial_files import PartialFiles
from dps.protocol.wire import encode

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


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def run_of(folder: Path, name: str = "g") -> Run:
    recovery = Recovery(Checkpoint(path=str(folder)))
    return Run(name, 1, 0.0, LAYOUT, SGD(0.1), ASP(), recovery, "{}")


def group_in(folder: Path) -> CheckpointFiles:
    """A group with a checkpoint, in a folder of its own."""
    write_run(run_of(folder))
    files = CheckpointFiles(str(folder / "g"), 0, 2)
    files.write(1, STATE)
    return files


# -- what would be waited for ----------------------------------------------------------------------


@pytest.mark.parametrize("place", [pipe, endless])
@pytest.mark.parametrize("what", ["*.json", "*.safetensors"])
def test_a_checkpoint_that_is_no_file_is_damaged(
    tmp_path: Path, what: str, place: Callable[[Path], None]
) -> None:
    files = group_in(tmp_path)
    (file,) = (tmp_path / "g" / "shard-0").glob(what)
    place(file)
    error = raised_by(lambda: files.read(files.found()[0]))
    assert isinstance(error, CheckpointCorrupt)
    assert f"{file}: It is a device or a pipe" in str(error)
    assert isinstance(raised_by(lambda: find_saved(str(tmp_path))), StoreUnavailable)


@pytest.mark.parametrize("place", [pipe, endless])
def test_the_description_of_a_group_that_is_no_file_is_named(
    tmp_path: Path, place: Callable[[Path], None]
) -> None:
    group_in(tmp_path)
    place(tmp_path / "g" / FILE)
    error = raised_by(lambda: find_saved(str(tmp_path)))
    assert isinstance(error, CheckpointCorrupt)
    assert f"{tmp_path}/g/{FILE}: It is a device or a pipe" in str(error)


def saved(folder: Path) -> None:
    model_files.save(folder, LAYOUT, PARAMS, {}, [1])


@pytest.mark.parametrize("place", [pipe, endless])
@pytest.mark.parametrize(
    ("what", "error"), [("model.json", StoreUnavailable), ("shard-*", CheckpointCorrupt)]
)
def test_a_saved_model_that_is_no_file_is_refused(
    tmp_path: Path, what: str, error: type[DpsError], place: Callable[[Path], None]
) -> None:
    saved(tmp_path)
    (file,) = tmp_path.glob(what)
    place(file)
    raised = raised_by(lambda: model_files.load(tmp_path))
    assert isinstance(raised, error)
    assert "It is a device or a pipe" in str(raised)


def test_a_model_is_not_saved_over_a_manifest_that_is_no_file(tmp_path: Path) -> None:
    pipe(tmp_path / model_files.MANIFEST)
    assert isinstance(raised_by(lambda: saved(tmp_path)), ConfigurationError)
    assert [path.name for path in tmp_path.iterdir()] == [model_files.MANIFEST]


def test_rows_that_are_no_file_are_refused(tmp_path: Path) -> None:
    pipe(tmp_path / "rows.npy")
    spec = SparseSpec("t", 2, initial=Given(str(tmp_path / "rows.npy")))
    error = raised_by(lambda: model_files.begun_rows([spec]))
    assert isinstance(error, StoreUnavailable)
    assert "It is a device or a pipe" in str(error)


# -- names of other files --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["/{0}", "../../{1}", "../shard-1/{1}", "{1}.json", "/dev/zero"])
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

    said = json.loads(manifest.read_text())
    said["units"][unit] = named
    said["sources"][named] = hashlib.sha256(secret).hexdigest()
    data = (folder / said["file"]).read_bytes()
    manifest.write_text(json.dumps(checkpoint_files._sealed(said, data)))
    error = raised_by(lambda: CheckpointFiles(str(tmp_path), 0, 1).read(files.found()[0]))
    assert isinstance(error, CheckpointCorrupt)
    assert f"{named!r} is no file of a checkpoint" in str(error)


@pytest.mark.parametrize("name", ["{0}.bak", "../shard-1/{0}", "x{0}"])
def test_a_manifest_may_name_no_data_but_its_own(tmp_path: Path, name: str) -> None:
    files = group_in(tmp_path)
    folder = tmp_path / "g" / "shard-0"
    (manifest,), (data,) = folder.glob("*.json"), folder.glob("*.safetensors")
    (tmp_path / "g" / "shard-1").mkdir()
    named = name.format(data.name)
    (folder / named).write_bytes(data.read_bytes())
    before = (folder / named).read_bytes()
    said = {**json.loads(manifest.read_text()), "file": named}
    manifest.write_text(json.dumps(checkpoint_files._sealed(said, before)))
    with pytest.raises(CheckpointCorrupt, match="does not name its data"):
        files.read(files.found()[0])
    with pytest.raises(CheckpointCorrupt, match="does not name its data"):
        damage(str(tmp_path / "g"), 0)
    assert (folder / named).read_bytes() == before


@pytest.mark.parametrize("name", ["../x", "/x", "..", ""])
def test_the_description_of_a_group_may_name_no_other_folder(tmp_path: Path, name: str) -> None:
    group_in(tmp_path)
    text = encode(run_of(tmp_path, name))[0].tobytes().decode()
    (tmp_path / "g" / FILE).write_text(sealed(text))
    with pytest.raises(CheckpointCorrupt, match="expected that of a folder"):
        find_saved(str(tmp_path))


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
    with pytest.raises(StoreUnavailable, match="no whole checkpoint"):
        find_saved(str(tmp_path / "empty" / "h"))


@pytest.mark.parametrize("name", ["../secret", "shard-0/../../secret", "/shard-0"])
def test_a_saved_model_may_name_no_file_elsewhere(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "model")
    manifest = tmp_path / "model" / model_files.MANIFEST
    said = json.loads(manifest.read_bytes())
    del said["crc"]
    (tmp_path / "model" / "shard-0").mkdir()
    (tmp_path / "secret").write_bytes((tmp_path / "model" / said["files"][0]["file"]).read_bytes())
    said["files"][0]["file"] = name
    manifest.write_text(sealed(json.dumps(said)))
    with pytest.raises(CheckpointCorrupt, match="no name of a file"):
        model_files.load(tmp_path / "model")
