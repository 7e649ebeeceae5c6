"""Owns the injector: it waits for each fault's moment, has it carried out, and undoes what it may.

It runs in a thread of the driver, beside the training. What it does and sees is recorded as events;
a fault that did not happen, or had no effect, is recorded as missed. Killed nodes are replaced by
fresh ones, paused ones go on, as the plan says.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType

from dps.chaos.strike import Nodes, Striker
from dps.cluster.local import NodeSpec
from dps.cluster.roles import resource_of
from dps.core.faults import AtUpdates, Fault, FaultPlan, Kill, Pause, told
from dps.events import CapacityRestored, Event, NodeJoined, Sink
from dps.protocol.messages import AuditReply
from dps.protocol.transport import Clock

SHORTEST_WAIT = 0.002
LONGEST_WAIT = 0.1


def replacement(name: str) -> str:
    """The name of the node that takes a lost one's place."""
    return f"{name}-b"


class Injector:
    """Carries out a fault plan while it is entered; leaving it ends the plan.

    A node that is paused when the plan ends goes on at once.

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
        self._plan = sorted(enumerate(plan), key=lambda numbered: _updates(numbered[1]))
        self._nodes = nodes
        self._striker = Striker(nodes, clock, emit)
        self._audit = audit
        self._clock = clock
        self._emit = emit
        self._over = threading.Event()
        self._interrupted = False
        self._updates = 0
        self._awaited: dict[str, int] = {}
        self._paused: dict[int, str] = {}
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
        for number in list(self._paused):
            self._resume(number)

    def note(self, event: Event) -> None:
        """Take note of an event of the group: nodes that joined in the place of killed ones."""
        if isinstance(event, NodeJoined) and event.node in self._awaited:
            self._emit(CapacityRestored(event.t, self._awaited.pop(event.node), event.node))

    def _carry_out(self) -> None:
        left = deque(self._plan)
        try:
            while left:
                number, fault = left[0]
                if self._reached(_updates(fault)):
                    self._strike(number, fault)
                elif not self._interrupted:
                    self._striker.miss(
                        number,
                        told(fault.target),
                        f"the training ended at {self._updates} updates, "
                        f"before the fault at {_updates(fault)}",
                    )
                left.popleft()
        finally:
            for number, fault in left:
                self._striker.miss(number, told(fault.target), "the injector failed")

    def _reached(self, updates: int) -> bool:
        """Wait until the shards have applied so many updates; False if the training ends first."""
        began, wait = self._clock.now(), SHORTEST_WAIT
        while not self._over.wait(wait):
            if self._look() >= updates:
                return True
            # Asking costs the servers a little: ask seldom until the moment is near.
            seconds_per_update = (self._clock.now() - began) / max(1, self._updates)
            left = (updates - self._updates) * seconds_per_update
            wait = min(LONGEST_WAIT, max(SHORTEST_WAIT, left / 4))
        if not self._interrupted:
            self._look()  # how far it came, for the record
        return False

    def _look(self) -> int:
        """Ask how many updates all shards have applied; what was known before, if one is down."""
        replies = self._audit()
        if all(replies):
            self._updates = min(reply.version for reply in replies if reply)
        return self._updates

    def _strike(self, number: int, fault: Fault) -> None:
        match fault:
            case Kill(str(target), back_after=back_after):
                struck = self._striker.kill(number, target, self._updates)
                if struck and back_after is not None:
                    self._later(back_after, self._bring_back, number, target)
            case Pause(str(target), seconds=seconds):
                if self._striker.pause(number, target, self._updates):
                    self._paused[number] = target
                    self._later(seconds, self._resume, number)

    def _later(self, seconds: float, act: Callable[..., None], *what: object) -> None:
        timer = threading.Timer(seconds, act, what)
        self._timers.append(timer)
        timer.start()

    def _bring_back(self, number: int, target: str) -> None:
        name = replacement(target)
        self._awaited[name] = number
        self._nodes.start(NodeSpec(name, resource_of(name)))

    def _resume(self, number: int) -> None:
        self._striker.resume(number, self._paused.pop(number))


def _updates(fault: Fault) -> int:
    assert isinstance(fault.when, AtUpdates)
    return fault.when.updates
