"""The contracts, as a package of another maker uses them."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from dps.core.filters.filter import Filter
from dps.core.rules.rule import UpdateRule
from dps.faults import AtUpdates, Lasting
from dps.recovery.durability import Durability
from flows.workloads import DatasetShape, DatasetSource, Workload
from tests.contracts.datasets import DatasetContract
from tests.contracts.durabilities import DurabilityContract
from tests.contracts.faults import FaultContract
from tests.contracts.filters import FilterContract
from tests.contracts.rules import RuleContract
from tests.contracts.workloads import WorkloadContract

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
