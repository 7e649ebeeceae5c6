"""Disturbances of nodes that go on: each is carried out, proven, recorded and taken back.

Every kind of fault but kill and pause (`dps.chaos.kill_and_pause`) is carried out by an effect of
its own (`dps.chaos.kinds`); this makes events of what the effect saw.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from dps.chaos.effect import Effect, Seen
from dps.chaos.files import Failures, damage
from dps.chaos.kinds import Hit, made
from dps.core.faults.plan import Corrupt, Disturbance
from dps.errors import DpsError
from dps.events import CheckpointFailed, Disturbed, Event, FaultMissed, Sink, Undisturbed
from dps.protocol.transport import Clock

if TYPE_CHECKING:
    from dps.cluster.backends.base import Cluster
    from dps.cluster.driver.parameter_server import ParameterServer


class Disturber:
    """Disturbs the nodes of a parameter server. Thread-safe."""

    def __init__(self, cluster: Cluster, ps: ParameterServer, clock: Clock, emit: Sink) -> None:
        self._cluster = cluster
        self._ps = ps
        self._clock = clock
        self._emit = emit
        self._failures = Failures()
        self._current: dict[int, list[tuple[str, Effect]]] = {}
        self._lock = threading.Lock()

    def note(self, event: Event) -> None:
        """Take note of an event of the group, which may be evidence."""
        if isinstance(event, CheckpointFailed):
            self._failures.note(event)

    def begin(self, number: int, fault: Disturbance, node: str, updates: int) -> bool:
        """Begin to disturb a node, and see what it does; return whether it had its effect.

        Parameters
        ----------
        number
            That of the fault in its plan; one fault may hit several nodes.
        node
            Whom to hit; "shard-0" and the like for what damages files.
        """
        began = self._clock.now()
        try:
            if isinstance(fault, Corrupt):
                effect, seen = None, self._damage(fault.target)
            else:
                effect = made(fault, self._hit(number, node))
                seen = effect.begin()
        except (LookupError, OSError, DpsError) as error:
            return self._miss(number, node, _told(error))
        evidence, effective = seen
        self._emit(Disturbed(began, number, fault.kind, node, updates, evidence, effective))
        if not effective:
            if effect is not None:
                self._end(number, node, effect)
            return self._miss(number, node, f"no effect was seen: {evidence}")
        if effect is not None:
            with self._lock:
                self._current.setdefault(number, []).append((node, effect))
        return True

    def end(self, number: int) -> None:
        """Take a fault back on every node that it hit; what was damaged stays so."""
        with self._lock:
            current = self._current.pop(number, [])
        for node, effect in current:
            evidence, effective = self._end(number, node, effect)
            if not effective:
                self._miss(number, node, evidence)

    def _end(self, number: int, node: str, effect: Effect) -> Seen:
        try:
            seen = effect.end()
        except (LookupError, OSError, DpsError) as error:
            if self._cluster.gone(node, 0.0):
                seen = _ended_meanwhile(effect)
            else:
                seen = Seen(f"it could not be taken back: {_told(error)}", False)
        self._emit(Undisturbed(self._clock.now(), number, node, seen.evidence))
        return seen

    def _hit(self, number: int, node: str) -> Hit:
        return Hit(number, node, self._cluster, self._ps, self._clock, self._failures)

    def _damage(self, shard: int) -> Seen:
        durability = self._ps.group.recovery.durability
        if durability.path is None:
            raise LookupError("there are no checkpoints")
        shards = {view.shard for view in self._ps.table().views}
        together = shards if durability.restores_together else ()
        return damage(f"{durability.path}/{self._ps.group.name}", shard, together)

    def _miss(self, fault: int, node: str, reason: str) -> bool:
        self._emit(FaultMissed(self._clock.now(), fault, node, reason))
        return False


def _ended_meanwhile(effect: Effect) -> Seen:
    ended = "its process has ended meanwhile"
    return Seen(
        ended if effect.proven else f"{ended}, and no effect was seen before", effect.proven
    )


def _told(error: Exception) -> str:
    if isinstance(error, KeyError | ProcessLookupError):
        return "there is no such process"
    return str(error) or "there was no answer"
