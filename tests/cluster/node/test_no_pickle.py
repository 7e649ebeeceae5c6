"""What the nodes of a group send each other holds no pickle but the name of numpy's array class.

That name is in the header that Dask puts before every array. Each node notes whatever its Dask
unpickles, while real gradients, replicas and states travel.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Worker
from distributed.protocol import pickle as dask_pickle

from dps import Continue, Recovery, SharedStore
from dps.cluster.platform import state_of
from dps.core.shard import ShardState
from tests.cluster.driver.test_kill import SECONDS, audited, nodes, training
from tests.support.waiting import eventually

NAME = "test-unpickled"
ARRAY_CLASS = "numpy.ndarray"


class Names(pickle.Unpickler):
    """Notes the name of all that a pickle calls or makes."""

    def __init__(self, data: bytes, buffers: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data), buffers=buffers)
        self.found = {"a buffer"} if buffers else set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add(f"{module}.{name}")
        return super().find_class(module, name)


def unpickled(data: bytes, buffers: Sequence[Any] = ()) -> tuple[Any, set[str]]:
    """What a pickle holds, and what its making needs."""
    names = Names(data, buffers)
    return names.load(), names.found


def watch(dask_worker: Worker) -> None:
    """Have a node note what its Dask unpickles from now on."""
    noted = state_of(dask_worker)[NAME] = set()

    def loads(data: bytes, *, buffers: Sequence[Any] = ()) -> Any:
        value, names = unpickled(data, buffers)
        noted.update(names)
        return value

    dask_pickle.loads = loads


def noted(dask_worker: Worker) -> list[str]:
    """What a node noted, but for what this test itself sends to it."""
    return [name for name in state_of(dask_worker)[NAME] if not name.startswith(f"{__name__}.")]


@pytest.mark.slow
@pytest.mark.cluster
def test_gradients_and_states_travel_without_pickle(tmp_path: Path) -> None:
    recovery, specs = Recovery(SharedStore(), Continue()), nodes(spares=1, store=True)
    with training(tmp_path, recovery, specs) as run:
        run.cluster.client.run(watch)
        run.lose("server-0")  # its shard's state goes to the spare, from the store
        run.advance()
        assert "spare-0" in {node.name for node in run.ps.nodes if node.address in run.serving()}
        found = run.cluster.client.run(noted)
        assert len(found) == len(specs) - 1
        assert {name for names in found.values() for name in names} == {ARRAY_CLASS}
        pushed = run.finish()
        eventually(lambda: all(reply.version == pushed for reply in audited(run.ps)), SECONDS)


def test_a_state_that_was_pickled_would_be_noticed() -> None:
    state = ShardState(1, 1, 1, np.zeros(4), {}, {})
    frames: list[Any] = []
    data = dask_pickle.dumps(state, buffer_callback=frames.append)
    _, names = unpickled(data, [frame.raw() for frame in frames])
    assert "dps.core.shard.ShardState" in names
    assert "a buffer" in names
    assert unpickled(dask_pickle.dumps(np.ndarray))[1] == {ARRAY_CLASS}
