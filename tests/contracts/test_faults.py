"""The contract of disturbances, for each that goes on without files to write."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps.faults import AtUpdates, Cut, Lasting, Slow
from dps.recovery.strategy import Recovery
from tests.contracts.faults import FaultContract

pytestmark = pytest.mark.cluster

NOW = AtUpdates(1)


class TestFaults(FaultContract):
    @pytest.fixture(
        params=[
            Slow("worker-0", NOW, factor=2.0, seconds=0.8),
            Cut("worker-0", NOW, seconds=0.3),
        ],
        ids=lambda fault: fault.kind,
    )
    def fault(self, request: pytest.FixtureRequest) -> Lasting:
        chosen: Lasting = request.param
        return chosen

    @pytest.mark.slow
    def test_it_has_an_effect_that_is_proven_and_taken_back(
        self, fault: Lasting, recovery: Recovery, tmp_path: Path
    ) -> None:
        super().test_it_has_an_effect_that_is_proven_and_taken_back(fault, recovery, tmp_path)
