"""The command `dps` in a process of its own, run to its end or meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

DPS = (sys.executable, "-m", "flows.cli")


def dps(here: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, whatever that is."""
    return subprocess.run(
        [*DPS, *words],
        cwd=here,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


class Command:
    """A command that runs while a test does something; use as a context manager.

    Leaving it waits for its end. If the test has failed, all its processes are killed before.
    """

    def __init__(self, here: Path, words: Sequence[str], environment: Mapping[str, str]) -> None:
        self.here = here
        self.environment = dict(environment)
        self._words = words
        self._out = here / "told"

    def __enter__(self) -> Self:
        with self._out.open("w") as out:
            self.process = subprocess.Popen(
                [*DPS, *self._words],
                cwd=self.here,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def told(self) -> str:
        """What it has said so far."""
        return self._out.read_text()
