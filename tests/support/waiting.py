"""What tests of several layers share: waiting for a state instead of for a guessed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSE_SECONDS = 0.01


def eventually(predicate: Callable[[], T], seconds: float) -> T:
    """Ask again and again until `predicate()` is true; return what it returned.

    Raises
    ------
    AssertionError
        It was not true within `seconds`.
    """
    until = time.monotonic() + seconds
    while not (found := predicate()):
        if time.monotonic() > until:
            raise AssertionError(f"still {found!r} after {seconds:g} s")
        time.sleep(PAUSE_SECONDS)
    return found
