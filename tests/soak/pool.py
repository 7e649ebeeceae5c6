"""The cluster of the soak: one for all rounds, whose lost nodes are replaced, and its health.

Memory and file descriptors of the driver, the scheduler and every node are measured between rounds;
those that have lived for long must not have grown.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import psutil

from dps.cluster.backends.local import LocalCluster
from dps.cluster.names import NodeSpec, resource_of
from dps.core.names import role_of
from tests.soak.counting import require

NODES = {"spare": 8, "store": 2, "mailbox": 2, "worker": 3}
PRELOAD = ("dps.cluster.driver.parameter_server", "tests.soak.counting")
START_SECONDS = 60.0
LOOK_SECONDS = 0.02
MIN_SAMPLES = 9
MEBIBYTE = 1 << 20
# What caches and the allocator may still take after a third of the time.
GROWTH_BYTES = 24 * MEBIBYTE
GROWTH_SHARE = 0.1
GROWTH_FILES = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process holds at a moment when no group is up."""

    memory: int
    files: int


class Pool:
    """Nodes by kind, all of them interchangeable within it; used as a context manager."""

    def __init__(self) -> None:
        self._numbers = {kind: count() for kind in NODES}
        names = [self._name(kind) for kind, number in NODES.items() for _ in range(number)]
        self.cluster = LocalCluster([NodeSpec(n, resource_of(n)) for n in names], PRELOAD)
        self._samples: defaultdict[str, list[Sample]] = defaultdict(list)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cluster.close()

    def replace(self, lost: str) -> str:
        """Start a fresh node of the same kind; return its name."""
        name = self._name(role_of(lost))
        self.cluster.start(NodeSpec(name, resource_of(name)))
        return name

    def alive(self) -> list[str]:
        """The names of the nodes whose processes are there."""
        nodes = (name for name in self.cluster.pids if name != "scheduler")
        return [name for name in nodes if not self.cluster.gone(name, 0.0)]

    def fill(self) -> None:
        """Have as many nodes of each kind as at the start, all known to the scheduler.

        Raises
        ------
        Violation
            Nodes that run are still unknown after a time, or some that have ended are still known.
        """
        until = time.monotonic() + START_SECONDS
        while (known := self._known()) != (running := self._replenished()):
            require(time.monotonic() < until, _difference(running, known))
            time.sleep(LOOK_SECONDS)

    def _replenished(self) -> set[str]:
        """Start what is missing of each kind; return the names of all nodes that run."""
        alive = self.alive()
        missing = (
            kind
            for kind, number in NODES.items()
            for _ in range(number - sum(role_of(name) == kind for name in alive))
        )
        return {*alive, *(self.replace(kind) for kind in missing)}

    def measure(self) -> None:
        """Note what every process holds now."""
        pids = {name: self.cluster.pids[name] for name in ("scheduler", *self.alive())}
        for name, pid in {"driver": os.getpid(), **pids}.items():
            process = psutil.Process(pid)
            self._samples[name].append(Sample(process.memory_info().rss, _descriptors(pid)))

    def grown(self) -> list[str]:
        """Say which processes have grown over the later two thirds of a long life."""
        return [
            f"{name}: {told}"
            for name, samples in self._samples.items()
            if len(samples) >= MIN_SAMPLES and (told := _growth(samples))
        ]

    def held(self) -> str:
        """Say what the oldest processes held at first and at last."""
        longest = max(map(len, self._samples.values()), default=0)
        lines = []
        for name, samples in self._samples.items():
            if len(samples) >= max(2, longest // 2):
                first, last = samples[len(samples) // 3], samples[-1]
                lines.append(
                    f"  {name:<12} {len(samples):>4} samples  "
                    f"{first.memory / MEBIBYTE:>6.0f} → {last.memory / MEBIBYTE:.0f} MiB  "
                    f"{first.files:>4} → {last.files} files"
                )
        return "\n".join(lines)

    def _name(self, kind: str) -> str:
        return f"{kind}-{next(self._numbers[kind])}"

    def _known(self) -> set[str]:
        client = self.cluster.client
        workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
        return {str(info["name"]) for info in workers.values()}


def _difference(running: Set[str], known: Set[str]) -> str:
    missing, ended = sorted(running - known), sorted(known - running)
    return (
        f"start of all nodes: after {START_SECONDS:g} s the scheduler does not know of "
        f"{missing}, which run, and knows of {ended}, which have ended"
    )


def _descriptors(pid: int) -> int:
    """Count the open files of a process, without shared memory, which it keeps for reuse.

    Shared memory stays at its peak use; a leak of it would show in the memory of the process.
    """
    count = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed in the meantime
            count += not os.readlink(path).startswith("/memfd:dps")
    return count


def lives_long(name: str) -> bool:
    """Whether a node is to live for the whole soak: the first of each kind."""
    return name.endswith("-0")


def _growth(samples: Sequence[Sample]) -> str:
    third = len(samples) // 3
    before, after = samples[third : 2 * third], samples[2 * third :]
    memory = [median(s.memory for s in part) for part in (before, after)]
    files = [median(s.files for s in part) for part in (before, after)]
    if memory[1] - memory[0] > max(GROWTH_BYTES, GROWTH_SHARE * memory[0]):
        return f"memory grew from {memory[0] / MEBIBYTE:.0f} to {memory[1] / MEBIBYTE:.0f} MiB"
    if files[1] - files[0] > GROWTH_FILES:
        return f"open files grew from {files[0]:g} to {files[1]:g}"
    return ""


def require_flat(pool: Pool) -> None:
    """Raise `Violation` if a process has grown."""
    grown = pool.grown()
    require(not grown, "; ".join(grown))
