"""What tests of rules, filters, durabilities, workloads, data and faults of one's own can use."""

from __future__ import annotations

try:
    import pytest
except ImportError as error:
    raise ImportError(
        "dps.testing needs pytest, which is not installed: pip install pytest"
    ) from error

pytest.register_assert_rewrite("dps.testing.contracts")  # before any of it is imported
