"""Damages the files of a recorded experiment, and runs `dps` on them in this process."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from unittest import mock

from flows.cli import main


@dataclass(frozen=True)
class Ended:
    """What a command has come to; `trace` is the traceback that it ended with, if it did.

    `seconds` are those of the processor: what else is at work on this machine does not count.
    """

    arguments: tuple[str, ...]
    code: int
    out: str
    err: str
    trace: str
    seconds: float


@contextmanager
def working_in(here: Path) -> Iterator[None]:
    """Be in a working directory without a tracking server, and undo what `main` sets."""
    before, umask = Path.cwd(), os.umask(0o077)
    handler = signal.getsignal(signal.SIGTERM)
    os.chdir(here)
    try:
        with mock.patch.dict(os.environ):
            os.environ.pop("MLFLOW_TRACKING_URI", None)
            yield
    finally:
        os.chdir(before)
        os.umask(umask)
        signal.signal(signal.SIGTERM, handler)


def dps(*arguments: str) -> Ended:
    """Run a command as the console script does."""
    out, err, code, trace = StringIO(), StringIO(), 0, ""
    began = time.process_time()
    argv = mock.patch.object(sys, "argv", ["dps", *arguments])
    with argv, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
        except Exception:  # noqa: BLE001 (this is what is looked for)
            trace = traceback.format_exc()
    seconds = time.process_time() - began
    # As a terminal would get it: what cannot be encoded ends the command there.
    out.getvalue().encode(), err.getvalue().encode()
    return Ended(arguments, code, out.getvalue(), err.getvalue(), trace, seconds)


# -- bytes -------------------------------------------------------------------------------------


def flipped(data: bytes, rng: random.Random) -> bytes:
    """One bit is another."""
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def cut(data: bytes, rng: random.Random) -> bytes:
    """The end is missing."""
    return data[: rng.randrange(len(data))]


def garbled(data: bytes, rng: random.Random) -> bytes:
    """A stretch of bytes is missing, zeros, others, or there twice."""
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice([1, 2, 7, 64, 512, 4096]))
    here = data[start:end]
    there = rng.choice([b"", bytes(len(here)), rng.randbytes(len(here)), here + here])
    return data[:start] + there + data[end:]


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (flipped, cut, garbled)
