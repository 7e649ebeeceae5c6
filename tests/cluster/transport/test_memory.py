"""Segments of memory: who can write to them, when they are used again, and what they leave."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from dps.cluster.transport import memory as module
from dps.cluster.transport.memory import (
    SMALLEST,
    SOON,
    Held,
    Pool,
    create,
    held_by,
    opened,
    private,
)

BYTE = np.dtype(np.uint8)


def as_seen_by_another(held: Held) -> np.ndarray:
    """A segment as a process sees it that was passed the descriptor."""
    there = opened(os.dup(held.mapping.fd), held.mapping.size)
    return np.asarray(Held(there, (there.size,), BYTE, False, lambda *_: None))


def test_nobody_else_can_write_to_a_segment_nor_change_its_size() -> None:
    made = create(SMALLEST)
    with pytest.raises(PermissionError):
        mmap.mmap(made.fd, SMALLEST)
    for size in (0, 2 * SMALLEST):
        with pytest.raises(PermissionError):
            os.ftruncate(made.fd, size)
    held, _ = Pool().filled([np.zeros(9)])
    seen = as_seen_by_another(held)
    with pytest.raises(ValueError, match="WRITEABLE"):
        seen.flags.writeable = True


def test_the_memory_of_a_segment_is_there_before_anybody_writes_to_it() -> None:
    """Who writes to memory that is only promised is killed where there is none."""
    made = module.create(8 * SMALLEST)
    assert os.fstat(made.fd).st_blocks * 512 >= made.size


def test_a_segment_is_filled_again_only_when_nobody_holds_it() -> None:
    pool = Pool()
    first, _ = pool.filled([np.full(8, 1.0)])
    seen, number = as_seen_by_another(first), first.mapping.fd
    second, _ = pool.filled([np.full(8, 2.0)])
    assert second.mapping.fd != number
    assert seen[:64].view(np.float64).tolist() == [1.0] * 8
    del first
    third, _ = pool.filled([np.full(8, 3.0)])
    assert third.mapping.fd == number
    assert seen[:64].view(np.float64).tolist() == [3.0] * 8  # the same memory
    assert len(pool) == 2


def test_only_what_nobody_can_write_to_is_taken_as_it_lies() -> None:
    pool = Pool()
    array = pool.empty((4, 4), np.dtype(np.float32))
    view = array[1]
    view.flags.writeable = False
    assert held_by(array) is None
    assert held_by(view) is None  # `array` can still write to it
    array.flags.writeable = False
    assert held_by(array) is not None
    assert held_by(view) is held_by(array) is held_by(array.reshape(-1)[3:])
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.flags.writeable = True
    elsewhere = np.zeros(4)
    elsewhere.flags.writeable = False
    assert held_by(elsewhere) is None
    assert held_by(np.frombuffer(b"1234", np.uint8)) is None


def test_threads_that_fill_and_let_go_at_once_never_share_a_segment() -> None:
    pool, torn = Pool(), []

    def work(mark: int) -> None:
        values = np.full(SMALLEST // 8, mark, np.int64)
        for _ in range(200):
            held, _ = pool.filled([values])
            if not (np.asarray(held).view(np.int64) == mark).all():
                torn.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    assert len(pool) <= 8


@pytest.mark.parametrize("lacking", ["segments", "descriptors"])
def test_idle_segments_are_given_up_for_others(
    lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, large = Pool(), np.zeros(4 * SMALLEST, np.uint8)
    burst = [pool.filled([np.zeros(8)]) for _ in range(3)]
    if lacking == "segments":
        monkeypatch.setattr(module, "MAX_SEGMENTS", 3)
    else:
        monkeypatch.setattr(module, "few_left", lambda _: len(pool) >= 3)
    with pytest.raises(OSError, match=lacking):
        pool.filled([large])  # all are in use
    del burst
    held, _ = pool.filled([large])
    assert held.mapping.size == large.nbytes
    assert len(pool) == 3


def test_what_is_needed_again_soon_stays_however_large_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "IDLE_BYTES", 3 * SMALLEST)
    pool = Pool()
    for _ in range(3):
        arrays = [pool.empty((SMALLEST,), BYTE) for _ in range(5)]
        assert len(pool) == 5
        del arrays
    for _ in range(SOON + 1):
        pool.empty((1,), BYTE)
    assert len(pool) == 4  # the last one is in use when the others are counted


KILLED = """
import numpy, os, sys
from dps.cluster.transport.memory import Pool
held = Pool().filled([numpy.zeros(1 << 20)])
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_there_is_nothing_in_a_file_system_that_a_killed_process_could_leave() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "/memfd:dps (deleted)" in mapped
        assert "/dev/shm" not in mapped
        process.kill()


def test_private_memory_shows_a_segment_and_takes_what_is_written_for_itself() -> None:
    pool = Pool()
    lent = pool.empty((4096,), np.dtype(np.float32))
    lent[:] = 1.0
    lent.flags.writeable = False
    part = lent[1024:2048].view(np.uint8)
    own = private(part)
    assert own.flags.writeable
    assert np.shares_memory(own, private(part)) is False
    own.view(np.float32)[:] += 1.0
    assert (own.view(np.float32) == 2.0).all()
    assert (lent == 1.0).all()
    del lent, part
    assert pool.empty((4096,), np.dtype(np.float32)).ctypes.data not in (0, own.ctypes.data)
    assert len(pool) == 2  # the segment is not filled again while its private memory is held
    elsewhere = np.zeros(8, np.uint8)
    assert not private(elsewhere).flags.writeable
    assert elsewhere.flags.writeable
