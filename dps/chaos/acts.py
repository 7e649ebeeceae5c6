"""A fault from its strike to its end, on one node or on several at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dps.chaos.disturb import Disturber
from dps.chaos.kill_and_pause import Striker
from dps.chaos.network import Remote
from dps.cluster.backends.base import Cluster
from dps.cluster.platform import Running, Timer, platform_of
from dps.core.faults.plan import Corrupt, Disturbance, Fault, Kill, Pause, is_optional, told
from dps.core.names import replacement
from dps.errors import DpsError
from dps.events import CapacityRestored, Event, FaultSkipped, NodeJoined, Sink
from dps.protocol.transport import Clock

if TYPE_CHECKING:
    from dps.cluster.driver.parameter_server import ParameterServer

HOLD_SECONDS = 0.5


class Acts:
    """Has faults carried out, and takes back what lasts for a time. Used by one thread, and timers.

    Kills and pauses are done when `strike` returns. Other faults take a while to be proven, which
    must not keep the next one waiting: they begin in a thread of their own.
    """

    def __init__(self, cluster: Cluster, ps: ParameterServer, clock: Clock, emit: Sink) -> None:
        self._nodes = cluster
        self._ps = ps
        self._platform = platform_of(cluster.client)
        self._clock = clock
        self._emit = emit
        self._striker = Striker(cluster, clock, emit)
        self._disturber = Disturber(cluster, ps, clock, emit)
        self._took: dict[int, float] = {}
        self._beginning: dict[int, Running] = {}
        self._awaited: dict[str, int] = {}
        self._paused: set[tuple[int, str]] = set()
        self._disturbing: set[int] = set()
        self._timers: list[Timer] = []
        self._starting = threading.Lock()

    def close(self) -> None:
        """Undo at once what is still to be undone, but for nodes that are to come back."""
        for beginning in self._beginning.values():
            beginning.join()
        for timer in self._timers:
            timer.cancel()
            timer.join()  # one that has begun to start a node ends first
        for number, node in sorted(self._paused):
            self._resume(number, node)
        for number in sorted(self._disturbing):
            self._end(number)

    def note(self, event: Event) -> None:
        """Take note of an event of the group: it may be evidence, or a node that has joined."""
        if isinstance(event, NodeJoined) and event.node in self._awaited:
            self._emit(CapacityRestored(event.t, self._awaited.pop(event.node), event.node))
        self._disturber.note(event)

    def took(self, number: int) -> float | None:
        """When a fault had taken effect; None if it has not."""
        return self._took.get(number)

    @property
    def any_took(self) -> bool:
        """Whether any fault has taken effect."""
        return bool(self._took)

    def is_beginning(self, number: int) -> bool:
        """Whether a fault was struck and has not proven its effect yet."""
        return number in self._beginning and self._beginning[number].is_alive()

    def strike(
        self, number: int, fault: Fault, names: Sequence[str], updates: int, held: bool = False
    ) -> None:
        """Carry a fault out on these nodes; `updates` were applied by now.

        `held` says that `hold` has stopped them. Of those that an optional fault would hit, only
        who is there is hit.
        """
        if is_optional(fault.when) and not isinstance(fault, Corrupt):
            names = [name for name in names if self._can_be_hit(name, fault)]
            if not names:
                self.skip(number, fault)
                return
        if not isinstance(fault, Kill | Pause):
            work = partial(self._disturb, number, fault, names, updates)
            self._beginning[number] = self._platform.start(work, f"dps-fault-{number}")
            return
        if isinstance(fault, Kill) and fault.by == "host":
            names = sorted({other for name in names for other in self._nodes.on_host_of(name)})
        if any(self._at_once(partial(self._hit, number, fault, updates, held), names)):
            self._took[number] = self._clock.now()

    def miss(self, number: int, target: str, reason: str) -> None:
        """Record that a fault did not happen."""
        self._striker.miss(number, target, reason)

    def skip(self, number: int, fault: Fault) -> None:
        """Record that nobody was there for a fault that need not happen."""
        reason = "nobody was there to be hit"
        self._emit(FaultSkipped(self._clock.now(), number, told(fault.target), reason))

    def _can_be_hit(self, name: str, fault: Fault) -> bool:
        there = name in self._nodes.pids and not self._nodes.gone(name, 0.0)
        return there and not (isinstance(fault, Pause) and self._nodes.stopped(name, 0.0))

    def hold(self, names: Iterable[str]) -> bool:
        """Stop processes that are about to be struck, so that nothing changes until they are."""
        held = list(names)
        try:
            for name in held:
                self._nodes.pause(name)
        except (KeyError, ProcessLookupError):
            return False
        return all(self._nodes.stopped(name, HOLD_SECONDS) for name in held)

    def release(self, names: Iterable[str]) -> None:
        """Let processes go on that were held."""
        for name in names:
            with contextlib.suppress(KeyError, ProcessLookupError):
                self._nodes.resume(name)

    def _hit(self, number: int, fault: Kill | Pause, updates: int, held: bool, node: str) -> bool:
        if isinstance(fault, Kill):
            struck = self._striker.kill(number, node, updates, fault.by)
            if struck and fault.by == "requeue":
                self._awaited[replacement(node)] = number
            elif struck and fault.back_after is not None:
                self._later(fault.back_after, self._bring_back, number, node)
            return struck
        if fault.host and not self._hide(number, node, fault.seconds):
            return False
        struck = self._striker.pause(number, node, updates, held)
        if struck:
            self._paused.add((number, node))
            self._later(fault.seconds, self._come_back, number, node)
        return struck

    def _hide(self, number: int, node: str, seconds: float) -> bool:
        """Have the monitor of a node's host say nothing of the node for a while."""
        member = next((each for each in self._ps.nodes if each.name == node), None)
        if member is None:
            return self._striker.miss(number, node, "there is no such process")
        remote = Remote(self._nodes.client, member.address, self._ps.group.coordinator)
        try:
            remote.hide(seconds)
        except (OSError, TimeoutError, KeyError) as error:
            return self._striker.miss(number, node, f"its monitor cannot be silenced: {error}")
        return True

    def _come_back(self, number: int, node: str) -> None:
        """Resume a paused process, or replace it if its monitor has killed it."""
        self._resume(number, node)
        if self._nodes.gone(node, 0.0):
            self._bring_back(number, node)

    def _disturb(self, number: int, fault: Disturbance, names: Sequence[str], updates: int) -> None:
        began = self._clock.monotonic()
        begin = partial(self._disturber.begin, number, fault, updates=updates)
        if any(self._at_once(begin, names)):
            self._took[number] = self._clock.now()
            if not isinstance(fault, Corrupt):
                self._disturbing.add(number)
                left = fault.seconds - (self._clock.monotonic() - began)  # the proof took time
                self._later(max(0.0, left), self._end, number)

    def _later(self, seconds: float, act: Callable[..., None], *what: object) -> None:
        self._timers.append(self._platform.after(seconds, partial(act, *what)))

    def _bring_back(self, number: int, node: str) -> None:
        name = replacement(node)
        with self._starting:
            self._awaited[name] = number
            try:
                self._nodes.start(replace(self._nodes.spec(node), name=name))
            except (DpsError, OSError) as error:
                del self._awaited[name]
                self.miss(number, node, f"nothing takes its place: {error}")

    def _resume(self, number: int, node: str) -> None:
        self._paused.discard((number, node))
        self._striker.resume(number, node)

    def _end(self, number: int) -> None:
        self._disturbing.discard(number)
        self._disturber.end(number)

    def _at_once(self, act: Callable[[str], bool], names: Sequence[str]) -> list[bool]:
        """Do something to several nodes at the same time."""
        return [act(names[0])] if len(names) == 1 else self._platform.at_once(act, names)
