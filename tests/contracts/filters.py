"""What every filter must do: bring all of a gradient to the shards once, whatever is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dps.core.blocks import Layout
from dps.core.consistency import ASP
from dps.core.filters.chain import checked
from dps.core.filters.filter import Filter, Selection, Sending
from dps.core.replay import Continue, Outage, Wait
from dps.core.rules.proximal import Proximal
from dps.core.rules.rule import SGD, UpdateRule
from dps.core.updates import UpdateId
from dps.protocol.group import Group
from dps.protocol.transport import Endpoint
from dps.protocol.wire import decode, encode, message
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from tests.simulator.world import run_of
from tests.support.worlds import Setting, in_world

Array = np.ndarray

RANDOM = np.random.default_rng(3)
PARAMS: Mapping[str, Array] = {"w": np.zeros((40, 10), np.float32), "b": np.zeros(30)}
RECOVERIES: dict[str, tuple[Any, Outage]] = {
    "chain": (Chain(2), Wait()),
    "chain + continue": (Chain(2), Continue(buffer="worker")),
    "stateless": (SharedStore(), Continue()),
    "checkpoint": (Checkpoint(1, "sync"), Wait()),
}
PUSHES = 6


def _whole(shape: tuple[int, ...], dtype: Any) -> Array:
    """Whole numbers up to 127, that one among every 1,024: all filters can write them exactly."""
    numbers: Array = RANDOM.integers(-127, 128, shape).astype(dtype)
    numbers.reshape(-1)[::7] = 127
    return numbers


GRADIENTS = [{n: _whole(p.shape, p.dtype) for n, p in PARAMS.items()} for _ in range(PUSHES)]


class FilterContract:
    """The contract of filters (`dps.core.filters.filter.Selection`).

    Override the fixture `filters`; with `params`, for several lists of them.
    """

    @pytest.fixture
    def filters(self) -> list[Filter]:
        """The list of filters that is tested; each is a frozen dataclass."""
        raise NotImplementedError("override the fixture `filters` to return a list of filters")

    @pytest.fixture
    def rule(self, filters: list[Filter]) -> UpdateRule:
        """The update rule that they are used with; override it if they need another one."""
        return SGD(1.0)

    @pytest.fixture(params=RECOVERIES.values(), ids=list(RECOVERIES))
    def recovery(
        self, request: pytest.FixtureRequest, rule: UpdateRule, tmp_path: Path
    ) -> Recovery:
        """How a server is recovered that is lost."""
        durability, outage = request.param
        if isinstance(durability, Checkpoint):
            durability = replace(durability, path=str(tmp_path))
        if isinstance(rule, Proximal) and isinstance(outage, Continue):
            outage = Wait()  # the sum of proximal steps is not one step with the sum
        return Recovery(durability, outage)

    def test_a_mask_depends_on_nothing_but_what_the_filter_is_given(
        self, filters: list[Filter]
    ) -> None:
        weights = _whole((400,), np.float32)
        for place, selection in enumerate(f for f in filters if isinstance(f, Selection)):
            for push, gradients in enumerate(GRADIENTS, 1):
                sending = Sending(UpdateId("a", 1, push), 0, "w", push, weights, place)
                gradient = gradients["w"].reshape(-1)
                gradient.flags.writeable = False
                mask = selection.selected(gradient, sending)
                assert (mask.dtype, mask.shape) == (np.dtype(bool), gradient.shape)
                np.testing.assert_array_equal(mask, selection.selected(gradient, sending))

    def test_a_worker_that_leaves_in_order_has_sent_everything_once(
        self, filters: list[Filter], rule: UpdateRule, recovery: Recovery
    ) -> None:
        """A server is lost in between; nothing is missing or there twice, replicas are equal."""

        async def scenario(s: Setting) -> dict[str, Array]:
            process, client = await s.enter("a")
            await process.run(client.pull())
            before = [view.epoch for view in (await s.world.complete()).views]
            for number, gradients in enumerate(GRADIENTS):
                if number == 3:
                    s.world.crash("server-0", back_after=0.3)
                await process.run(client.push(gradients, pull=True))
            await process.run(client.leave("finished"))
            table = await s.world.complete()
            assert [view.epoch for view in table.views] > before
            assert client.filtered["residual_norm"] == 0
            for view in table.views:
                head, *others = s.world.states(view)
                assert all(other.values.tobytes() == head.values.tobytes() for other in others)
                assert head.version == sum(p.applied for p in head.workers.values())
            states = [s.world.states(view)[0] for view in table.views]
            layout = s.world.group.layout
            return layout.scatter({i: state.values for i, state in enumerate(states)})

        found = in_world(
            scenario, params=PARAMS, rule=rule, recovery=recovery, filters={"*": filters}
        )
        expected = _unfiltered(rule)
        for name in PARAMS:
            assert found[name].tobytes() == expected[name].tobytes()

    def test_a_worker_that_fails_takes_with_it_what_it_withheld_and_no_more(
        self, filters: list[Filter]
    ) -> None:
        if any(isinstance(f, Selection) and not f.feedback for f in filters):
            pytest.skip("what is withheld is dropped for good")

        async def scenario(s: Setting) -> None:
            process, client = await s.enter("a")
            for gradients in GRADIENTS:
                await process.run(client.push(gradients))
            withheld = [client.encoder._outboxes[shard].withheld() for shard in range(2)]
            norm = client.filtered["residual_norm"]
            await process.run(client.leave("failed"))
            assert client.filtered["residual_norm"] == norm
            states = await s.states()
            found = s.world.group.layout.scatter({i: x.values for i, x in enumerate(states)})
            lost = sum(float(np.sum(r)) for of_shard in withheld for r in of_shard.values())
            total = sum(float(g.sum()) for gradients in GRADIENTS for g in gradients.values())
            assert -sum(float(w.sum()) for w in found.values()) == total - lost
            assert (norm == 0) == (not any(withheld))

        in_world(scenario, params=PARAMS, rule=SGD(1.0), filters={"*": filters})

    def test_filters_are_described_beside_checkpoints(
        self, filters: list[Filter], rule: UpdateRule
    ) -> None:
        for each in filters:
            message(type(each))  # as dps does with those that are registered by entry points
        layout = Layout.of(PARAMS, 2)
        chains = checked({"w": filters}, layout.names, rule)
        recovery = Recovery(Checkpoint(path="memory://filters"))
        group = Group("g", layout, rule, ASP(), recovery, Endpoint("", ""), filters=chains)
        run = run_of(group, 0, 1.0)
        assert decode(encode(run)) == run
        assert run.filters == chains


def _unfiltered(rule: UpdateRule) -> dict[str, Array]:
    """What one worker's gradients come to, applied one after the other."""
    found = dict(PARAMS)
    for step, gradients in enumerate(GRADIENTS, 1):
        for name, gradient in gradients.items():
            found[name], _ = rule.step(found[name], gradient, {}, step, 1.0)
    return found
