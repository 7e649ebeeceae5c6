"""Checkpoint files: what every kind of path must do, and what a crash or a bad disk may leave.

`paths` runs each test on a local folder and on an object store's kind of path (in memory).
"""

from __future__ import annotations

import posixpath
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from safetensors.numpy import load_file

from dps.core.shard import Progress, ShardState
from dps.errors import CheckpointCorrupt, ConfigurationError, StoreUnavailable
from dps.recovery import checkpoint_files, files
from dps.recovery.checkpoint_files import CheckpointFiles
from dps.recovery.files import absolute, in_memory
from tests.support.strategies import records
from tests.support.worlds import same_state


def state(index: int) -> ShardState:
    """A state whose arrays are views of one message, as they are after they were received."""
    frame = np.random.default_rng(index).integers(0, 256, 8001).astype(np.uint8)
    workers = {"worker-0": Progress(2, index, 3, index, True), "é": Progress(1, 1, 0, 1, False)}
    slots = {"momentum": frame[4001:]}
    return ShardState(index, index - 1, index - 2, frame[1:4001], slots, workers)


@dataclass
class Place:
    """A path for checkpoints and what lies below it."""

    path: str
    keep: int = 2

    def __post_init__(self) -> None:
        self.files = CheckpointFiles(self.path, 0, self.keep)
        self.fs, self.root = fsspec.url_to_fs(self.path)
        self.folder = posixpath.join(self.root, "shard-0")

    def listing(self) -> list[str]:
        """The names of all files, whatever they are."""
        return sorted(posixpath.basename(p) for p in self.fs.find(self.root))

    def newest(self, extension: str) -> str:
        return max(p for p in self.fs.find(self.root) if p.endswith(extension))

    def change(self, path: str, how: Callable[[bytes], bytes]) -> None:
        before = self.fs.cat_file(path)
        after = how(before)
        assert after != before
        self.fs.pipe_file(path, after)

    def read_newest(self) -> ShardState:
        """What a restore comes to: the newest checkpoint that is whole."""
        for found in self.files.published():
            try:
                return self.files.read(found)
            except CheckpointCorrupt:
                continue
        raise AssertionError("no checkpoint is whole")


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "local":
        yield Place(str(tmp_path / "checkpoints"))
        return
    place = Place(f"memory://{uuid.uuid4().hex}")
    yield place
    if place.fs.exists(place.root):
        place.fs.rm(place.root, recursive=True)


@given(records(ShardState))
@settings(max_examples=25)
def test_any_state_comes_back(drawn: ShardState) -> None:
    values = np.frombuffer(drawn.values.tobytes(), np.uint8)
    slots = dict.fromkeys(drawn.slots, values[::-1].copy())
    index = abs(drawn.index) % 10**12
    whole = replace(drawn, index=index, values=values, slots=slots)
    place = Place(f"memory://{uuid.uuid4().hex}")
    place.files.write(1, whole)
    assert same_state(place.read_newest(), whole)


def test_the_data_are_plain_safetensors(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    place.files.write(1, state(5))
    arrays = load_file(place.newest(".safetensors"))
    assert arrays.keys() == {"block.0/values", "block.0/slot.momentum"}
    assert (arrays["block.0/values"] == state(5).values).all()


def test_files_of_others_are_passed_over_and_left_alone(place: Place) -> None:
    place.files.write(1, state(1))
    for name in ("notes.json", "e1-i2.txt", "model-final.safetensors"):
        place.fs.pipe_file(posixpath.join(place.folder, name), b"mine")
    for index in (2, 3, 4):
        place.files.write(1, state(index))
    assert [f.index for f in place.files.published()] == [4, 3]
    assert {"notes.json", "e1-i2.txt", "model-final.safetensors"} <= set(place.listing())


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at:][1:]


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "data cut short": (".safetensors", lambda data: data[:-1]),
    "a bit of the weights": (".safetensors", flip(-1)),
    "a bit of the header": (".safetensors", flip(20)),
    "manifest empty": (".json", lambda text: b""),
    "manifest's version": (".json", lambda text: text.replace(b'"version": 7', b'"version": 6')),
    "another file's manifest": (".json", lambda text: text.replace(b"8.safe", b"7.safe")),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_noticed_and_the_checkpoint_before_serves(place: Place, what: str) -> None:
    place.files.write(1, state(7))
    place.files.write(1, state(8))
    extension, how = DAMAGE[what]
    place.change(place.newest(extension), how)
    newest, before = place.files.published()
    with pytest.raises(CheckpointCorrupt, match=posixpath.basename(newest.manifest)):
        place.files.read(newest)
    assert same_state(place.files.read(before), state(7))


def test_a_checkpoint_of_a_format_that_is_not_known_is_not_read(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(checkpoint_files, "FORMAT", checkpoint_files.FORMAT + 1)
        place.files.write(1, state(1))
    with pytest.raises(CheckpointCorrupt):
        place.files.read(place.files.published()[0])


class Crash(BaseException):
    """Stands for the end of the process: nothing after it runs but what runs anyway."""


@contextmanager
def failing(fs: Any, operation: str, error: BaseException, after: int = 0) -> Iterator[None]:
    """Have a file system's operation fail once it has worked `after` times."""
    works = getattr(fs, operation)
    calls = iter(range(after))

    def fail(*args: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise error
        return works(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs, operation, fail)
        yield


@contextmanager
def reading_fails(place: Place, error: BaseException) -> Iterator[None]:
    """Have files not be read: local ones are opened without fsspec."""
    if isinstance(place.fs, LocalFileSystem):

        def fail(path: object) -> None:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files, "open_regular", fail)
            yield
    else:
        with failing(place.fs, "cat_file", error):
            yield


NO_SPACE = OSError(28, "No space left on device")


@pytest.mark.parametrize(("operation", "after"), [("open", 0), ("mv", 1)])
def test_a_write_that_fails_leaves_what_was_there_and_nothing_else(
    place: Place, operation: str, after: int
) -> None:
    place.files.write(1, state(1))
    before = place.listing()
    with (
        failing(place.fs, operation, NO_SPACE, after),
        pytest.raises(StoreUnavailable, match=r"shard-0: .*No space left on device"),
    ):
        place.files.write(1, state(2))
    assert place.listing() == before
    assert same_state(place.read_newest(), state(1))
    place.files.write(1, state(2))
    assert same_state(place.read_newest(), state(2))


@pytest.mark.parametrize(
    ("operation", "after"), [("mv", 0), ("open", 1), ("mv", 1)], ids=["data", "between", "manifest"]
)
def test_a_crash_before_the_manifest_is_there_leaves_no_checkpoint(
    place: Place, operation: str, after: int
) -> None:
    place.files.write(1, state(1))
    with failing(place.fs, operation, Crash(), after), pytest.raises(Crash):
        place.files.write(1, state(2))
    assert len(place.listing()) > 2
    assert [f.index for f in place.files.published()] == [1]
    assert same_state(place.read_newest(), state(1))


@pytest.mark.parametrize(("operation", "after"), [("mv", 0), ("rm", 0)])
def test_what_a_crash_left_is_gone_two_checkpoints_later(
    place: Place, operation: str, after: int
) -> None:
    place.files.write(1, state(1))
    place.files.write(1, state(2))
    with failing(place.fs, operation, Crash(), after), pytest.raises(Crash):
        place.files.write(1, state(3))
    for index in (2, 3):
        place.files.write(2, state(index))
    assert place.listing() == [
        "e000002-i000000000002.json",
        "e000002-i000000000002.safetensors",
        "e000002-i000000000003.json",
        "e000002-i000000000003.safetensors",
    ]


def test_a_writer_that_is_replaced_in_the_middle_removes_nothing_of_its_successor(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    zombie = CheckpointFiles(place.path, 0, keep=1)
    place.files.write(1, state(1))
    monkeypatch.setattr(zombie, "_refuse_if_replaced", lambda epoch: None)  # it looked before
    with failing(place.fs, "open", Crash(), 1), pytest.raises(Crash):
        place.files.write(2, state(1))
    place.files.write(3, state(1))
    successors = [name for name in place.listing() if not name.startswith("e000001")]
    zombie.write(1, state(2))
    assert [name for name in place.listing() if not name.startswith("e000001")] == successors
    assert [found.epoch for found in place.files.published()] == [3]


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_taken_for_a_damaged_one(
    place: Place,
) -> None:
    place.files.write(1, state(1))
    (found,) = place.files.published()
    for path in place.fs.find(place.root):
        place.fs.rm(path)
    with pytest.raises(StoreUnavailable, match="removed during the read"):
        place.files.read(found)


def test_an_error_of_a_file_system_s_own_is_one_of_the_store(place: Place) -> None:
    class Throttled(Exception):
        pass

    place.files.write(1, state(1))
    (found,) = place.files.published()
    for operation in ("open", "mv", "ls"):
        with failing(place.fs, operation, Throttled("slow down")), pytest.raises(StoreUnavailable):
            place.files.write(1, state(2))
    with reading_fails(place, Throttled("slow down")), pytest.raises(StoreUnavailable):
        place.files.read(found)
    assert same_state(place.read_newest(), state(1))


def test_a_path_that_fsspec_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be written to 'nowhere://x'"):
        absolute("nowhere://x")


def test_a_path_means_the_same_in_every_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("a/b") == absolute("file://a/b") == str(tmp_path / "a" / "b")
    assert absolute("memory://a") == "memory://a"
    assert [in_memory(path) for path in ("a", "memory://a", "simplecache::memory://a")] == [
        False,
        True,
        True,
    ]


def test_a_path_that_cannot_be_read_now_is_not_taken_for_a_damaged_checkpoint(place: Place) -> None:
    error = PermissionError(13, "denied")
    place.files.write(1, state(1))
    (found,) = place.files.published()
    with reading_fails(place, error), pytest.raises(StoreUnavailable, match="i0000"):
        place.files.read(found)
    with failing(place.fs, "ls", error), pytest.raises(StoreUnavailable, match="shard-0"):
        place.files.published()


class Remembering(MemoryFileSystem):
    """A file system that keeps listings, as those of object stores do."""

    protocol = "remembering"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("remembering://", "memory://"))

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        key = self._strip_protocol(path)
        if key not in self.dircache:
            self.dircache[key] = super().ls(path, detail=True, **options)
        return self.dircache[key] if detail else [e["name"] for e in self.dircache[key]]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


def test_what_another_process_wrote_since_the_last_look_is_found() -> None:
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    name = uuid.uuid4().hex
    writer = CheckpointFiles(f"memory://{name}", 0, 2)
    reader = CheckpointFiles(f"remembering://{name}", 0, 2)
    writer.write(1, state(1))
    assert [f.index for f in reader.published()] == [1]
    writer.write(1, state(2))
    assert [f.index for f in reader.published()] == [2, 1]
