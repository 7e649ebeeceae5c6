"""What an update is taken apart into: parts that nobody can change once they are on their way."""

from __future__ import annotations

import numpy as np
import pytest

import dps
from dps.core.blocks import Layout
from dps.core.rules.rule import SGD, UpdateRule
from dps.protocol.client.parts import prepared
from tests.support.worlds import Setting, in_world

PARAMS = {"w": np.zeros(40), "b": np.zeros(3, "float32")}


@pytest.mark.parametrize("rule", [SGD(1.0), dps.Clipped(SGD(1.0), norm=0.5)])
@pytest.mark.parametrize("names", [("w",), ("b", "w")])
@pytest.mark.parametrize("shards", [1, 2])
def test_parts_are_read_only_whatever_their_size(
    rule: UpdateRule, names: tuple[str, ...], shards: int
) -> None:
    layout = Layout.of(PARAMS, shards, block_bytes=64)
    given = {name: np.ones_like(PARAMS[name]) for name in names}
    made = prepared(layout, rule, given, {}, np.empty, values=True)
    for buffer, _ in made.dense.values():
        assert not buffer.flags.writeable
    for array in given.values():
        array[:] = 2.0  # which is the caller's own


def test_the_simulator_sends_parts_as_a_worker_does() -> None:
    async def scenario(s: Setting) -> None:
        _, client = await s.enter("a")
        parts = client.parts({name: np.ones_like(array) for name, array in PARAMS.items()})
        assert not any(buffer.flags.writeable for buffer, _ in parts.dense.values())
        await client.push_parts(parts)

    in_world(scenario, params=PARAMS, shards=2)
