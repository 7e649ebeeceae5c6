"""What the monitor of a host knows: which processes are there, and for how long one is stopped.

A monitor is a small process of its own, which the code of users cannot block
(`dps.cluster.monitor`). It imports nothing but this module and the standard library, so that it is
up in a few milliseconds: nothing may be imported here that is not part of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

# Of a process: it runs or could run; it is stopped by a signal, or hangs in the kernel; it ended.
State = Literal["running", "stopped", "gone"]
# Whether it is stopped by a signal, or waits in the kernel, where no signal reaches it.
Halted = Literal["no", "stopped", "hung"]

# A slow disk keeps a process in the kernel for some seconds, but not for ever.
HUNG_SECONDS = 4.0
STOPPED_AFTER: dict[Halted, float] = {"no": math.inf, "stopped": 0.0, "hung": HUNG_SECONDS}


class Sighting(NamedTuple):
    """What a monitor sees of a process, by its `number`, and for how many `seconds` so far."""

    number: int
    state: State
    seconds: float = 0.0


class Look(NamedTuple):
    """A process at one moment.

    `progress` is any value that changes whenever the process has run: a process that is stopped and
    continued again and again is slow, not stopped.
    """

    halted: Halted
    progress: Hashable


@dataclass(slots=True)
class _Watched:
    may_be_killed: bool
    last: Look | None = None
    halted_since: float = math.inf
    silent_until: float = 0.0


class Monitor:
    """The processes that one monitor watches, by number. Not thread-safe."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._numbers = 0

    @property
    def numbers(self) -> list[int]:
        """The numbers of the processes that are watched."""
        return list(self._watched)

    def add(self, may_be_killed: bool) -> int:
        """Watch one more process; return its number, which no other has had."""
        self._numbers += 1
        self._watched[self._numbers] = _Watched(may_be_killed)
        return self._numbers

    def allow(self, number: int, may_be_killed: bool) -> None:
        """Say whether a process may be killed, from now on."""
        self._watched[number].may_be_killed = may_be_killed

    def remove(self, number: int) -> None:
        """Watch a process no more."""
        self._watched.pop(number, None)

    def silence(self, number: int, until: float) -> None:
        """Say nothing of a process before a time: it is to seem unreachable."""
        self._watched[number].silent_until = until

    def look(self, now: float, at: Callable[[int], Look]) -> list[Sighting]:
        """Look at every process; return what is seen of those that are not silenced."""
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
        """Whether a process may be killed: it has been stopped for `seconds`, and still is."""
        watched = self._watched.get(number)
        if watched is None or not watched.may_be_killed:
            return False
        return look == watched.last and now - watched.halted_since >= seconds
