"""Suites that every rule, filter, durability, workload, data set and fault must pass.

Derive a class whose name begins with ``Test`` from one of them, and override the fixture that
returns the object under test.
"""

import pytest

pytest.register_assert_rewrite(  # before any of them is imported
    *(
        f"{__name__}.{suite}"
        for suite in ("datasets", "durabilities", "faults", "filters", "rules", "workloads")
    )
)
