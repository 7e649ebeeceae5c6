"""The state of a host's monitor: the processes that it watches, and since when each is stopped.

A monitor is a separate process, which user code cannot block (`dps.cluster.monitor`). It imports
only the standard library and this module, which does the same, and so starts in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

# It runs or could run; it is stopped by a signal, or hangs in the kernel; it has ended.
State = Literal["running", "stopped", "gone"]
# "stopped" by a signal, or "hung": waiting in the kernel, where no signal reaches it.
Halted = Literal["no", "stopped", "hung"]

# A slow disk may keep a process in the kernel for some seconds.
HUNG_SECONDS = 4.0
STOPPED_AFTER: dict[Halted, float] = {"no": math.inf, "stopped": 0.0, "hung": HUNG_SECONDS}


class Sighting(NamedTuple):
    """A report on the process with this `number`: its `state`, and the `seconds` it is stopped."""

    number: int
    state: State
    seconds: float = 0.0


class Look(NamedTuple):
    """A process at one moment; `progress` is any value that changes whenever it has run."""

    halted: Halted
    progress: Hashable  # so a process that is stopped and continued in turns is slow, not stopped


@dataclass(slots=True)
class _Watched:
    may_be_killed: bool
    last: Look | None = None
    halted_since: float = math.inf
    silent_until: float = 0.0


class Monitor:
    """The processes that a monitor watches, by number. Not thread-safe."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._numbers = 0

    def add(self, may_be_killed: bool) -> int:
        """Watch another process; return its number, which is never used again."""
        self._numbers += 1
        self._watched[self._numbers] = _Watched(may_be_killed)
        return self._numbers

    def allow(self, number: int, may_be_killed: bool) -> None:
        """Set whether a process may be killed."""
        self._watched[number].may_be_killed = may_be_killed

    def remove(self, number: int) -> None:
        """Stop watching a process."""
        self._watched.pop(number, None)

    def silence(self, number: int, until: float) -> None:
        """Do not report a process before the time `until`, so that it seems unreachable."""
        self._watched[number].silent_until = until

    def look(self, now: float, at: Callable[[int], Look]) -> list[Sighting]:
        """Look at every process; return a report on each that is not silenced."""
        seen = []
        for number, watched in self._watched.items():
            look = at(number)
            if look != watched.last:
                watched.halted_since = now + STOPPED_AFTER[look.halted]
            watched.last = look
            if now >= watched.silent_until:
                seconds = max(0.0, now - watched.halted_since)
                stopped = now >= watched.halted_since
                seen.append(Sighting(number, "stopped" if stopped else "running", seconds))
        return seen

    def may_kill(self, number: int, now: float, look: Look, seconds: float) -> bool:
        """Whether a process may be killed and has been stopped for `seconds`, until now."""
        watched = self._watched.get(number)
        if watched is None or not watched.may_be_killed:
            return False
        return look == watched.last and now - watched.halted_since >= seconds
