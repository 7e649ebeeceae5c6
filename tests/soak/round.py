"""One round of the soak: a group that counts while its nodes are killed and paused.

Faults hit servers, replicas, spares, stores and workers, also while the group recovers from the
fault before, but never more than the strategy promises to survive. Afterwards everything that it
promises must hold.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from distributed import wait

from benchmarks.live import TookTooLong, Watch, eventually
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import SERVING
from dps.cluster.node.actor import HostActor
from dps.core.consistency import ASP, Consistency
from dps.core.names import role_of
from dps.core.replay import Continue
from dps.core.rules.rule import SGD
from dps.core.shard import ShardState
from dps.events import (
    Acked,
    Applied,
    CheckpointWritten,
    Decided,
    Detected,
    FaultMissed,
    Restored,
    WorkerJoined,
)
from dps.faults.acts import Striker
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.layered import Layered
from dps.recovery.partial import PartialCheckpoint
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery, with_checkpoint_path
from flows.metrics.faults import FaultTimes, fault_times
from flows.metrics.prices import load_prices
from flows.metrics.trial import Trial
from flows.records.record import Record
from tests.soak.counting import (
    Task,
    Violation,
    cells_of,
    check_shard,
    count,
    parameters,
    read_notes,
    require,
)
from tests.soak.pool import Pool, lives_long

SHARDS = 2
WORKERS = 3
CELLS = 1500  # of one start of a worker: more than it pushes in a round
THINK = 0.04
LONGEST = 25.0
SECOND_FAULT = 0.35
ALL_COPIES = 0.4  # of a shard, where there is a layer below
PATIENCE = 30.0  # until what must come counts as not coming
PROGRESS = 15.0
WEIGHTS = {"head": 7, "replica": 3, "spare": 1, "store": 3, "mailbox": 2, "worker": 2}


@dataclass(frozen=True, slots=True)
class Case:
    """A strategy under test.

    Attributes
    ----------
    both
        Whether all copies may be lost at once: the store with servers, or all replicas. Without a
        layer below, the strategy does not promise to survive that, only to say that a shard began
        anew.
    """

    name: str
    recovery: Recovery
    consistency: Consistency = field(default_factory=ASP)
    both: bool = False

    @property
    def replicated(self) -> bool:
        """Whether a shard lives as long as one of its replicas does."""
        return self.recovery.durability.above.replicas > 1

    @property
    def interval(self) -> float:
        """How many acked updates of a shard one restoration may cost."""
        match self.recovery.durability:
            case Checkpoint(at_risk=int(at_risk)) | PartialCheckpoint(at_risk=int(at_risk)):
                return at_risk
            case Chain():
                return 0
            case SharedStore() | Layered():
                return float("inf") if self.both else 0
            case _:
                return float("inf")

    @property
    def layered(self) -> bool:
        """Whether a shard goes back to checkpoints when all other copies are lost."""
        return self.recovery.durability.has_layer_below

    @property
    def kept_by_worker(self) -> int:
        """How many acked updates of a shard the loss of a worker may cost."""
        outage = self.recovery.outage
        return outage.limit if isinstance(outage, Continue) and outage.buffer == "worker" else 0


@dataclass(frozen=True, slots=True)
class Struck:
    """A fault that was carried out; `part` is what the node was to the group."""

    kind: str
    part: str
    node: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a round came to; updates are counted on every shard."""

    case: str
    struck: Sequence[Struck]
    missed: int
    pushed: int
    acked: int
    lost: int
    dropped: int
    duplicates: int
    recoveries: Sequence[FaultTimes]

    def counts(self) -> dict[str, Any]:
        """Return the strategy and the numbers of the round, by name."""
        numbers = ("missed", "pushed", "acked", "lost", "dropped", "duplicates")
        counted = {name: getattr(self, name) for name in numbers}
        return {"strategy": self.case, "rounds": 1, "faults": len(self.struck), **counted}


def check_events(record: Record) -> None:
    """What the events tell of: one head per epoch, nothing twice, no replicas that differ."""
    heads: dict[tuple[int, int], str] = {}
    for event in record.of(Applied):
        if event.head and event.times:
            first = heads.setdefault((event.shard, event.epoch), event.node)
            require(
                first == event.node,
                f"shard {event.shard}: {first} and {event.node} are head in {event.epoch}",
            )
    found = Trial(record, load_prices()).ledger
    require(not found.applied_twice, f"{found.applied_twice} updates were applied twice")
    require(not found.replica_conflicts, f"{found.replica_conflicts} replica conflicts")


class Round:
    """One round, on a pool of nodes that is full when it begins.

    Attributes
    ----------
    watch
        The events so far.
    """

    def __init__(self, case: Case, seed: str, pool: Pool, folder: Path, faults: int) -> None:
        self.case = case
        self.watch = Watch()
        self._random = Random(seed)
        self._seed = seed
        self._pool = pool
        self._folder = folder
        self._faults = faults
        self._striker = Striker(pool.cluster, self.watch)
        self._struck: list[Struck] = []
        self._paused: dict[str, tuple[int, float]] = {}
        self._lost_workers: list[str] = []
        self._hurt: set[str] = set()
        self._starts = 0
        self._workers: dict[str, Any] = {}

    def run(self) -> Result:
        """Run the round; raises `Violation` or `TookTooLong` when a promise is broken."""
        with self._group() as ps:
            self._ps = ps
            self._start_workers()
            self._advances()
            until = time.monotonic() + LONGEST
            while len(self._struck) < self._faults and time.monotonic() < until:
                self._trouble()
            self._finish()
            lost = sum(self._check(view.shard) for view in self._ps.table().views)
        notes, record = self._notes(), self.watch.record
        check_events(record)
        return Result(
            self.case.name,
            self._struck,
            len(record.of(FaultMissed)),
            SHARDS * len(notes.pushed),
            SHARDS * len(notes.safe),
            lost,
            self._dropped(),
            Trial(record, load_prices()).ledger.duplicates,
            [t for t in fault_times(record) if t.rto_seconds is not None],
        )

    @contextmanager
    def _group(self) -> Iterator[ParameterServer]:
        recovery = with_checkpoint_path(self.case.recovery, str(self._folder / "checkpoints"))
        starts = WORKERS + self._faults + 2
        with ParameterServer(
            self._pool.cluster.client,
            parameters(SHARDS, starts * CELLS),
            shards=SHARDS,
            optimizer=SGD(1.0),
            consistency=self.case.consistency,
            recovery=recovery,
            on_event=self.watch,
            on_loss="ignore",  # what may be lost is checked
        ) as ps:
            try:
                yield ps
            finally:
                for name in list(self._paused):
                    self._resume(name)

    # -- workers -----------------------------------------------------------------------------------

    def _start_workers(self) -> None:
        # They share the cells of the whole round: a name alone does not tell which are whose.
        futures = self._ps.run(partial(_dispatch, self._tasks(WORKERS)), workers=WORKERS)
        self._workers = {f"worker-{i}": future for i, future in enumerate(futures)}

    def _start_again(self, name: str, node: str) -> None:
        """Start a worker that was lost as another incarnation, once Dask has given it up."""
        future = self._workers[name]
        eventually(future.done, f"end of the lost {name}", PATIENCE)
        require(future.status == "error", f"{name} was lost, and yet it is {future.status}")
        self._workers[name] = self._ps.run_again(partial(_dispatch, self._tasks(1)), name, node)

    def _tasks(self, number: int) -> list[Task]:
        tasks = []
        for start in range(self._starts, self._starts + number):
            cells = range(start * CELLS, (start + 1) * CELLS)
            require(cells.stop <= cells_of(self._ps.group.layout), "the soak has too few cells")
            notes = str(self._folder / f"notes-{start}.txt")
            seed = f"{self._seed}/{start}"
            flag = str(self._folder / "stop")
            tasks.append(Task(self._ps.group.layout, cells, notes, flag, THINK, seed))
        self._starts += number
        return tasks

    def _notes(self) -> Any:
        return read_notes(self._folder.glob("notes-*.txt"))

    # -- faults ------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        """One fault or two, one during the recovery from the other; then all must be well again."""
        time.sleep(self._random.uniform(0, 0.4))
        before = len(self.watch.record.of(Detected))
        all_copies = self.case.layered and self._random.random() < ALL_COPIES
        copies = self._all_copies() if all_copies else []
        for part, node in copies:
            self._hit(part, node, kill=True)
        if not copies:
            self._strike()
        if self._random.random() < SECOND_FAULT:
            if self._random.random() < 0.5:
                time.sleep(self._random.uniform(0, 0.1))
            else:
                self._detection_after(before)
            self._strike()
        self._mend()
        self._advances()
        eventually(self._is_whole, "all replicas and stores", PATIENCE)
        self._hurt.clear()

    def _is_whole(self) -> bool:
        """Whether as many nodes as are wanted have each shard, and what is kept for it."""
        table, stores = self._ps.table(), self.case.recovery.stores
        return table.complete and len(table.stores) == len(table.mailboxes) == stores

    def _detection_after(self, before: int) -> None:
        """Wait until a loss is detected; there may be none, as when a spare was hit."""

        def more(record: Record) -> bool | None:
            return len(record.of(Detected)) > before or None

        try:
            self.watch.until(more, "detection", 1.5)
        except TookTooLong:
            return

    def _strike(self) -> None:
        options = self._options()
        if not options:
            return
        parts = sorted({part for part, _ in options})
        (part,) = self._random.choices(parts, [WEIGHTS[part] for part in parts])
        node = self._random.choice(sorted({name for p, name in options if p == part}))
        # Some are only ever paused, so that they live as long as the soak and show if they grow.
        self._hit(part, node, kill=self._random.random() < 0.6 and not lives_long(node))

    def _all_copies(self) -> list[tuple[str, str]]:
        """Whoever has some shard above the layer, if they may all be killed; as in `_options`."""
        table, names = self._ps.table(), {node.address: node.name for node in self._ps.nodes}
        chains = [[names[host.address] for host in view.chain] for view in table.views]
        stores = table.stores if self.case.recovery.durability.above.stores else ()
        keepers = [("store", names[store.address]) for store in stores]
        found = [[*((_part(name, chains), name) for name in c), *keepers] for c in chains]
        killable = [of for of in found if not any(lives_long(name) for _, name in of)]
        return self._random.choice(killable) if killable else []

    def _hit(self, part: str, node: str, kill: bool) -> None:
        number = len(self._struck)
        if kill:
            happened, kind = self._striker.kill(number, node, 0), "kill"
            self._lost_workers += [node] if part == "worker" else []
        else:
            happened, kind = self._striker.pause(number, node, 0), "pause"
            bounds = (0.1, 0.7) if self._random.random() < 0.4 else (1.2, 2.5)
            self._paused[node] = (number, time.monotonic() + self._random.uniform(*bounds))
        self._hurt.add(node)
        if happened:
            self._struck.append(Struck(kind, part, node))

    def _options(self) -> list[tuple[str, str]]:
        """What may be hit now: pairs of what a node is to the group, and its name."""
        table, names = self._ps.table(), {node.address: node for node in self._ps.nodes}
        chains = [[names[m.address].name for m in view.chain] for view in table.views]
        sound = [node for node in names.values() if node.name in set(self._pool.alive())]
        sound = [node for node in sound if node.name not in self._hurt]
        keepers = {
            names[keeper.address].name: part
            for part, keepers in (("mailbox", table.mailboxes), ("store", table.stores))
            for keeper in keepers
        }
        options = []
        for node in sound:
            if node.role in SERVING:
                part = _part(node.name, chains)
                if part == "spare" or self._may_lose(node.name, chains):
                    options.append((part, node.name))
            elif node.name in keepers and self._may_lose_keeper():
                options.append((keepers[node.name], node.name))
            elif node.name in self._places() and not self._hurts("worker"):
                options.append(("worker", node.name))
        return options

    def _hurts(self, kind: str) -> bool:
        return any(role_of(name) == kind for name in self._hurt)

    def _may_lose_keeper(self) -> bool:
        """Whether states and mail are elsewhere too: what a store loses, the servers still have.

        So has another store.
        """
        if self.case.recovery.stores > 1:
            return not self._hurts_keeper
        return self.case.both or all(role_of(n) == "worker" for n in self._hurt)

    @property
    def _hurts_keeper(self) -> bool:
        return self._hurts("store") or self._hurts("mailbox")

    def _may_lose(self, name: str, chains: Sequence[Sequence[str]]) -> bool:
        alone = not self.case.both and self.case.recovery.stores == 1
        if alone and self._hurts_keeper:
            return False
        if self.case.both or not self.case.replicated:
            return True
        return all(set(chain) - self._hurt - {name} for chain in chains if name in chain)

    def _mend(self) -> None:
        """Replace what was killed, let go on what was paused, start lost workers again."""
        fresh, paused = {}, set(self._paused)
        for name in sorted(self._hurt - self._paused.keys()):
            time.sleep(self._random.choice([0.0, 0.0, 0.5]))
            fresh[name] = self._pool.replace(name)
        while self._paused:
            name, (_, until) = min(self._paused.items(), key=lambda entry: entry[1][1])
            time.sleep(max(0.0, until - time.monotonic()))
            self._resume(name)
        for name in sorted(paused - set(self._pool.alive())):  # others could take over from these
            fresh[name] = self._pool.replace(name)
        eventually(
            lambda: set(fresh.values()) <= {node.name for node in self._ps.nodes},
            "start of nodes",
            PATIENCE,
        )
        for node in self._lost_workers:
            self._start_again(self._places()[node], fresh[node])
        self._lost_workers.clear()

    def _resume(self, name: str) -> None:
        number, _ = self._paused.pop(name)
        self._striker.resume(number, name)

    def _places(self) -> dict[str, str]:
        """Which worker is on which node, as far as is known by now."""
        return {event.node: event.worker for event in self.watch.record.of(WorkerJoined)}

    # -- what must hold ----------------------------------------------------------------------------

    def _advances(self) -> None:
        """Every shard must apply updates again, within a bound."""

        def versions() -> list[int] | None:
            replies = [reply for reply in self._ps.audit() if reply is not None]
            return [reply.version for reply in replies] if len(replies) == SHARDS else None

        before = eventually(versions, "service of all shards", PROGRESS)

        def advanced() -> bool:
            now = versions()
            self._require_sound_workers()
            # A shard may still fall back once: then it must advance from there.
            nonlocal before
            if now is not None and any(n < b for n, b in zip(now, before or (), strict=True)):
                before = now
            return now is not None and all(n > b for n, b in zip(now, before or (), strict=True))

        eventually(advanced, "progress of all shards", PROGRESS)

    def _finish(self) -> None:
        """Have the workers end; none may have failed."""
        (self._folder / "stop").touch()
        futures = list(self._workers.values())
        with self._pool.cluster.client.as_current(), suppress(TimeoutError):
            wait(futures, timeout=PATIENCE)
        self._require_sound_workers()
        late = [name for name, future in self._workers.items() if not future.done()]
        require(not late, f"{late} did not end")

    def _require_sound_workers(self) -> None:
        for name, future in self._workers.items():
            if future.status == "error":
                raise Violation(f"{name} failed: {future.exception()!r}")

    def _check(self, shard: int) -> int:
        """Check a shard that is at rest; return how many acked updates it has lost."""
        states = eventually(partial(self._at_rest, shard), f"rest of shard {shard}", PATIENCE)
        lost = check_shard(shard, states or (), self._notes())
        try:  # events come late
            eventually(
                lambda: len(lost) <= self._may_be_lost(shard), f"events of shard {shard}", PROGRESS
            )
        except TookTooLong:
            raise Violation(
                f"shard {shard}: {len(lost)} acked updates are lost, not "
                f"{self._may_be_lost(shard):g}: {sorted(lost)}"
            ) from None
        return len(lost)

    def _at_rest(self, shard: int) -> list[ShardState] | None:
        """The states of all replicas, from head to tail, once they hold the same operations."""
        table = self._ps.table()
        if not table.complete:
            return None
        addresses = [member.address for member in table.views[shard].chain]
        found = self._pool.cluster.client.run(_states, self._ps.group.name, workers=addresses)
        states = [found[address].get(shard) for address in addresses]
        known = [state for state in states if state is not None]
        same = len(known) == len(states) and len({state.index for state in known}) == 1
        return known if same else None

    def _may_be_lost(self, shard: int) -> float:
        record = self.watch.record
        restorations = restorations_of(shard, (*record.of(Decided), *record.of(Restored)))
        if self.case.layered:
            require_newest(shard, record)
        if self.case.interval == 0 or self.case.layered:
            anew = [e for e in record.of(Restored) if (e.shard, e.source) == (shard, "initial")]
            anew = [e for e in anew if e.epoch in restorations]
            require(not anew, f"shard {shard} began anew: {anew}")
        workers = sum(s.part == "worker" for s in self._struck)
        by_restoring = self.case.interval * len(restorations) if restorations else 0
        return by_restoring + self.case.kept_by_worker * workers

    def _dropped(self) -> int:
        """How many updates were refused as too stale, of workers that were away for too long."""
        acked = self.watch.record.of(Acked)
        return sum(event.outcomes.count("dropped") for event in acked)


def restorations_of(shard: int, events: Iterable[Decided | Restored]) -> set[int]:
    """Return the epochs in which a shard came back after losses; its start is none of them.

    The coordinator says what it decides; what a host has restored may never be told, for one that
    is killed soon after takes the event along.
    """
    return {
        event.epoch
        for event in events
        if event.shard == shard
        and event.epoch > 1
        and (isinstance(event, Restored) or event.how == "restore")
    }


def require_newest(shard: int, record: Record) -> None:
    """What a shard went back to below a layer is no older than what was there when that began."""
    decided = {e.epoch: e.t for e in record.of(Decided) if e.shard == shard}
    written = [e for e in record.of(CheckpointWritten) if e.shard == shard]
    for event in record.of(Restored):
        if (event.shard, event.source) == (shard, "checkpoint") and event.epoch in decided:
            there = [
                (e.epoch, e.version)
                for e in written
                if e.epoch < event.epoch and e.t < decided[event.epoch]
            ]
            epoch, version = max(there, default=(0, 0))
            require(
                event.version >= version,
                f"shard {shard}: went back to version {event.version} in epoch {event.epoch}, "
                f"though {version} of epoch {epoch} was complete",
            )


def _part(name: str, chains: Sequence[Sequence[str]]) -> str:
    if any(chain[:1] == [name] for chain in chains):
        return "head"
    return "replica" if any(name in chain for chain in chains) else "spare"


# -- what runs on the nodes ------------------------------------------------------------------------


def _dispatch(tasks: Sequence[Task], worker: Any) -> None:
    count(tasks[worker.index], worker)


def _states(group: str, dask_worker: Any) -> dict[int, ShardState]:
    """The replicas that a node holds for a group."""
    found: dict[int, ShardState] = {}
    for key, actor in dask_worker.state.actors.items():
        if isinstance(actor, HostActor) and f"-{group}-" in key:
            found.update(actor.states())
    return found
