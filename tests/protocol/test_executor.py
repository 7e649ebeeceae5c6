"""Cores: work in parts on threads, which comes to the same as the parts in turn."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

import dps
from dps.core import shard
from dps.core.rules.rule import UpdateRule
from dps.core.updates import Operation
from dps.protocol.executor import ITEMS_OF_A_CORE, Cores
from tests.support.builders import Model
from tests.support.worlds import same_state

WAIT_SECONDS = 30.0
RULES: list[UpdateRule] = [
    dps.SGD(0.5),
    dps.Adam(0.1),
    dps.FTRL(0.5, beta=0.1, l1=0.2, l2=0.1),
    dps.Proximal(0.1, dps.GroupL1(0.3)),
]


@pytest.fixture(params=[1, 2, 5])
def cores(request: pytest.FixtureRequest) -> Iterator[Cores]:
    made = Cores(request.param)
    yield made
    made.close()


@pytest.fixture
def two() -> Iterator[Cores]:
    made = Cores(2)
    yield made
    made.close()


def test_two_cores_are_at_work_at_the_same_time(two: Cores) -> None:
    meeting = threading.Barrier(2)
    cores_used: set[int] = set()

    def meet(item: int) -> None:
        meeting.wait(WAIT_SECONDS)
        cores_used.add(threading.get_ident())

    two.each(meet, range(2 * ITEMS_OF_A_CORE))
    assert len(cores_used) == 2
    assert threading.get_ident() in cores_used


def test_who_finds_all_helpers_busy_does_the_work_alone(two: Cores) -> None:
    begun, enough = threading.Barrier(3), threading.Event()

    def hold(item: int) -> None:
        if item < 2:
            begun.wait(WAIT_SECONDS)
            assert enough.wait(WAIT_SECONDS)

    many = range(2 * ITEMS_OF_A_CORE)
    other = threading.Thread(target=two.each, args=(hold, many))
    other.start()
    try:
        begun.wait(WAIT_SECONDS)
        done: list[int] = []
        two.each(done.append, many)
        assert done == list(many)
    finally:
        enough.set()
        other.join()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "CHUNK_BYTES", 1 << 10)


def _model() -> Model:
    return Model.by_rows(w=np.zeros((300, 7), np.float32), b=np.zeros(1001), c=np.zeros(5))


def _pushes(model: Model) -> list[Operation]:
    random = np.random.default_rng(0)

    def of(*names: str) -> dict[str, np.ndarray]:
        specs = [spec for spec in model.layout.arrays if spec.name in names]
        return {s.name: random.standard_normal(s.shape).astype(s.dtype) for s in specs}

    covered = [("w", "b", "c"), ("w",), ("b", "c"), ("c",), ("w", "b", "c")]
    return [model.gradient("a", seq, of=of(*names)) for seq, names in enumerate(covered, 1)]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_step_is_the_same_bit_by_bit_on_any_number_of_cores(
    rule: UpdateRule, cores: Cores
) -> None:
    model = _model()
    in_turn = on_cores = model.state(rule)
    for op in _pushes(model):
        in_turn = model.apply(rule, in_turn, op).state
        layout = model.layout.shards[0]
        on_cores = shard.StateMachine(layout, rule, each=cores.each).apply(on_cores, op).state
        assert same_state(in_turn, on_cores)
