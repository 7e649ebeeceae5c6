"""What tests of one's own can use: a virtual cluster with faults, and contracts for extensions."""

from __future__ import annotations

try:
    import pytest
except ImportError as error:
    raise ImportError(
        "dps.testing needs pytest, which is not installed: pip install pytest"
    ) from error

pytest.register_assert_rewrite("dps.testing.contracts")  # before any of it is imported

from dps.testing.faults import Cut, Delay, Kill, Pause, Slow  # noqa: E402 - after pytest
from dps.testing.virtual_cluster import VirtualCluster  # noqa: E402

__all__ = ["Cut", "Delay", "Kill", "Pause", "Slow", "VirtualCluster"]
