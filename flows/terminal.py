"""Owns what the commands take from their surroundings: the terminal, and the tracking store."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_OFF_TERMINAL = 120


def console() -> Console:
    """Return where tables and progress go."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH_OFF_TERMINAL
    return Console(width=width, highlight=False)


def store() -> str | None:
    """Return the URI of the tracking store that the environment names, if it names one."""
    return os.environ.get("MLFLOW_TRACKING_URI") or None
