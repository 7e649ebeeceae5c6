"""The injector: it waits for the moment of each fault, and then strikes its nodes.

It runs in a thread of the driver, beside the training. Events record each act and observation; a
fault that did not happen, or had no effect, is recorded as missed. Killed nodes are replaced, and
paused and disturbed ones resume, as planned (`dps.faults.acts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dps.cluster.backends.base import Cluster
from dps.cluster.platform import Platform, Running, platform_of
from dps.errors import require
from dps.events import Event, PhaseMet, Sink
from dps.faults import (
    After,
    AtSeconds,
    AtUpdates,
    Between,
    During,
    Every,
    Fault,
    FaultPlan,
    InChain,
    Kill,
    Pause,
    Phase,
    When,
)
from dps.faults.acts import Acts
from dps.faults.targets import Targets
from dps.protocol.messages import Description, Table
from dps.recovery.checkpoint_files import CheckpointFiles

if TYPE_CHECKING:
    from dps.cluster.driver.parameter_server import ParameterServer

RECOVERY_WAIT = 0.005  # each look asks the coordinator
AIM_SECONDS = 0.2  # how long an aim is valid while a checkpoint is awaited
SHORTEST_WAIT = 0.002
LONGEST_WAIT = 0.1


class Injector:
    """Carries out a fault plan during a `with` statement, whose start is second 0.

    A node that is paused or disturbed at the end resumes at once.

    Parameters
    ----------
    plan
        The faults, in any order. `dps.faults.expand` makes single faults of those that are drawn or
        recur.
    cluster, ps
        The cluster to break, and the parameter server on it.
    emit
        Called with each event, in any thread.
    seed
        Random seed for targets that are drawn.
    """

    def __init__(
        self, plan: FaultPlan, cluster: Cluster, ps: ParameterServer, emit: Sink, seed: int = 0
    ) -> None:
        for fault in plan:
            single = not isinstance(fault.when, Between | Every)
            require(single, f"{fault}: expected a fault of a plan that dps.faults.expand returned")
        self._left = dict(sorted(enumerate(plan), key=lambda numbered: _order(*numbered)))
        self._emit = emit
        self._ps = ps
        self._acts = Acts(cluster, ps, emit)
        self._targets = Targets(cluster, ps, seed)
        self._files: list[CheckpointFiles] = []
        if ps.group.recovery.path is not None:
            path = f"{ps.group.recovery.path.rstrip('/')}/{ps.group.name}"
            shards = range(len(ps.group.layout.shards))
            self._files = [CheckpointFiles(path, shard, keep=1) for shard in shards]
        self._spent: set[Sight] = set()
        self._platform = platform_of(cluster.client)
        self._clock = self._platform.clock
        self._progress = Progress(ps.audit, self._platform)
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

    def __exit__(self, kind: object, *_: object) -> None:
        self._interrupted = kind is not None
        self._over.set()
        self._running.join()
        self._acts.close()
        self._progress.end()

    def note(self, event: Event) -> None:
        """Observe an event of the group: it may be evidence, or a node that joined."""
        self._acts.note(event)

    def _carry_out(self) -> None:
        try:
            while self._left and not self._over.wait(self._next_wait()):
                for number, fault in list(self._left.items()):
                    if self._came(number, fault):
                        del self._left[number]
            if self._left and not self._interrupted:
                self._miss_the_rest(self._progress.look())
            self._left.clear()
        finally:
            for number, fault in self._left.items():
                self._acts.miss(number, fault.whom, "the injector failed")

    def _miss_the_rest(self, updates: int) -> None:
        at = f"{updates} updates and {self._clock.now() - self._began:.1f} s"
        for number, fault in self._left.items():
            if not fault.when.optional:
                reason = f"the training ended at {at}, before the fault {fault.when}"
                self._acts.miss(number, fault.whom, reason)

    # -- moments ---------------------------------------------------------------------------------

    def _next_wait(self) -> float:
        moments = [fault.when for fault in self._left.values()]
        self._progress.expect([when.updates for when in moments if isinstance(when, AtUpdates)])
        soonest = min(map(self._wait_for, moments))
        return min(LONGEST_WAIT, max(SHORTEST_WAIT, soonest))

    def _wait_for(self, when: When) -> float:
        """Return the time until a moment, or until the next look; 0 or less: it has come."""
        match when:
            case AtUpdates(updates) if self._progress.updates >= updates:
                return 0.0
            case AtSeconds(seconds):
                return self._began + seconds - self._clock.now()
            case During("recovery"):  # nothing is restored before the first fault
                return RECOVERY_WAIT if self._acts.took else LONGEST_WAIT
            case After(other, seconds):
                took = self._acts.took.get(other)
                if took is not None:
                    return took + seconds - self._clock.now()
                return SHORTEST_WAIT if self._acts.is_beginning(other) else LONGEST_WAIT
        return SHORTEST_WAIT

    def _came(self, number: int, fault: Fault) -> bool:
        """Strike if the moment has come; return whether the fault was struck or missed."""
        when = fault.when
        if isinstance(when, During):
            return self._struck_during(when.phase, number, fault)
        if self._wait_for(when) <= 0:
            self._strike(number, fault, self._targets.of(number, fault))
            return True
        if isinstance(when, After):
            ended = when.fault not in self._left and not self._acts.is_beginning(when.fault)
            # The other fault may have taken effect since the first look, so look again.
            if ended and when.fault not in self._acts.took:
                reason = f"fault {when.fault}, which it follows, had no effect"
                self._acts.miss(number, fault.whom, reason)
                return True
        return False

    # -- strikes ---------------------------------------------------------------------------------

    def _strike(
        self, number: int, fault: Fault, names: tuple[str, ...], held: bool = False
    ) -> None:
        if names or fault.when.optional:
            self._acts.strike(number, fault, names, self._progress.updates, held)
        else:
            self._acts.miss(number, fault.whom, "no such node existed then")

    def _struck_during(self, phase: Phase, number: int, fault: Fault) -> bool:
        """Strike if the phase can be seen; return whether it was struck."""
        if phase == "checkpoint":
            # A look at the table takes longer than a checkpoint, so a recent aim is used.
            aim = self._aims.get(number, NOBODY)
            if self._clock.now() - aim.t > AIM_SECONDS:
                aim = self._aims[number] = self._aim(number, fault, self._ps.table())
            sights = self._sights(phase)
        else:
            table = self._ps.table()
            sights = self._sights(phase, table)
            aim = self._aim(number, fault, table) if sights else NOBODY
        return any(
            aim.names
            and _concerns(sight, fault, aim)
            and self._strike_in(sight, number, fault, aim.names)
            for sight in sights
        )

    def _aim(self, number: int, fault: Fault, table: Table) -> Aim:
        names = self._targets.of(number, fault, table)
        return Aim(self._clock.now(), names, self._targets.heads(table))

    def _strike_in(self, sight: Sight, number: int, fault: Fault, names: tuple[str, ...]) -> bool:
        """Strike if the phase lasts."""
        # Processes to be killed or stopped are held before the phase is checked, so that it still
        # lasts when they are struck.
        holds = isinstance(fault, Kill | Pause)
        held = not holds or self._acts.hold(names)
        if not held or sight not in self._sights(sight.phase):
            if holds:
                self._acts.release(names)
            return False
        if isinstance(fault, Kill) and sight.phase == "checkpoint":
            self._spent.add(sight)  # files of a dead writer are not a write
        self._strike(number, fault, names, holds)
        self._emit(PhaseMet(self._clock.now(), number, sight.phase, sight.evidence))
        return True

    def _sights(self, phase: Phase, table: Table | None = None) -> list[Sight]:
        """Return writes of living writers, or shards that are down; a `table` saves a request."""
        if phase == "recovery":
            down = (view for view in (table or self._ps.table()).views if not view.serving)
            seen = "shard {0.shard}: no node served it in epoch {0.epoch}"
            return [Sight(phase, view.shard, seen.format(view)) for view in down]
        sights = (
            Sight(phase, shard, f"shard {shard}: a part of {name} was on disk")
            for shard, files in enumerate(self._files)
            for name in files.in_writing()
        )
        return [sight for sight in sights if sight not in self._spent]


@dataclass(frozen=True, slots=True)
class Sight:
    """A phase of a shard that was seen; `evidence` distinguishes it from others."""

    phase: Phase
    shard: int
    evidence: str


@dataclass(frozen=True, slots=True)
class Aim:
    """The nodes that a fault would hit at a moment, and each shard's head."""

    t: float
    names: tuple[str, ...]
    heads: dict[int, str]


NOBODY = Aim(-math.inf, (), {})


def _order(number: int, fault: Fault) -> tuple[float, float, int]:
    match fault.when:
        case AtUpdates(updates):
            return updates, 0.0, number
        case AtSeconds(seconds):
            return 0, seconds, number
    return 0, 0.0, number


def _concerns(sight: Sight, fault: Fault, aim: Aim) -> bool:
    """Whether a fault waits for this phase of this shard, given its nodes."""
    match fault.target:
        case int(shard) | InChain(shard):
            return shard == sight.shard
    if sight.phase == "recovery":
        return True
    writes = set(aim.names) & set(aim.heads.values())
    return not writes or aim.heads.get(sight.shard) in writes


Audit = Callable[[], Sequence[Description | None]]  # None: the shard is down


class Progress:
    """The number of applied updates, which a separate thread requests from the shards."""

    def __init__(self, audit: Audit, platform: Platform) -> None:
        self._audit = audit
        self._updates = 0
        self._goals: tuple[int, ...] = ()
        self._platform = platform
        self._clock = platform.clock
        self._over = platform.flag()
        self._error: Exception | None = None
        self._running: Running

    def begin(self) -> None:
        """Start the thread: a shard that is down answers late, and faults must not wait for it."""
        self._running = self._platform.start(self._ask, "dps-progress")

    def end(self) -> None:
        """Stop the thread."""
        self._over.set()
        self._running.join()

    @property
    def updates(self) -> int:
        """The least number of updates of any shard, when all of them last answered."""
        if self._error is not None:
            raise self._error
        return self._updates

    def expect(self, goals: Sequence[int]) -> None:
        """Set the numbers of updates near which the thread asks often."""
        self._goals = tuple(goals)

    def look(self) -> int:
        """Ask now; if a shard is down, return the number known before."""
        replies = self._audit()
        if all(replies):
            self._updates = min(reply.version for reply in replies if reply)
        return self._updates

    def _ask(self) -> None:
        began, wait = self._clock.now(), SHORTEST_WAIT
        while not self._over.wait(wait):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - raised where the number is read
                self._error = error
                return
            # Each request costs the servers a little time.
            seconds_per_update = (self._clock.now() - began) / max(1, self._updates)
            left = [goal - self._updates for goal in self._goals if goal > self._updates]
            soonest = min(left, default=math.inf) * seconds_per_update
            wait = min(LONGEST_WAIT, max(SHORTEST_WAIT, soonest / 4))
