"""The checks themselves: random schedules catch each of the deliberately broken variants."""

from __future__ import annotations

import pytest

from dps.sim.mutants import VARIANTS, hunt

BUDGET = 400


@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_variant_is_caught(name: str) -> None:
    assert hunt(VARIANTS[name], BUDGET) is not None
