"""Faults from their start to their end, on one node or several at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from dps.cluster.backends.base import Cluster
from dps.cluster.platform import Running, platform_of
from dps.core.names import replacement
from dps.errors import ConfigurationError, DpsError
from dps.events import (
    CapacityRestored,
    CheckpointFailed,
    Disturbed,
    Event,
    FaultMissed,
    FaultSkipped,
    Killed,
    NodeJoined,
    Paused,
    Resumed,
    Sink,
    Undisturbed,
)
from dps.faults import Fault, Kill, Lasting, Pause, Way
from dps.faults.effects import PROOF_SECONDS, Effect, Hit, Seen, effect_of, hide

if TYPE_CHECKING:
    from dps.cluster.driver.parameter_server import ParameterServer

HOLD_SECONDS = 0.5


class Striker:
    """Kills, pauses and resumes nodes by name. Thread-safe if `nodes` is.

    Every method takes the number of the fault in its plan, and returns whether the fault had its
    effect; if not, `FaultMissed` is recorded with the reason.
    """

    def __init__(self, nodes: Cluster, emit: Sink) -> None:
        self._nodes = nodes
        self._emit = emit
        self._platform = platform_of(nodes.client)
        self._clock = self._platform.clock

    def kill(self, fault: int, node: str, updates: int, by: Way = "signal") -> bool:
        """Kill a node's process and check that it is gone."""
        nodes, began = self._nodes, self._clock.now()
        ways = {"signal": nodes.kill, "requeue": nodes.requeue, "host": nodes.take_host}
        try:
            pid = ways[by](node)
        except (KeyError, ProcessLookupError, ConfigurationError) as error:
            return self.miss(fault, node, _reason(error))
        gone = nodes.gone(node, PROOF_SECONDS)
        self._emit(Killed(began, fault, node, pid, updates, gone, by, nodes.account(node)))
        still = f"process {pid} still existed {PROOF_SECONDS:g} s later"
        return gone or self.miss(fault, node, still)

    def pause(self, fault: int, node: str, updates: int, held: bool = False) -> bool:
        """Stop a node's process, unless `held` stopped it, and check that it is stopped."""
        if not held and node in self._nodes.pids and self._nodes.stopped(node, 0.0):
            return self.miss(fault, node, "its process was already stopped")
        began = self._clock.now()
        try:
            pid = self._nodes.pause(node)
        except (KeyError, ProcessLookupError) as error:
            return self.miss(fault, node, _reason(error))
        stopped = self._nodes.stopped(node, PROOF_SECONDS)
        self._emit(Paused(began, fault, node, pid, updates, stopped))
        still = f"process {pid} was not stopped {PROOF_SECONDS:g} s later"
        return stopped or self.miss(fault, node, still)

    def resume(self, fault: int, node: str) -> bool:
        """Resume a stopped process, unless it was killed, and check that it runs."""
        pid = self._nodes.pids[node]
        if self._nodes.gone(node, 0.0):
            return False
        if not self._nodes.stopped(node, 0.0):
            return self.miss(fault, node, f"process {pid} did not stay stopped")
        began = self._clock.now()
        self._nodes.resume(node)
        running = self._nodes.running(node, PROOF_SECONDS)
        self._emit(Resumed(began, fault, node, pid, running))
        still = f"process {pid} did not continue within {PROOF_SECONDS:g} s"
        return running or self.miss(fault, node, still)

    def miss(self, fault: int, node: str, reason: str) -> bool:
        """Record that a fault did not happen; returns False."""
        self._emit(FaultMissed(self._clock.now(), fault, node, reason))
        return False


class Acts(Striker):
    """Carries faults out, and reverts them afterwards. Used by one thread and its timers."""

    def __init__(self, cluster: Cluster, ps: ParameterServer, emit: Sink) -> None:
        super().__init__(cluster, emit)
        self._ps = ps
        self._failures: list[CheckpointFailed] = []
        self.took: dict[int, float] = {}  # the times at which faults took effect
        # Kills and pauses are done when `strike` returns. The proof of other faults takes a while.
        self._beginning: dict[int, Running] = {}
        self._awaited: dict[str, int] = {}  # nodes that are to join, and for which fault
        self._paused: set[tuple[int, str]] = set()
        self._current: dict[int, list[tuple[str, Effect]]] = {}
        self._lock = threading.Lock()  # guards `_current`
        self._over = self._platform.flag()
        self._timers: list[Running] = []
        self._starting = threading.Lock()

    def close(self) -> None:
        """Revert all active faults at once; nodes that were to come back do not."""
        for beginning in self._beginning.values():
            beginning.join()
        self._over.set()
        for timer in self._timers:
            timer.join()  # wait for one that has begun to start a node
        for number, node in sorted(self._paused):
            self._go_on(number, node)
        for number in sorted(self._current):
            self.end(number)

    def note(self, event: Event) -> None:
        """Observe an event of the group: it may be evidence, or a node that joined."""
        if isinstance(event, NodeJoined) and event.node in self._awaited:
            self._emit(CapacityRestored(event.t, self._awaited.pop(event.node), event.node))
        elif isinstance(event, CheckpointFailed):
            self._failures.append(event)

    def is_beginning(self, number: int) -> bool:
        """Whether a fault has begun, and its effect is not proven yet."""
        return number in self._beginning and self._beginning[number].is_alive()

    def strike(
        self, number: int, fault: Fault, names: Sequence[str], updates: int, held: bool = False
    ) -> None:
        """Carry a fault out on nodes after a number of updates; `held`: `hold` has stopped them."""
        # An optional fault skips nodes that are down, and an optional pause stopped ones too.
        if fault.when.optional and fault.hits == "node":
            nodes, pauses = self._nodes, isinstance(fault, Pause)
            there = [name for name in names if name in nodes.pids and not nodes.gone(name, 0.0)]
            names = [name for name in there if not (pauses and nodes.stopped(name, 0.0))]
            if not names:
                reason = "no such node was running"
                self._emit(FaultSkipped(self._clock.now(), number, fault.whom, reason))
                return
        if not isinstance(fault, Kill | Pause):
            work = partial(self._disturb, number, fault, names, updates)
            self._beginning[number] = self._platform.start(work, f"dps-fault-{number}")
            return
        if isinstance(fault, Kill) and fault.by == "host":
            names = sorted({other for name in names for other in self._nodes.on_host_of(name)})
        if any(self._at_once(partial(self._hit, number, fault, updates, held), names)):
            self.took[number] = self._clock.now()

    def hold(self, names: Sequence[str]) -> bool:
        """Stop processes that are about to be struck, so that nothing changes until then."""
        try:
            for name in names:
                self._nodes.pause(name)
        except (KeyError, ProcessLookupError):
            return False
        return all(self._nodes.stopped(name, HOLD_SECONDS) for name in names)

    def release(self, names: Iterable[str]) -> None:
        """Resume processes that were held."""
        for name in names:
            with contextlib.suppress(KeyError, ProcessLookupError):
                self._nodes.resume(name)

    def _hit(self, number: int, fault: Kill | Pause, updates: int, held: bool, node: str) -> bool:
        if isinstance(fault, Kill):
            struck = self.kill(number, node, updates, fault.by)
            if struck and fault.by == "requeue":
                self._awaited[replacement(node)] = number
            elif struck and fault.back_after is not None:
                self._later(fault.back_after, self._bring_back, number, node)
            return struck
        if fault.host:
            try:
                self._hit_of(number, node).run(hide, fault.seconds)
            except (LookupError, OSError) as error:
                reason = f"its monitor could not be silenced: {_reason(error)}"
                return self.miss(number, node, reason)
        struck = self.pause(number, node, updates, held)
        if struck:
            self._paused.add((number, node))
            self._later(fault.seconds, self._come_back, number, node)
        return struck

    def _go_on(self, number: int, node: str) -> None:
        self._paused.discard((number, node))
        self.resume(number, node)

    def _come_back(self, number: int, node: str) -> None:
        self._go_on(number, node)
        if self._nodes.gone(node, 0.0):
            self._bring_back(number, node)

    def _bring_back(self, number: int, node: str) -> None:
        name = replacement(node)
        with self._starting:
            self._awaited[name] = number
            try:
                self._nodes.start(replace(self._nodes.spec(node), name=name))
            except (DpsError, OSError) as error:
                del self._awaited[name]
                self.miss(number, node, f"it was not replaced: {error}")

    def _later(self, seconds: float, act: Callable[..., None], *what: object) -> None:
        def wait() -> None:
            if not self._over.wait(seconds):
                act(*what)

        self._timers.append(self._platform.start(wait, "dps-timer"))

    def _at_once(self, act: Callable[[str], bool], names: Sequence[str]) -> list[bool]:
        return [act(names[0])] if len(names) == 1 else self._platform.at_once(act, names)

    def _hit_of(self, number: int, node: str) -> Hit:
        return Hit(number, node, self._nodes, self._ps, self._failures)

    # -- faults other than kills and pauses ------------------------------------------------------

    def _disturb(self, number: int, fault: Fault, names: Sequence[str], updates: int) -> None:
        began = self._clock.monotonic()
        if any(self._at_once(partial(self.begin, number, fault, updates=updates), names)):
            self.took[number] = self._clock.now()
            if isinstance(fault, Lasting):
                left = fault.seconds - (self._clock.monotonic() - began)  # the proof took time
                self._later(max(0.0, left), self.end, number)

    def begin(self, number: int, fault: Fault, node: str, updates: int) -> bool:
        """Begin a fault on one node; return whether it had its effect."""
        began = self._clock.now()
        try:
            effect = effect_of(fault, self._hit_of(number, node))
            evidence, effective = effect.begin()
        except (LookupError, OSError, DpsError) as error:
            return self.miss(number, node, _reason(error))
        self._emit(Disturbed(began, number, fault.kind, node, updates, evidence, effective))
        if effective and isinstance(fault, Lasting):
            with self._lock:
                self._current.setdefault(number, []).append((node, effect))
        elif isinstance(fault, Lasting):
            self._end(number, node, effect)
        return effective or self.miss(number, node, f"no effect was seen: {evidence}")

    def end(self, number: int) -> None:
        """Revert a fault on every node that it hit."""
        with self._lock:
            current = self._current.pop(number, [])
        for node, effect in current:
            evidence, effective = self._end(number, node, effect)
            if not effective:
                self.miss(number, node, evidence)

    def _end(self, number: int, node: str, effect: Effect) -> Seen:
        try:
            seen = effect.end()
        except (LookupError, OSError, DpsError) as error:
            seen = Seen(f"it could not be reverted: {_reason(error)}", False)
            if self._nodes.gone(node, 0.0):
                unseen = "" if effect.proven else "; no effect was seen before"
                seen = Seen(f"its process had ended{unseen}", effect.proven)
        self._emit(Undisturbed(self._clock.now(), number, node, seen.evidence))
        return seen


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError | ProcessLookupError):
        return "no such process"
    return str(error) or "no answer"
