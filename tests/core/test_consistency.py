"""What the consistency models take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dps.core.consistency import SSP
from dps.errors import ConfigurationError


@pytest.mark.parametrize("tau", [-1, 1.5, 2.0, "2", True, None], ids=repr)
def test_a_bound_that_is_no_number_of_updates_is_refused(tau: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"SSP: tau=.*, expected 0 or more whole updates"):
        SSP(tau)


def test_a_bound_of_another_type_of_whole_numbers_becomes_a_plain_one() -> None:
    assert type(SSP(np.int64(3)).tau) is int  # type: ignore[arg-type]
