"""Which role a Dask worker gets where none was started for one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from dps import SGD, Continue, Recovery, SharedStore
from dps.cluster.driver.roles import by_assignment, newcomer
from dps.core.blocks import Layout
from dps.core.consistency import ASP
from dps.protocol.group import Group
from tests.simulator.world import COORDINATOR

LAYOUT = Layout.of({"w": np.zeros(40)}, 2)
STATELESS = Group(
    "g", LAYOUT, SGD(1.0), ASP(), Recovery(SharedStore(stores=2), Continue()), COORDINATOR
)


def workers(number: int) -> dict[str, dict[str, Any]]:
    info = {"host": "h", "nthreads": 1, "resources": {}}
    return {f"tcp://h:{i}": {**info, "name": f"w-{i}"} for i in range(number)}


@pytest.mark.parametrize("lost", ["server", "store", "worker"])
def test_who_joins_takes_the_role_that_lacks_a_node(lost: str) -> None:
    nodes = by_assignment(workers(6), STATELESS)
    assert Counter(n.role for n in nodes) == {"server": 2, "store": 2, "worker": 2}
    gone = next(n for n in nodes if n.role == lost)
    rest = [n for n in nodes if n is not gone]
    again = {n.address: workers(6)[n.address] for n in rest} | {
        "tcp://h:9": workers(10)["tcp://h:9"]
    }
    assert newcomer("tcp://h:9", again, rest, STATELESS).role == lost
