"""Fixtures for all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Have Ctrl-C reach what tests start, also if these run in the background of a script.

    A shell without job control starts what is in the background with SIGINT ignored, and every
    process below inherits that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for temporary files (TMPDIR), of a name that is short enough for sockets in it."""
    return tmp_path_factory.mktemp("s")
