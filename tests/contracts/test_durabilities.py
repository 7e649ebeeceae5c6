"""What every durability does for a shard: begin, commit, restore, and fence earlier servers off."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.durability import Durability, NoDurability
from dps.recovery.layered import Layered
from dps.recovery.partial import PartialCheckpoint
from dps.recovery.shared_store import SharedStore
from dps.recovery.worker_cache import WorkerCache
from tests.contracts.durabilities import DurabilityContract

_numbers = count()


def files(**choices: Any) -> Checkpoint:
    return Checkpoint(path=f"memory://durabilities-{next(_numbers)}", **choices)


def parts(**choices: Any) -> PartialCheckpoint:
    return PartialCheckpoint(path=f"memory://durabilities-{next(_numbers)}", **choices)


# How each is made, how many acked updates a loss may cost it, and what a shard comes back from.
DURABILITIES: dict[str, tuple[Callable[[], Durability], float, str | None]] = {
    "none": (NoDurability, float("inf"), "initial"),
    "checkpoint, async": (lambda: files(every=5), 5, "checkpoint"),
    "checkpoint, sync": (lambda: files(every=5, mode="sync"), 5, "checkpoint"),
    "checkpoint, seconds": (lambda: files(seconds=0.1), float("inf"), "checkpoint"),
    "checkpoint, all": (lambda: files(every=5, scope="all"), 5, "checkpoint"),
    "checkpoint, auto": (lambda: files(every="auto", least=2, most=5), 5, "checkpoint"),
    "partial_checkpoint": (lambda: parts(every=20, share=0.25), 5, "checkpoint"),
    "chain": (lambda: Chain(2), 0, None),
    "shared_store": (lambda: SharedStore(4), 0, "store"),
    "shared_store, two": (lambda: SharedStore(4, stores=2), 0, "store"),
    "chain over checkpoint": (lambda: Layered(Chain(2), files(every=5)), 0, None),
    "shared_store over checkpoint": (lambda: Layered(SharedStore(4), files(every=5)), 0, "store"),
    # Its only copy above is lost with the server.
    "checkpoint below": (lambda: Layered(Chain(1), files(every=5)), float("inf"), "checkpoint"),
    "worker_cache": (WorkerCache, float("inf"), "worker"),
}


class TestDurabilities(DurabilityContract):
    @pytest.fixture(params=DURABILITIES)
    def kind(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def durability(self, kind: str) -> Durability:
        return DURABILITIES[kind][0]()

    @pytest.fixture
    def may_lose(self, kind: str) -> float:
        return DURABILITIES[kind][1]

    @pytest.fixture
    def source(self, kind: str) -> str | None:
        return DURABILITIES[kind][2]
