"""Damages the files of a recorded experiment, and runs `dps` on them in this process."""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from dps.core.checksum import sealed, unsealed
from flows.cli import main

DEEP = "[" * 100_000
# Values that no run has written, in the places of those that it has.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 1.5, 2**31, 2**63, 10**30, 10**400, 1e308, -1e308),
    *(float("nan"), float("inf"), -float("inf")),
    *("", "x", "\ud800", "\x1b[31mred", "a\nb", "../..", "/", "x" * 100_000, "NaN", "1"),
    *([], [[]], [None], ["x"], [1, "x"], [1] * 1000, [float("nan")] * 3),
    *({}, {"a": 1}, {"": None}, {"kind": "none"}, [{}], {"a": {"b": [{}]}}),
)


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


def database_with_a_name_that_is_no_text(path: Path) -> None:
    """SQLite quotes the name when it refuses the file, in a message that cannot be decoded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE runs (x)")
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET name = CAST(x'8d' AS TEXT), sql = 'CREATE'")
        connection.commit()


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (flipped, cut, garbled)


# -- values ------------------------------------------------------------------------------------


def changed(text: str, rng: random.Random) -> str:
    """Return JSON in which one value is another one, missing, or somewhere else."""
    if rng.random() < 0.02:
        return text.replace(":", f":{DEEP}", 1)
    value = json.loads(text)
    places = list(_places(value))
    if not places:  # there is nothing in it: let there be something
        return json.dumps([rng.choice([None, 0, "odd", {}, []])])
    _change(rng.choice(places), rng)
    return json.dumps(value, separators=(",", ":"))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    entries: Any = ()
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value))[:30]
    for key, inner in entries:
        yield value, key
        yield from _places(inner)


def _change(place: tuple[Any, Any], rng: random.Random) -> None:
    container, key = place
    match rng.randrange(8):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[f"{key}x"] = container.pop(key)
        case 1:
            container.insert(key, rng.choice(ODD))
        case 2 if isinstance(container, dict):
            other = rng.choice(list(container))
            container[key], container[other] = container[other], container[key]
        case 3 if isinstance(container[key], int | float):
            container[key] *= rng.choice([-1, 2, 1000, 10**9, 10**18])
        case 4:
            container[key] = [container[key]]
        case _:
            container[key] = rng.choice(ODD)


def with_changed_line(data: bytes, rng: random.Random, seal: bool) -> bytes:
    """A record of which a line says something else, with checksums as of now or with none."""
    lines = [unsealed(line)[0].decode() for line in data.splitlines()]
    at = rng.choice([0, rng.randrange(len(lines))])  # the first has the settings
    lines[at] = changed(lines[at], rng)
    return "".join(f"{sealed(line) if seal else line}\n" for line in lines).encode()


def without_checksums(data: bytes) -> bytes:
    """A record as they were before lines had checksums."""
    return b"".join(unsealed(line)[0] + b"\n" for line in data.splitlines())
