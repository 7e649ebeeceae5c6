"""The contracts, as a package of another maker uses them; and what breaks them is noticed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from dps.core.faults.plan import AtUpdates, Lasting
from dps.core.filters.filter import Filter, Sending
from dps.core.rules.rule import UpdateRule
from dps.core.shard import ShardState
from dps.errors import ShardUnavailable, StoreUnavailable
from dps.protocol.durability import Durability, NoPersistence, Persistence, ServerContext
from dps.protocol.transport import Endpoint
from dps.protocol.wire import message
from flows.workloads import DatasetShape, DatasetSource, Workload
from tests.contracts.datasets import DatasetContract
from tests.contracts.durabilities import DurabilityContract
from tests.contracts.faults import FaultContract
from tests.contracts.filters import FilterContract
from tests.contracts.rules import RuleContract
from tests.contracts.workloads import WorkloadContract

Array = np.ndarray
_numbers = count()


class TestRule(RuleContract):
    @pytest.fixture
    def rule(self, acme: Path) -> UpdateRule:
        from acme_dps.rules import SignDescent

        rule: UpdateRule = SignDescent(0.1)
        return rule


class TestFilter(FilterContract):
    @pytest.fixture
    def filters(self, acme: Path) -> list[Filter]:
        from acme_dps.filters import Alternate

        return [Alternate(3)]


class TestWorkload(WorkloadContract):
    @pytest.fixture
    def workload(self, acme: Path) -> Workload:
        from acme_dps.workloads import Centroids

        workload: Workload = Centroids(DatasetShape(6, 3))
        return workload


class TestDataset(DatasetContract):
    @pytest.fixture
    def dataset(self, acme: Path) -> DatasetSource:
        from acme_dps.datasets import Clouds

        dataset: DatasetSource = Clouds(90)
        return dataset


class TestDurability(DurabilityContract):
    @pytest.fixture
    def durability(self, acme: Path) -> Durability:
        from acme_dps.durabilities import Shelf

        shelf: Durability = Shelf(f"memory://shelf-{next(_numbers)}")
        return shelf

    @pytest.fixture
    def may_lose(self) -> float:
        return 0

    @pytest.fixture
    def source(self) -> str | None:
        return "shelf"


@pytest.mark.cluster
class TestFault(FaultContract):
    @pytest.fixture
    def fault(self, acme: Path) -> Lasting:
        from acme_dps.faults import Stutter

        fault: Lasting = Stutter("server-0", AtUpdates(1), 0.3)
        return fault


# -- what breaks a contract ------------------------------------------------------------------------


@dataclass(frozen=True)
class InPlace:
    """Writes into the weights."""

    slots: ClassVar[tuple[str, ...]] = ()

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        values -= gradient
        return values, {}


@dataclass(frozen=True)
class Widening:
    """Returns float64, and forgets `out`."""

    slots: ClassVar[tuple[str, ...]] = ()

    def step(
        self,
        values: Array,
        gradient: Array,
        slots: Mapping[str, Array],
        t: int,
        scale: float,
        out: Array | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        return values - np.float64(0.1) * gradient.astype("float64"), {}


@dataclass(frozen=True)
class Counting:
    """Decides by how often it was asked."""

    asked: list[int] = field(default_factory=list)
    feedback: ClassVar[bool] = True

    def selected(self, gradient: Array, sending: Sending) -> Array:
        self.asked.append(1)
        return np.full(gradient.size, len(self.asked) % 2 == 0)


def test_a_rule_that_writes_into_the_weights_is_noticed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        RuleContract().test_a_step_writes_into_nothing_it_is_given_and_keeps_the_dtype(
            InPlace(), "float32"
        )


def test_a_rule_of_another_dtype_is_noticed() -> None:
    contract: Any = RuleContract()
    with pytest.raises(AssertionError):
        contract.test_a_step_writes_into_nothing_it_is_given_and_keeps_the_dtype(
            Widening(), "float32"
        )
    with pytest.raises(AssertionError):
        contract.test_equal_steps_are_equal_bit_by_bit_wherever_they_are_put(Widening())


def test_a_filter_with_a_memory_is_noticed() -> None:
    with pytest.raises(AssertionError):
        FilterContract().test_a_mask_depends_on_nothing_but_what_the_filter_is_given([Counting()])


@message
@dataclass(frozen=True)
class Failing(Durability):
    """Fails in one of the things that it is asked for."""

    where: str
    how: str

    def is_restorable(self, stored: Collection[Endpoint], stores: Collection[Endpoint]) -> bool:
        return True

    def persistence(self, context: ServerContext) -> Persistence:
        _fail_in(self, "persistence")
        return FailingPersistence(self)


class FailingPersistence(NoPersistence):
    immediate = False

    def __init__(self, wanted: Failing) -> None:
        self._wanted = wanted

    async def begin(self, epoch: int, state: ShardState) -> None:
        _fail_in(self._wanted, "begin")

    async def commit(self, epoch: int, state: ShardState) -> None:
        _fail_in(self._wanted, "commit")

    async def restore(self, epoch: int, cut: int) -> ShardState:
        _fail_in(self._wanted, "restore")
        raise StoreUnavailable("nothing is kept")


def _fail_in(wanted: Failing, where: str) -> None:
    if wanted.where == where:
        error = StoreUnavailable if wanted.how == "refuses" else ZeroDivisionError
        raise error(f"as it happens in {where}")


@pytest.mark.parametrize("where", ["persistence", "begin", "commit", "restore"])
@pytest.mark.parametrize("how", ["refuses", "has a defect"])
def test_what_a_durability_raises_is_told(where: str, how: str) -> None:
    failing, contract = Failing(where, how), DurabilityContract()
    if how == "refuses":
        with pytest.raises((TimeoutError, ShardUnavailable)) as refused:
            contract.test_where_it_came_back_from_is_recorded(failing, "initial")
        told = [str(refused.value), *refused.value.__notes__]
        assert any(f"as it happens in {where}" in text for text in told), told
    else:
        with pytest.raises(ZeroDivisionError, match=f"as it happens in {where}"):
            contract.test_where_it_came_back_from_is_recorded(failing, "initial")
