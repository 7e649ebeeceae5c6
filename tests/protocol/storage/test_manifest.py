"""What a group goes on from is shown in a line, however much it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dps import ASP, SGD, Checkpoint, Recovery
from dps.core.blocks import Layout
from dps.core.shard import Progress, ShardState, initial_state
from dps.protocol.functions import CALLS
from dps.protocol.storage.manifest import Refused, Run, Saved

PARAMS = {"w": np.zeros(1000), "v": np.zeros(33)}
LAYOUT = Layout.of(PARAMS, 2)
RUN = Run("62f7308c", 1, 0.0, LAYOUT, SGD(0.1), ASP(), Recovery(Checkpoint(path="/nowhere")), "{}")


def state(version: int, applied: dict[str, int]) -> ShardState:
    workers = {name: Progress(1, count, count, count, False) for name, count in applied.items()}
    empty = initial_state(LAYOUT.gather(0, PARAMS)[0], SGD(0.1))
    return replace(empty, version=version, workers=workers)


def test_what_was_saved_is_shown_with_its_version_and_workers() -> None:
    one = state(225, {"worker-1": 111, "worker-0": 114, f"driver{CALLS}": 3})
    assert repr(Saved(RUN, (one, one))) == (
        "<Saved 62f7308c: version 225, worker-0 114, worker-1 111>"
    )


def test_many_workers_and_damaged_checkpoints_are_counted() -> None:
    many = state(30_000, {f"worker-{number}": 10 for number in range(3000)})
    saved = Saved(RUN, (many, replace(many, version=29_990)), (Refused(0, "a/b", "checksum"),))
    assert repr(saved) == (
        "<Saved 62f7308c: versions 29,990 to 30,000, worker-0 10, worker-1 10, worker-2 10, "
        "worker-3 10, and 2,996 more workers, 1 damaged left out>"
    )
