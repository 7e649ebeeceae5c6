"""Fixtures for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for temporary files (TMPDIR), of a name that is short enough for sockets in it."""
    return tmp_path_factory.mktemp("s")
