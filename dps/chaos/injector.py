"""Owns the injector: it waits for a fault's moment, kills, proves it, and brings capacity back.

It runs in a thread of the driver, beside the training. What it does and sees is recorded as events;
a fault that did not happen, or whose process is still there afterwards, is recorded as missed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from dps.cluster.local import NodeSpec, is_gone
from dps.cluster.roles import resource_of
from dps.core.faults import FaultPlan, Kill
from dps.events import CapacityRestored, Event, FaultMissed, Killed, NodeJoined, Sink
from dps.protocol.messages import AuditReply
from dps.protocol.transport import Clock

PROOF_SECONDS = 5.0
SHORTEST_PAUSE = 0.002
LONGEST_PAUSE = 0.1


class Nodes(Protocol):
    """What the injector needs of a cluster."""

    def kill(self, name: str) -> int: ...

    def start(self, node: NodeSpec) -> None: ...


def replacement(name: str) -> str:
    """The name of the node that takes a lost one's place."""
    return f"{name}-b"


class Injector:
    """Carries out a fault plan while it is entered; leaving it ends the plan.

    Parameters
    ----------
    plan
        The faults, in any order.
    nodes
        The cluster to break.
    audit
        Returns the numbers of each shard's state, None for one that is down.
    """

    def __init__(
        self,
        plan: FaultPlan,
        nodes: Nodes,
        audit: Callable[[], Sequence[AuditReply | None]],
        clock: Clock,
        emit: Sink,
    ) -> None:
        self._plan = sorted(enumerate(plan), key=lambda numbered: numbered[1].at_updates)
        self._nodes = nodes
        self._audit = audit
        self._clock = clock
        self._emit = emit
        self._over = threading.Event()
        self._interrupted = False
        self._updates = 0
        self._awaited: dict[str, int] = {}
        self._timers: list[threading.Timer] = []
        self._thread = threading.Thread(target=self._carry_out, name="dps-injector", daemon=True)

    def __enter__(self) -> Injector:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._interrupted = kind is not None
        self._over.set()
        self._thread.join()
        for timer in self._timers:
            timer.cancel()
            timer.join()  # one that has begun to start a node ends first

    def note(self, event: Event) -> None:
        """Take note of an event of the group: nodes that joined in the place of killed ones."""
        if isinstance(event, NodeJoined) and event.node in self._awaited:
            self._emit(CapacityRestored(event.t, self._awaited.pop(event.node), event.node))

    def _carry_out(self) -> None:
        left = deque(self._plan)
        try:
            while left:
                number, kill = left[0]
                if self._reached(kill.at_updates):
                    self._kill(number, kill)
                elif not self._interrupted:
                    self._missed(
                        number,
                        kill,
                        f"the training ended at {self._updates} updates, "
                        f"before the fault at {kill.at_updates}",
                    )
                left.popleft()
        finally:
            for number, kill in left:
                self._missed(number, kill, "the injector failed")

    def _reached(self, updates: int) -> bool:
        """Wait until the shards have applied so many updates; False if the training ends first."""
        began, pause = self._clock.now(), SHORTEST_PAUSE
        while not self._over.wait(pause):
            if self._look() >= updates:
                return True
            # Asking costs the servers a little: ask seldom until the moment is near.
            seconds_per_update = (self._clock.now() - began) / max(1, self._updates)
            left = (updates - self._updates) * seconds_per_update
            pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, left / 4))
        if not self._interrupted:
            self._look()  # how far it came, for the record
        return False

    def _look(self) -> int:
        """Ask how many updates all shards have applied; what was known before, if one is down."""
        replies = self._audit()
        if all(replies):
            self._updates = min(reply.version for reply in replies if reply)
        return self._updates

    def _kill(self, number: int, kill: Kill) -> None:
        began = self._clock.now()
        try:
            pid = self._nodes.kill(kill.target)
        except (KeyError, ProcessLookupError):
            self._missed(number, kill, "there is no such process")
            return
        gone = is_gone(pid, PROOF_SECONDS)
        self._emit(Killed(began, number, kill.target, pid, self._updates, gone))
        if not gone:
            self._missed(number, kill, f"process {pid} was still there {PROOF_SECONDS:g} s later")
        if kill.back_after is not None:
            timer = threading.Timer(kill.back_after, self._bring_back, (number, kill))
            self._timers.append(timer)
            timer.start()

    def _bring_back(self, number: int, kill: Kill) -> None:
        name = replacement(kill.target)
        self._awaited[name] = number
        self._nodes.start(NodeSpec(name, resource_of(name)))

    def _missed(self, number: int, kill: Kill, reason: str) -> None:
        self._emit(FaultMissed(self._clock.now(), number, kill.target, reason))
