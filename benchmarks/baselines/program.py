"""Run the program of a baseline, and kill one of its processes once.

The process gets a SIGKILL as soon as the trace has a number of applied gradients. The kill counts
if the process is seen to be gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.baselines.task import TRACE_FILE, Task
from dps.errors import DpsError

LOG_FILE = "program.log"
POLL_SECONDS = 0.002
Victim = Literal["server", "worker"]
PROOF_SECONDS = 5.0
# As on the nodes of dps: there are as many processes as cores, or more.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Kill:
    """A process that was killed.

    Attributes
    ----------
    t
        Time in seconds since the Unix epoch.
    pid
        Process id.
    version
        Number of gradients in the trace at that time.
    gone
        Whether the process ended within `PROOF_SECONDS`.
    """

    t: float
    pid: int
    version: int
    gone: bool


@dataclass(frozen=True, slots=True)
class Ran:
    """The run of a program.

    Attributes
    ----------
    kill
        The kill; None: there was none.
    unfinished
        Why it did not finish (time limit, or failure after the kill) with its last output; "": it
        finished.
    """

    kill: Kill | None
    unfinished: str = ""


def run(
    module: str, task: Task, kill_at: int | None, victim: Victim = "server", delay: float = 0.0
) -> Ran:
    """Run a baseline to its end or its time limit.

    A process is killed `delay` seconds after `kill_at` gradients were applied: the "server", which
    applied the last one, or the "worker" that began last.

    Raises
    ------
    DpsError
        The program failed without a kill. Its output is in `program.log` in its folder; the message
        has the last lines.
    """
    until = time.monotonic() + task.time_limit
    with (task.path / LOG_FILE).open("wb") as log:
        program = subprocess.Popen(
            [sys.executable, "-m", module, task.folder],
            env=os.environ | ONE_THREAD,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    killed = None
    try:
        killed = (
            None if kill_at is None else strike(program, task.path, kill_at, until, victim, delay)
        )
        code = program.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Ran(killed, f"not done within {task.time_limit:g} s{_said(task)}")
    finally:
        if program.poll() is None:
            _end(psutil.Process(program.pid))
        program.wait()
    if not code:
        return Ran(killed)
    if killed is None:
        raise DpsError(f"{module}: ended with code {code}{_said(task)}")
    return Ran(killed, f"ended with code {code}{_said(task)}")


def strike(
    program: subprocess.Popen[bytes],
    folder: Path,
    kill_at: int,
    until: float,
    victim: Victim,
    delay: float,
) -> Kill | None:
    """Kill a process, as described at `run`; None if the program applied fewer gradients."""
    worker = 0
    for event in _followed(folder / TRACE_FILE, program, until):
        if event["event"] == "began":
            worker = event["pid"]
        elif event["version"] >= kill_at:
            break
    else:
        return None
    try:
        process = psutil.Process(event["pid"] if victim == "server" else worker)
        time.sleep(delay)
        now = time.time()
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return None
    return Kill(now, process.pid, event["version"], _gone(process))


def read_trace(folder: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, in order; none without a file."""
    path = folder / TRACE_FILE
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


# -- parts -------------------------------------------------------------------------------------


def _followed(
    path: Path, program: subprocess.Popen[bytes], until: float
) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace while the program runs, until its time limit."""
    path.touch()
    with path.open("rb") as trace:
        rest = b""
        while program.poll() is None and time.monotonic() < until:
            *lines, rest = (rest + trace.read()).split(b"\n")
            yield from (json.loads(line) for line in lines)
            time.sleep(POLL_SECONDS)


def _gone(process: psutil.Process) -> bool:
    until = time.monotonic() + PROOF_SECONDS
    while time.monotonic() < until:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(POLL_SECONDS)
    return False


def _end(program: psutil.Process) -> None:
    """Kill a program that was not waited for, and all processes that it has started."""
    for process in [program, *program.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _said(task: Task) -> str:
    lines = (task.path / LOG_FILE).read_text("utf-8", "replace").strip().splitlines()
    return f"; it wrote last: {' / '.join(lines[-3:])}" if lines else ""
