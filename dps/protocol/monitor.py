"""What the monitor of a host knows: which processes are there, and for how long one is stopped.

A monitor is a small process of its own, which the code of users cannot block
(`dps.cluster.monitor`). It imports nothing but this module and the standard library, so that it is
up in a few milliseconds: nothing may be imported here that is not part of that.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

# Of a process: it runs or could run; it is stopped by a signal, or hangs in the kernel; it ended.
State = Literal["running", "stopped", "gone"]


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

    halted: bool
    progress: Hashable


@dataclass(slots=True)
class _Watched:
    may_be_killed: bool
    last: Look | None = None
    halted_since: float | None = None
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
            if not look.halted or look != watched.last:
                watched.halted_since = now if look.halted else None
            watched.last = look
            if now >= watched.silent_until:
                since = watched.halted_since
                state: State = "running" if since is None else "stopped"
                seen.append(Sighting(number, state, 0.0 if since is None else now - since))
        return seen

    def may_kill(self, number: int, now: float, look: Look, seconds: float) -> bool:
        """Whether a process may be killed: it has been stopped for `seconds`, and still is."""
        watched = self._watched.get(number)
        if watched is None or not watched.may_be_killed or watched.halted_since is None:
            return False
        return look.halted and look == watched.last and now - watched.halted_since >= seconds
