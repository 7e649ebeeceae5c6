"""Fault plans: what cannot happen is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dps.core.faults.plan import (
    After,
    AtSeconds,
    AtUpdates,
    Corrupt,
    Cut,
    Delay,
    DiskFull,
    During,
    Fault,
    InChain,
    Kill,
    Pause,
    Slow,
)
from dps.errors import ConfigurationError

SOON = AtUpdates(1)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda: Kill("server-0", AtUpdates(0)), "at_updates=0, expected at least 1"),
        (lambda: Kill("server-0", SOON, -0.5), "kill of server-0: back_after=-0.5"),
        (lambda: Kill("server-0", AtSeconds(-1.0)), "at_seconds=-1.0, expected 0 s or more"),
        (lambda: Kill("server-0", After(-1)), "after fault -1: faults are counted from 0"),
        (lambda: Kill("server-0", After(0, -1.0)), "after fault 0: seconds=-1.0"),
        (lambda: Kill("server-0", During("lunch")), "phase='lunch' is unknown"),  # type: ignore[arg-type]
        (lambda: Pause("server-0", SOON, 0.0), "pause of server-0: seconds=0"),
        (lambda: Slow("server-0", SOON, 1.0), "slow of server-0: factor=1.0"),
        (lambda: Cut("server-0", SOON, 0.0), "cut of server-0: seconds=0"),
        (lambda: Cut("server-0", SOON, 1.0, "up"), "direction='up' is unknown"),  # type: ignore[arg-type]
        (lambda: Delay("server-0", SOON, 0.0), "delay of server-0: delay=0"),
        (lambda: DiskFull(InChain(1, "tail"), SOON, -1.0), "disk_full of the tail of shard 1"),
        (lambda: Corrupt(-1, SOON), "corrupt of shard -1"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(fault: Callable[[], Fault], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        fault()
