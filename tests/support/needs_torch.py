"""The marks of tests that need torch: skipped, with the reason, where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_torch = [
    pytest.mark.torch,
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed: make torch"),
]
