"""Fixtures for all tests."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says nothing on a busy machine.
settings.register_profile("dps", deadline=None)
settings.load_profile("dps")


def pytest_configure() -> None:
    """Have Ctrl-C reach what tests start, also if these run in the background of a script.

    A shell without job control starts what is in the background with SIGINT ignored, and every
    process below inherits that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among modules and tests while they are found: both last to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for temporary files (TMPDIR), of a name that is short enough for sockets in it."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB that is really full when that is written."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system can be mounted by the superuser only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def acme() -> Iterator[Path]:
    """The package acme-dps of another maker, which registers a kind in each group."""
    from tests.support.packages import THIRD_PARTY, installed

    with installed(THIRD_PARTY) as folder:
        yield folder
