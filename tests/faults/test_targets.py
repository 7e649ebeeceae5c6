"""Which faults need signals or limits on a process, and so are refused where there are none."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dps.cluster.backends.base import Act, Cluster
from dps.faults import AtUpdates, Corrupt, Cut, Delay, DiskFull, Fault, Kill, Pause, Slow
from dps.faults.targets import obstacles

NOW = AtUpdates(1)
NAMES = ("server-0", "store-0", "worker-0")


class Elsewhere:
    """A cluster whose processes can be reached by nothing."""

    def obstacle(self, name: str, act: Act) -> str | None:
        return f"{act} {name}"


@pytest.mark.parametrize(
    ("fault", "refused"),
    [
        (Kill("server-0", NOW), "kill server-0"),
        (Pause("server-0", NOW), "pause server-0"),
        (Slow("worker-0", NOW), "pause worker-0"),
        (DiskFull("server-0", NOW), "limit server-0"),
        (Cut("server-0", NOW), None),
        (Delay("server-0", NOW), None),
        (Corrupt(0, NOW), None),
    ],
)
def test_a_fault_needs_what_it_does_to_a_process(fault: Fault, refused: Any) -> None:
    cluster = cast("Cluster", Elsewhere())
    found = [reason for _, reason in obstacles((Cut("server-0", NOW), fault), cluster, NAMES)]
    assert found == ([refused] if refused is not None else [])
