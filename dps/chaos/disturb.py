"""Disturbances of nodes that go on: each is carried out, proven, recorded and taken back.

Every kind of fault but kill and pause (`dps.chaos.strike`) has a class that carries it out; this
finds out which one, and makes events of what it saw.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from dps.chaos.effect import Effect, Seen
from dps.chaos.files import Failures, FullDisk, damage
from dps.chaos.network import FullStore, Interference, Remote
from dps.chaos.slow import Slowdown
from dps.cluster.names import Node
from dps.cluster.node.links import BOTH, Closed, Late, Way
from dps.core.faults.plan import Corrupt, Cut, Delay, DiskFull, Disturbance, Slow, kind_of
from dps.core.names import STORE_ROLES
from dps.errors import DpsError
from dps.events import CheckpointFailed, Disturbed, Event, FaultMissed, Sink, Undisturbed
from dps.protocol.transport import Clock

if TYPE_CHECKING:
    from dps.cluster.backends.base import Cluster
    from dps.cluster.driver.parameter_server import ParameterServer

Lasting = Slow | Cut | Delay | DiskFull
WAYS: dict[str, tuple[Way, ...]] = {"in": ("in",), "out": ("out",), "both": BOTH}


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
                effect, seen = None, damage(self._folder(), fault.target)
            else:
                effect = self._effect(number, fault, node)
                seen = effect.begin()
        except (LookupError, OSError, DpsError) as error:
            return self._miss(number, node, _told(error))
        evidence, effective = seen
        self._emit(Disturbed(began, number, kind_of(fault), node, updates, evidence, effective))
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

    def _effect(self, number: int, fault: Lasting, node: str) -> Effect:
        match fault:
            case Slow(factor=factor, seconds=seconds):
                lease = self._ps.group.timings.lease
                return Slowdown(self._cluster, node, factor, seconds, lease)
            case Cut(seconds=seconds, direction=direction):
                return Interference(self._remote(node), number, Closed(WAYS[direction]), seconds)
            case Delay(delay=delay, seconds=seconds):
                return Interference(self._remote(node), number, Late(delay), seconds)
            case DiskFull(seconds=seconds) if self._member(node).role in STORE_ROLES:
                return FullStore(self._remote(node), number, seconds)
            case DiskFull():
                serves = partial(self._shards, self._member(node).address)
                return FullDisk(self._cluster.pids[node], serves, self._failures, self._clock)

    def _remote(self, node: str) -> Remote:
        address, coordinator = self._member(node).address, self._ps.group.coordinator
        return Remote(self._cluster.client, address, coordinator)

    def _member(self, name: str) -> Node:
        for node in self._ps.nodes:
            if node.name == name and not self._cluster.gone(name, 0.0):
                return node
        raise LookupError("there is no such process")

    def _shards(self, address: str) -> set[int]:
        """The shards that a node serves now."""
        views = self._ps.table().views
        return {view.shard for view in views if address in {m.address for m in view.chain}}

    def _folder(self) -> str:
        """Where this parameter server keeps its checkpoints."""
        durability = self._ps.group.recovery.durability
        if durability.path is None:
            raise LookupError("there are no checkpoints")
        return f"{durability.path}/{self._ps.group.name}"

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
