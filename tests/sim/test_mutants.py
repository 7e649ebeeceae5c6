"""The checks themselves: random schedules catch each of the deliberately broken variants."""

from __future__ import annotations

import pytest

from dps.sim.draw import named
from dps.sim.mutants import VARIANTS, hunt

BUDGET = 100
# Schedules known to catch what takes longer to find; `dps simulate --mutants` finds all anew.
KNOWN = {
    "epoch not checked again": "chain(2), SSP(1):8675309000244:0,1,3",
    "lease counted from the reply": "none, BSP:11",
    "lease not checked again": "worker cache + continue:7",
    "mailbox cleared before apply": "chain(3) + mailbox:22",
    "rows of summed updates forgotten": "chain(2), aggregated:6",
    "non-atomic publish": "checkpoint, BSP:59",
    "torn checkpoint accepted": "checkpoint, seconds:16",
    "workers forgotten after a loss": "checkpoint, BSP:32",
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_broken_variant_is_caught(name: str) -> None:
    known = [named(KNOWN[name])] if name in KNOWN else []
    assert hunt(VARIANTS[name], BUDGET, known) is not None
