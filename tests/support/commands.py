"""The command `dps` in processes of its own: one that runs meanwhile, and one that is answered."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

DPS = (sys.executable, "-m", "flows.cli")


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


def answered(here: Path, words: Sequence[str], answers: Sequence[str]) -> tuple[str, str]:
    """Run a command that asks in a terminal; return what it wrote to stdout and to stderr."""
    terminal, end = pty.openpty()
    with subprocess.Popen(
        [*DPS, *words],
        cwd=here,
        stdin=end,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as asking:
        os.write(terminal, "".join(f"{answer}\n" for answer in answers).encode())
        out, err = asking.communicate(timeout=60)
    os.close(terminal)
    os.close(end)
    assert asking.returncode == 0, err
    return out, err
