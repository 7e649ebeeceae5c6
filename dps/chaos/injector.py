"""The injector: it waits for each fault's moment, and has it carried out on whom it hits then.

It runs in a thread of the driver, beside the training. What it does and sees is recorded as events;
a fault that did not happen, or had no effect, is recorded as missed. Killed nodes are replaced by
fresh ones, paused and disturbed ones go on, as the plan says (`dps.chaos.acts`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from dps.chaos.acts import Acts
from dps.chaos.phases import Phases, Sight, recovering
from dps.chaos.progress import LONGEST_WAIT, SHORTEST_WAIT, Progress
from dps.chaos.targets import Targets
from dps.cluster.backends.base import Cluster
from dps.cluster.platform import Running, platform_of
from dps.core.faults.plan import (
    After,
    AtSeconds,
    AtUpdates,
    Corrupt,
    During,
    Fault,
    FaultPlan,
    InChain,
    Kill,
    Pause,
    Phase,
    When,
    is_optional,
    told,
)
from dps.events import Event, PhaseMet, Sink
from dps.protocol.messages import Table
from dps.protocol.transport import Clock

if TYPE_CHECKING:
    from dps.cluster.driver.parameter_server import ParameterServer

RECOVERY_WAIT = 0.005  # each look at it asks the coordinator
AIM_SECONDS = (
    0.2  # for how long it is believed whom a fault would hit while a checkpoint is awaited
)


class Injector:
    """Has a fault plan carried out while it is entered; leaving it ends the plan.

    A node that is paused or disturbed when the plan ends goes on at once.

    Parameters
    ----------
    plan
        The faults, in any order.
    cluster, ps
        The cluster to break, and the parameter server on it. Seconds count from entering.
    seed
        Draws who is hit where the plan leaves it open.
    """

    def __init__(
        self,
        plan: FaultPlan,
        cluster: Cluster,
        ps: ParameterServer,
        clock: Clock,
        emit: Sink,
        seed: int = 0,
    ) -> None:
        self._left = dict(sorted(enumerate(plan), key=lambda numbered: _order(*numbered)))
        self._clock = clock
        self._emit = emit
        self._ps = ps
        self._acts = Acts(cluster, ps, clock, emit)
        self._targets = Targets(cluster, ps, seed)
        self._phases = Phases(ps)
        self._platform = platform_of(cluster.client)
        self._progress = Progress(ps.audit, clock, self._platform)
        self._over = self._platform.flag()
        self._interrupted = False
        self._began = 0.0
        self._aims: dict[int, Aim] = {}
        self._running: Running

    def __enter__(self) -> Injector:
        self._began = self._clock.now()
        self._progress.begin()
        self._running = self._platform.start(self._carry_out, "dps-injector")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._interrupted = kind is not None
        self._over.set()
        self._running.join()
        self._acts.close()
        self._progress.end()

    def note(self, event: Event) -> None:
        """Take note of an event of the group: it may be evidence, or a node that has joined."""
        self._acts.note(event)

    def _carry_out(self) -> None:
        try:
            while self._left and not self._over.wait(self._until_next_look()):
                for number, fault in list(self._left.items()):
                    if self._came(number, fault):
                        del self._left[number]
            if self._left and not self._interrupted:
                self._progress.look()  # how far it came, for the record
                for number, fault in self._left.items():
                    self._tell_of_the_end(number, fault)
            self._left.clear()
        finally:
            for number, fault in self._left.items():
                self._acts.miss(number, told(fault.target), "the injector failed")

    # -- moments ---------------------------------------------------------------------------------

    def _until_next_look(self) -> float:
        moments = [fault.when for fault in self._left.values()]
        self._progress.expect([when.updates for when in moments if isinstance(when, AtUpdates)])
        soonest = min(map(self._wait_for, moments))
        return min(LONGEST_WAIT, max(SHORTEST_WAIT, soonest))

    def _wait_for(self, when: When) -> float:
        """For how long it need not be looked at whether a moment has come."""
        match when:
            case AtUpdates():
                return SHORTEST_WAIT
            case AtSeconds(seconds):
                return self._began + seconds - self._clock.now()
            case During("checkpoint"):
                return SHORTEST_WAIT
            case During():  # nothing is restored before something was hit
                return RECOVERY_WAIT if self._acts.any_took else LONGEST_WAIT
            case After(other, seconds):
                took = self._acts.took(other)
                if took is not None:
                    return took + seconds - self._clock.now()
                return SHORTEST_WAIT if self._acts.is_beginning(other) else LONGEST_WAIT

    def _came(self, number: int, fault: Fault) -> bool:
        """Strike if the moment has come; return whether the fault is done with."""
        match fault.when:
            case AtUpdates(updates):
                due = self._progress.updates >= updates
            case AtSeconds(seconds):
                due = self._clock.now() - self._began >= seconds
            case During(phase):
                return self._struck_during(phase, number, fault)
            case After(other, seconds):
                took = self._acts.took(other)
                due = took is not None and self._clock.now() - took >= seconds
                if took is None and self._is_without_effect(other):
                    reason = f"fault {other}, after which it was to come, had no effect"
                    self._acts.miss(number, told(fault.target), reason)
                    return True
        if due:
            self._strike(number, fault, self._targets.of(number, fault))
        return due

    def _is_without_effect(self, number: int) -> bool:
        done = number not in self._left and not self._acts.is_beginning(number)
        return done and self._acts.took(number) is None

    def _tell_of_the_end(self, number: int, fault: Fault) -> None:
        """Record that the training ended before the moment of a fault."""
        match fault.when:
            case AtSeconds(optional=True) | AtUpdates(optional=True):
                return
            case AtUpdates(updates):
                end = f"at {self._progress.updates} updates, before the fault at {updates}"
            case AtSeconds(seconds):
                spent = self._clock.now() - self._began
                end = f"after {spent:.1f} s, before the fault at {seconds:g} s"
            case During(phase):
                doing = "a checkpoint being written" if phase == "checkpoint" else "a recovery"
                end = f"before it could be struck during {doing}"
            case After(other, seconds):
                end = f"before it was {seconds:g} s after fault {other}"
        self._acts.miss(number, told(fault.target), f"the training ended {end}")

    # -- strikes ---------------------------------------------------------------------------------

    def _strike(
        self, number: int, fault: Fault, names: tuple[str, ...], held: bool = False
    ) -> None:
        if names:
            self._acts.strike(number, fault, names, self._progress.updates, held)
        elif is_optional(fault.when):
            self._acts.skip(number, fault)
        else:
            self._acts.miss(number, told(fault.target), "there was no such node then")

    def _struck_during(self, phase: Phase, number: int, fault: Fault) -> bool:
        """Strike if the phase can be seen; return whether it was struck."""
        if phase == "checkpoint":
            aim = self._known_aim(number, fault)
            sights = self._phases.writing()
        else:
            table = self._ps.table()
            sights = recovering(table)
            aim = self._aim(number, fault, table) if sights else NOBODY
        return any(
            aim.names
            and _concerns(sight, fault, aim)
            and self._strike_in(sight, number, fault, aim.names)
            for sight in sights
        )

    def _known_aim(self, number: int, fault: Fault) -> Aim:
        """Whom a fault would hit, as of a moment ago: a checkpoint does not take long enough."""
        known = self._aims.get(number, NOBODY)
        if self._clock.now() - known.t > AIM_SECONDS:
            known = self._aims[number] = self._aim(number, fault, self._ps.table())
        return known

    def _aim(self, number: int, fault: Fault, table: Table) -> Aim:
        names = self._targets.of(number, fault, table)
        return Aim(self._clock.now(), names, self._targets.heads(table))

    def _strike_in(self, sight: Sight, number: int, fault: Fault, names: tuple[str, ...]) -> bool:
        """Strike if the phase lasts.

        Processes to be killed or stopped are held before, and it is looked again: what is seen then
        is still so when they are struck.
        """
        holds = isinstance(fault, Kill | Pause)
        if holds and not self._acts.hold(names):
            self._acts.release(names)
            return False
        if not self._phases.lasts(sight):
            if holds:
                self._acts.release(names)
            return False
        if isinstance(fault, Kill) and sight.phase == "checkpoint":
            self._phases.spend(sight)  # what a dead writer leaves is no write any more
        self._strike(number, fault, names, holds)
        self._emit(PhaseMet(self._clock.now(), number, sight.phase, sight.evidence))
        return True


@dataclass(frozen=True, slots=True)
class Aim:
    """Whom a fault would hit, and each shard's head, as of a moment."""

    t: float
    names: tuple[str, ...]
    heads: dict[int, str]


NOBODY = Aim(-math.inf, (), {})


def _order(number: int, fault: Fault) -> tuple[float, float, int]:
    """Faults that have come due by the same look are struck in this order."""
    match fault.when:
        case AtUpdates(updates):
            return updates, 0.0, number
        case AtSeconds(seconds):
            return 0, seconds, number
    return 0, 0.0, number


def _concerns(sight: Sight, fault: Fault, aim: Aim) -> bool:
    """Whether a phase of a shard is the one that a fault waits for, given whom it would hit."""
    if isinstance(fault, Corrupt):
        return fault.target == sight.shard
    if isinstance(fault.target, InChain):
        return fault.target.shard == sight.shard
    if sight.phase == "recovery":
        return True
    writes = set(aim.names) & set(aim.heads.values())
    return not writes or aim.heads.get(sight.shard) in writes
