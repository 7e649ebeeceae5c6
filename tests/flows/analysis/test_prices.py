"""The price table: complete, sourced, and refused when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dps.core.names import NODE_ROLES
from dps.errors import ConfigurationError
from flows.analysis.prices import WAYS_TO_RENT, load_prices

ENTRY = {"usd": 1, "source": "somewhere", "date": "2026-01-01"}
TABLE = {
    **{way: dict.fromkeys(NODE_ROLES, ENTRY) for way in WAYS_TO_RENT},
    "gb_moved": {**ENTRY, "usd": 0.5},
    "gb_month_stored": ENTRY,
}


def test_packaged_table_prices_every_role_with_a_dated_source() -> None:
    prices = load_prices()
    for hour in (prices.node_hour, prices.spot_hour, prices.fixed_hour):
        assert set(hour) == set(NODE_ROLES)
        assert hour["server"] > 0
        assert hour["evaluator"] == 0
    assert prices.gb_moved > 0
    assert prices.gb_month_stored > 0
    assert set(prices.sources) > {"gb_moved", "node_hour.server"}
    assert all("(20" in source for source in prices.sources.values())


def test_another_table_may_be_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(TABLE))
    prices = load_prices(path)
    assert prices.gb_moved == 0.5
    assert prices.sources["gb_moved"] == "somewhere (2026-01-01)"


@pytest.mark.parametrize(
    "entry", [None, 5, {"usd": -1, "source": "x", "date": 1}, {"usd": 1}, {"usd": True}]
)
def test_an_incomplete_price_is_refused(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**TABLE, "gb_moved": entry}))
    with pytest.raises(ConfigurationError, match=r"mine.yaml: gb_moved needs usd"):
        load_prices(path)


def test_an_unreadable_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_prices(tmp_path / "missing.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_prices(tmp_path / "bad.yaml")
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigurationError, match="needs usd"):
        load_prices(tmp_path / "empty.yaml")
