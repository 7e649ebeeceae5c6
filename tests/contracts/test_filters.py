"""The contract of filters, for each that dps has, and for many at once."""

from __future__ import annotations

import pytest

import dps
from dps.core.filters.filter import Filter
from dps.core.rules.rule import UpdateRule
from dps.recovery.strategy import Recovery
from tests.contracts.filters import FilterContract

FILTERS: dict[str, list[Filter]] = {
    "significantly modified": [dps.SignificantlyModified(90.0, decay="1/t")],
    "KKT": [dps.KKT(60.0)],
    "random skip": [dps.RandomSkip(0.7)],
    "top-k": [dps.TopK(0.05)],
    "bf16": [dps.Quantise("bf16")],
    "int8": [dps.Quantise("int8")],
    "lossless": [dps.Lossless()],
    "all at once": [
        dps.RandomSkip(0.2),
        dps.SignificantlyModified(2.0),
        dps.TopK(0.5),
        dps.Quantise("bf16"),
        dps.Lossless(),
    ],
}


class TestFilters(FilterContract):
    @pytest.fixture(params=FILTERS.values(), ids=list(FILTERS))
    def filters(self, request: pytest.FixtureRequest) -> list[Filter]:
        chosen: list[Filter] = request.param
        return chosen

    @pytest.fixture
    def rule(self, filters: list[Filter]) -> UpdateRule:
        needs_l1 = any(isinstance(f, dps.KKT) for f in filters)
        return dps.Proximal(0.5, dps.L1(60.0)) if needs_l1 else dps.SGD(1.0)

    @pytest.mark.slow
    def test_a_worker_that_leaves_in_order_has_sent_everything_once(
        self, filters: list[Filter], rule: UpdateRule, recovery: Recovery
    ) -> None:
        super().test_a_worker_that_leaves_in_order_has_sent_everything_once(filters, rule, recovery)


def test_every_filter_that_can_be_imported_is_here() -> None:
    kinds = {type(f) for filters in FILTERS.values() for f in filters}
    public = {getattr(dps, name) for name in dps.__all__ if name not in ("ParameterServer",)}
    selections = {c for c in public if hasattr(c, "selected")} - {dps.Selection}
    assert selections | {dps.Quantise, dps.Lossless} == kinds
