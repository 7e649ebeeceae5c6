"""What a process may not keep: descriptors, and memory that it shared with others."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.waiting import eventually

SECONDS = 10.0


def shared_by(pid: int | str = "self") -> tuple[int, int]:
    """How many segments a process maps, and how many of its descriptors are segments or sockets."""
    mapped = Path(f"/proc/{pid}/maps").read_text().count("memfd:dps")
    return mapped, sum(_is_shared(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that this process keeps no segment and no descriptor of what happens meanwhile."""
    gc.collect()
    before = shared_by()[0]
    yield

    def left() -> int:
        gc.collect()
        return shared_by()[0]

    eventually(lambda: left() <= before, SECONDS)


def _is_shared(descriptor: str) -> bool:
    try:
        return "memfd:dps" in os.readlink(descriptor)
    except OSError:  # closed since
        return False
