"""The price table: complete and sourced."""

from __future__ import annotations

from dps.core.names import NODE_ROLES
from flows.metrics.prices import load_prices


def test_packaged_table_prices_every_role_with_a_dated_source() -> None:
    prices = load_prices()
    for hour in (prices.node_hour, prices.fixed_hour):
        assert set(hour) == set(NODE_ROLES)
        assert hour["server"].usd > 0
        assert hour["evaluator"].usd == 0
        assert "(20" in str(hour["server"])
    assert prices.gb_moved.usd > 0
    assert prices.gb_month_stored.usd > 0
