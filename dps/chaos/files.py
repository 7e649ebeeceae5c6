"""How files fail: a node that may write no more, and checkpoints that are damaged on disk.

A process whose limit of file sizes is 0 gets an error from every write to a file, while sockets and
what is on the disk already stay as they are: to what runs in it, the disk is full.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import threading
from collections.abc import Callable, Iterable, Set
from typing import Any

import fsspec
import psutil

from dps.chaos.effect import Seen
from dps.events import CheckpointFailed
from dps.protocol.storage.checkpoint_files import CheckpointFiles, contents
from dps.protocol.transport import Clock

EVENTS_SECONDS = 2.0  # until what a node has recorded has reached the driver
FLIPPED = 16
TRIES = 5


class Failures:
    """The checkpoints that failed, as far as is known by now. Thread-safe."""

    def __init__(self) -> None:
        self._known: list[CheckpointFailed] = []
        self._more = threading.Condition()

    def note(self, event: CheckpointFailed) -> None:
        """Take note of one."""
        with self._more:
            self._known.append(event)
            self._more.notify_all()

    def among(self, shards: Set[int], since: float, deadline: float) -> list[CheckpointFailed]:
        """Those of some shards since a moment, once there are any or `deadline` has passed."""

        def found() -> list[CheckpointFailed]:
            return [e for e in self._known if e.shard in shards and e.t >= since]

        with self._more:
            self._more.wait_for(found, deadline)
            return found()


class FullDisk:
    """Has every write of a process to a file fail.

    Parameters
    ----------
    shards
        Returns the shards that the node serves now.
    """

    proven = False  # only a checkpoint that failed shows it, and `end` looks for that

    def __init__(
        self, pid: int, shards: Callable[[], Set[int]], failures: Failures, clock: Clock
    ) -> None:
        self._pid = pid
        self._shards = shards
        self._failures = failures
        self._clock = clock

    def begin(self) -> Seen:
        """Set the limit, and read it back."""
        self._began = self._clock.now()
        self._served = self._shards()
        try:
            process = self._process = psutil.Process(self._pid)
            self._before, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
            limit, _ = process.rlimit(psutil.RLIMIT_FSIZE)
        except psutil.NoSuchProcess:
            raise ProcessLookupError("there is no such process") from None
        return Seen(f"the limit of file sizes of process {self._pid} is {limit} bytes", limit == 0)

    def end(self) -> Seen:
        """Set the limit to what it was; it had no effect if nothing was to be written."""
        try:
            _, hard = self._process.rlimit(psutil.RLIMIT_FSIZE)
            self._process.rlimit(psutil.RLIMIT_FSIZE, (self._before, hard))
            state = "the limit is lifted"
        except psutil.NoSuchProcess:
            state = "the process has ended meanwhile"
        shards = self._served | self._shards()
        failed = self._failures.among(shards, self._began, EVENTS_SECONDS)
        if not failed:
            return Seen(f"no write was tried; {state}", False)
        return Seen(f"{len(failed)} checkpoints failed ({failed[0].reason}); {state}", True)


def damage(folder: str, shard: int, together: Iterable[int] = ()) -> Seen:
    """Flip bytes in the newest complete checkpoint of a shard, and read all of it again.

    Parameters
    ----------
    folder
        With the checkpoints of one parameter server: a path that fsspec knows.
    together
        The shards that go back together, if they do: a checkpoint is complete when all of them have
        written theirs of the same cut. To damage a newer one would harm nothing.

    Raises
    ------
    LookupError
        There is none.
    """
    files = CheckpointFiles(folder, shard, keep=1)
    others = [CheckpointFiles(folder, other, keep=1) for other in together if other != shard]
    fs, _ = fsspec.url_to_fs(folder)
    for _ in range(TRIES):
        written = [{found.cut for found in each.found()} for each in others]
        found = [f for f in files.found() if all(f.cut in cuts for cuts in written)]
        if not found:
            raise LookupError(f"shard {shard} has no complete checkpoint in {folder}")
        manifest = found[0].manifest
        try:
            return _flip(fs, files.data_of(manifest, json.loads(contents(fs, manifest))))
        except FileNotFoundError:
            continue  # a newer one has taken its place
    raise LookupError(f"the checkpoints of shard {shard} are replaced too quickly")


def _flip(fs: Any, path: str) -> Seen:
    data = contents(fs, path)
    begin = max(0, len(data) // 2 - FLIPPED // 2)
    part = data[begin : begin + FLIPPED]
    flipped = bytes(byte ^ 0xFF for byte in part)
    fs.pipe_file(path, data[:begin] + flipped + data[begin + len(part) :])
    before, after = _checksum(data), _checksum(fs.cat_file(path))
    name = posixpath.basename(path)
    evidence = (
        f"{name}: {len(part)} bytes flipped at {begin}; its SHA-256 was {before}… and is {after}…"
    )
    return Seen(evidence, before != after)


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
