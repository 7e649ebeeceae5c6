"""Fault plans: what cannot happen is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dps.core.faults import Fault, Kill, Pause
from dps.errors import ConfigurationError


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (lambda: Kill("server-0", 0), "kill of server-0: at_updates=0"),
        (lambda: Kill("server-0", 1, -0.5), "kill of server-0: back_after=-0.5"),
        (lambda: Pause("server-0", 0), "pause of server-0: at_updates=0"),
        (lambda: Pause("server-0", 1, 0.0), "pause of server-0: seconds=0"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused(fault: Callable[[], Fault], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        fault()
