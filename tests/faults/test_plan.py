"""Faults as data: their words, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dps.errors import ConfigurationError
from dps.faults import (
    After,
    Among,
    AtUpdates,
    Between,
    Corrupt,
    Cut,
    DiskFull,
    During,
    Every,
    Fault,
    InChain,
    Kill,
    Pause,
    Seat,
    Slow,
)

SOON = AtUpdates(1)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Kill("server-0", SOON), "kill server-0 at 1 updates, replaced after 1 s"),
        (
            Kill(Seat("server-0"), SOON, by="requeue"),
            "requeue server-0 or its replacement at 1 updates, replaced when the queue restarts it",
        ),
        (
            Kill(Among("random", "server"), SOON, by="host"),
            "take the host of a random server node at 1 updates, replaced after 1 s",
        ),
        (Pause(("a-0", "b-1"), After(0, 0.5)), "pause a-0, b-1, 0.5 s after fault 0, for 2 s"),
        (Slow("w", SOON, 3.0), "slow w at 1 updates, 4 times slower for 3 s"),
        (Cut("w", SOON, direction="in"), "cut w at 1 updates, what it is sent, for 2 s"),
        (
            DiskFull(InChain(0, "tail"), During("recovery")),
            "disk_full the tail of shard 0 while a shard is restored, for 2 s",
        ),
        (Corrupt(0, SOON), "corrupt shard 0 at 1 updates"),
    ],
)
def test_a_fault_describes_itself(fault: Fault, text: str) -> None:
    assert fault.describe() == text


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (lambda: Kill("server-0", AtUpdates(0)), "AtUpdates: updates=0, expected 1 or more"),
        (lambda: Kill("server-0", SOON, -0.5), "Kill: back_after=-0.5"),
        (lambda: Kill("server-0", SOON, None, "requeue"), "the queue brings it back"),
        (
            lambda: Kill("server-0", Every(mtbf=1, until=9), None),
            "recurring kills need a replacement",
        ),
        (lambda: Kill("server-0", After(0, -1.0)), "After: seconds=-1.0"),
        (lambda: Kill("server-0", During("lunch")), "During: phase='lunch'"),  # type: ignore[arg-type]
        (lambda: Kill(3, SOON), "expected a node as target"),
        (lambda: Kill(Among("each", "server"), SOON), "as the moment, one for each node"),
        (lambda: Pause("server-0", SOON, 0.0), "Pause: seconds=0"),
        (lambda: Pause("server-0", During("recovery"), host=True), "Pause: host=True"),
        (lambda: Slow("server-0", SOON, factor=1.0), "Slow: factor=1.0, expected more than 1"),
        (lambda: Cut("server-0", SOON, 1.0, "up"), "Cut: direction='up'"),  # type: ignore[arg-type]
        (lambda: Corrupt("server-0", SOON), "expected a shard as target"),
        (lambda: Between(0, 5, "updates"), "between 0 and 5 updates: expected two numbers from 1"),
        (lambda: Every(until=1), "expected exactly one of mtbf and updates"),
        (lambda: Every(mtbf=0, until=1), "Every: mtbf=0"),
        (lambda: Every(mtbf=1, until=1, shape=0.001), "Every: shape=0.001, expected 0.01 or more"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(fault: Callable[[], Fault], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        fault()
