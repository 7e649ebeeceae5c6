"""The contract of filters, for each that dps has, and for many at once."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import dps
from dps.core.blocks import Layout
from dps.core.consistency import ASP
from dps.core.filters.filter import Filter
from dps.core.rules.rule import UpdateRule
from dps.protocol.group import Group
from dps.protocol.recovery import Recovery
from dps.protocol.storage.manifest import describe
from dps.protocol.transport import Endpoint
from dps.protocol.wire import decode, encode
from tests.contracts.filters import PARAMS, FilterContract

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


def test_descriptions_that_were_kept_before_there_were_filters_are_read() -> None:
    group = Group("g", Layout.of(PARAMS, 2), dps.SGD(1.0), ASP(), Recovery(), Endpoint("", ""))
    (header,) = encode(replace(describe(group, 0, 1.0, "{}"), recovery=None))  # type: ignore[arg-type]
    kept = json.loads(header.tobytes())
    later = [kept["v"].pop() for _ in range(4)]  # the placement and `servers` came after filters
    assert later == [None, {"%": []}, None, {"%": []}]
    found = decode([np.frombuffer(json.dumps(kept).encode(), np.uint8)])
    assert found.filters == found.pull_filters == {}
