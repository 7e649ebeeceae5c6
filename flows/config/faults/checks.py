"""What can be known to be wrong with a fault plan before it runs: its targets and moments.

Each objection is a dotted key of the configuration and a reason, as a person should read it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

from dps.core.faults.expansion import (
    Drawn,
    Each,
    Entry,
    Expanded,
    Flapping,
    Recorded,
    Recurring,
)
from dps.core.faults.plan import (
    After,
    Among,
    AtSeconds,
    AtUpdates,
    Corrupt,
    DiskFull,
    During,
    Fault,
    FaultPlan,
    InChain,
    Kill,
    Seat,
    Target,
    Way,
)
from dps.core.names import original, predecessor, replacement, role_of
from flows.config.errors import suggest
from flows.config.limits import MOST_LISTED
from flows.quoting import listed, quoted

Objection = tuple[str, str]

NO_CHECKPOINTS = "no checkpoints are written; expected recovery.durability: checkpoint"
_KEEP_NO_FILES = {"worker", "evaluator", "store"}
_FOLDER = "expected a folder as recovery.durability.path, or none"


@dataclass(frozen=True)
class FaultContext:
    """What a plan is carried out on: the nodes by name, the shards, and what the trial writes.

    `checkpoints` tells whether shards write checkpoints, `local` whether to files of this machine,
    `ways` how nodes of its cluster can be killed, and `virtual` whether they are on virtual time.
    The training ends after so many `updates`, or `seconds` at the latest.
    """

    names: tuple[str, ...]
    shards: int
    replicas: int
    checkpoints: bool
    local: bool
    ways: tuple[Way, ...] = get_args(Way)
    virtual: bool = False
    updates: float = math.inf
    seconds: float = math.inf

    @cached_property
    def known(self) -> frozenset[str]:
        """The names, to look one up."""
        return frozenset(self.names)


def entry_objections(entries: Sequence[Entry], context: FaultContext) -> Iterator[Objection]:
    """Yield what is wrong with single entries, and with what they say about each other."""
    for number, entry in enumerate(entries):
        for place, fault in _faults_of(entry):
            for key, reason in _wrong_target(fault, context):
                yield f"faults.{number}.{'csv' if place else key}", f"{place}{reason}"
        if isinstance(entry, Drawn):
            yield from _late_range(number, entry, context)
        when = _moment_of(entry)
        if isinstance(when, After):
            yield from _wrong_reference(number, when, entries)
        if isinstance(when, During):
            yield from _wrong_phase(number, when, entries, context)
            yield from _empty_chain(number, when, entry, context)
        if isinstance(entry, Recurring | Each) and any(_dies_once(f) for _, f in _faults_of(entry)):
            reason = "what is never replaced cannot be killed again; give a number of seconds"
            yield f"faults.{number}.back_after", reason


def plan_objections(expanded: Expanded, context: FaultContext) -> Iterator[Objection]:
    """Yield faults on nodes that are gone by then, or that cannot have joined by then."""
    plan = _Plan(expanded.plan)
    for number, fault in enumerate(plan.faults):
        for name in _names(fault):
            if not plan.may_be_there(name, number):
                there = sorted(plan.present(number, context.names))
                reason = (
                    f"there is no node {quoted(name)} to {fault.kind} then; {suggest(name, there)}"
                )
                yield f"faults.{expanded.origins[number]}.target", reason


def late(plan: FaultPlan, updates: int, time_limit: float) -> tuple[tuple[Fault, str], ...]:
    """Return the faults that cannot happen because the training ends before, each with its end."""
    found: list[tuple[Fault, str]] = []
    for fault in plan:
        match fault.when:
            case AtUpdates(moment, optional=False) if moment > updates:
                found.append((fault, f"the training ends after {updates}"))
            case AtSeconds(moment, optional=False) if moment >= time_limit:
                found.append((fault, f"the time limit is {time_limit:g} s"))
    return tuple(found)


def is_local(path: str | None) -> bool:
    """Whether files at an fsspec path are files of this machine; None is the run's own folder."""
    return path is None or "://" not in path or path.startswith(("file://", "local://"))


# -- targets ----------------------------------------------------------------------------------


def _faults_of(entry: Entry) -> Iterator[tuple[str, Fault]]:
    """The faults of an entry, each with the words that tell where in a trace it is."""
    match entry:
        case Recurring(fault) | Flapping(fault):
            yield "", fault
        case Drawn(drawn):
            yield from _faults_of(drawn)
        case Each(faults):
            yield from (("", fault) for fault in faults)
        case Recorded(faults):
            for row, fault in enumerate(faults, 1):
                yield f"row {row}, column 'target': ", fault
        case _:
            yield "", entry


def _wrong_target(fault: Fault, context: FaultContext) -> Iterator[Objection]:
    if isinstance(fault, Corrupt):
        if fault.target >= context.shards:
            yield "shard", _no_shard(fault.target, context)
        elif not context.checkpoints:
            yield "shard", NO_CHECKPOINTS
        elif not context.local:
            yield "shard", f"only checkpoints in files of this machine can be damaged; {_FOLDER}"
        return
    for reason in _impossible(fault.target, fault.kind, context):
        yield "target", reason
    if isinstance(fault, Kill) and fault.by not in context.ways:
        yield (
            "by",
            f"nodes of this kind of cluster are killed by {' or '.join(context.ways)}; "
            f"expected cluster: {{kind: slurm}} for {fault.by!r}",
        )
    if isinstance(fault, DiskFull):
        yield from _nothing_to_keep(fault.target, context)


def _impossible(target: Target, kind: str, context: FaultContext) -> Iterator[str]:
    match target:
        case InChain(shard) | Among(shard=int(shard)) if shard >= context.shards:
            yield _no_shard(shard, context)
        case InChain(shard, "middle") if context.replicas < 3:
            yield f"a chain of {context.replicas} has no middle; expected 3 replicas or more"
        case InChain(position=int(position)) if position >= context.replicas:
            yield (
                f"a chain of {context.replicas} has no position {position}; "
                f"expected 0 to {context.replicas - 1}"
            )
        case Among(role=str(role)) if not any(n.startswith(f"{role}-") for n in context.names):
            known = listed(context.names, MOST_LISTED)
            yield f"there is no {role} to {kind}; there are: {known}"
        case Seat(name) | str(name):
            yield from _unknown((name,), kind, context)
        case tuple(names):
            yield from _unknown(names, kind, context)


def _nothing_to_keep(target: Target, context: FaultContext) -> Iterator[Objection]:
    """Servers write checkpoints, stores keep states and mail; who keeps nothing cannot be full."""
    match target:
        case str(name) | Seat(name):
            roles = {role_of(name)}
        case tuple(names):
            roles = {role_of(name) for name in names}
        case Among(role=str(role)):
            roles = {role}
        case _:
            roles = {"server"}
    for role in sorted(roles & {"worker", "evaluator"}):
        who = "an evaluator" if role == "evaluator" else f"a {role}"
        yield "target", f"{who} keeps nothing that could fail; expected a server or a store"
    if roles - _KEEP_NO_FILES and not context.checkpoints:
        yield "kind", "nothing is written to disk; expected recovery.durability: checkpoint"
    elif roles - _KEEP_NO_FILES and context.virtual:
        yield (
            "kind",
            "the disk of nodes on virtual time is in memory and never full; expected real nodes, "
            "as by cluster: {kind: local}",
        )
    elif roles - _KEEP_NO_FILES and not context.local:
        yield "kind", f"only writes to files of this machine can be made to fail; {_FOLDER}"


def _unknown(names: Sequence[str], kind: str, context: FaultContext) -> Iterator[str]:
    for name in names:
        if original(name) not in context.known:
            yield f"there is no node {quoted(name)} to {kind}; {suggest(name, context.names)}"
    if len(set(names)) < len(names):
        yield f"a node is named twice in {quoted(list(names))}; keep one of them"


def _no_shard(shard: int, context: FaultContext) -> str:
    return f"there is no shard {shard}; expected 0 to {context.shards - 1}"


# -- moments ----------------------------------------------------------------------------------


def _moment_of(entry: Entry) -> object:
    match entry:
        case Recurring() | Each() | Recorded() | Drawn():
            return None
        case Flapping(fault):
            return fault.when
        case _:
            return entry.when


def _late_range(number: int, entry: Drawn, context: FaultContext) -> Iterator[Objection]:
    """A moment that only some seeds can meet would leave the others out of the figures."""
    high = entry.moment.high
    if entry.moment.unit == "updates" and high - 1 > context.updates:
        yield (
            f"faults.{number}.at_updates.between",
            f"the training ends after {context.updates:g} updates, so that some seeds would not "
            "meet the fault; expected a range within it",
        )
    if entry.moment.unit == "seconds" and high > context.seconds:
        yield (
            f"faults.{number}.at_seconds.between",
            f"the time limit is {context.seconds:g} s, so that some seeds would not meet the "
            "fault; expected a range within it",
        )


def _wrong_reference(number: int, when: After, entries: Sequence[Entry]) -> Iterator[Objection]:
    key = f"faults.{number}.after.fault"
    if when.fault >= len(entries):
        yield key, f"there is no fault {when.fault}; expected 0 to {len(entries) - 1}"
    elif isinstance(entries[when.fault], Recurring | Each | Recorded):
        yield key, f"fault {when.fault} stands for any number of faults; name a single one"
    elif number in _circle(number, entries):
        yield key, f"fault {number} would come after itself"


def _circle(number: int, entries: Sequence[Entry]) -> set[int]:
    """The faults that a fault waits for, directly or not."""
    waited: set[int] = set()
    when = _moment_of(entries[number])
    while isinstance(when, After) and when.fault not in waited and when.fault < len(entries):
        waited.add(when.fault)
        when = _moment_of(entries[when.fault])
    return waited


def _wrong_phase(
    number: int, when: During, entries: Sequence[Entry], context: FaultContext
) -> Iterator[Objection]:
    key = f"faults.{number}.phase"
    if when.phase == "checkpoint" and not context.checkpoints:
        yield key, NO_CHECKPOINTS
    elif when.phase == "checkpoint" and context.virtual:
        yield key, "a checkpoint on virtual time is written at once, so that nothing can hit it"
    elif when.phase == "checkpoint" and not context.local:
        yield key, f"only checkpoints in files of this machine can be watched; {_FOLDER}"
    elif when.phase == "recovery" and len(entries) == 1:
        yield key, "no other fault of the plan takes a shard down; add one"


def _empty_chain(
    number: int, when: During, entry: Entry, context: FaultContext
) -> Iterator[Objection]:
    """A shard that is being restored has no replica that could be hit by its place."""
    shard_of = [f.target for _, f in _faults_of(entry) if isinstance(f.target, InChain | Among)]
    lost = any(isinstance(t, InChain) or t.shard is not None for t in shard_of)
    if when.phase == "recovery" and context.replicas == 1 and lost:
        reason = (
            "a shard without followers has no replica while it is restored; aim at who it is "
            "restored on, such as {role: server, index: 0} or spare-0"
        )
        yield f"faults.{number}.target", reason


def _dies_once(fault: Fault) -> bool:
    return (
        isinstance(fault, Kill) and fault.back_after is None and not isinstance(fault.target, Among)
    )


# -- who is there, when -----------------------------------------------------------------------


def _names(fault: Fault) -> tuple[str, ...]:
    """The nodes that a fault names as they are; places always find somebody or nobody."""
    if isinstance(fault.target, str):
        return (fault.target,)
    return fault.target if isinstance(fault.target, tuple) else ()


class _Plan:
    """A plan with what is asked of it again and again: who is killed when, and what is before what.

    A plan may have a thousand faults, each of which may come after the one before.
    """

    def __init__(self, plan: FaultPlan) -> None:
        self.faults = plan
        # For each fault: the one that began what it comes after, and all of these, as bits.
        self._began = [*range(len(plan))]
        self._waited = [0] * len(plan)
        self._follow()
        self._kills = [(n, fault) for n, fault in enumerate(plan) if isinstance(fault, Kill)]
        self._kills_of: defaultdict[str, list[int]] = defaultdict(list)
        for number, fault in self._kills:
            for name in _names(fault):
                self._kills_of[name].append(number)

    def may_be_there(self, name: str, number: int) -> bool:
        """Whether a node of this name can be there when fault `number` comes."""
        killed = self._kills_of.get(name, ())
        if any(other != number and self._before(other, number) for other in killed):
            return False
        if name == original(name):
            return True
        before = predecessor(name)
        return any(
            other != number
            and fault.back_after is not None
            and _may_hit(fault, before)
            and not self._before(number, other)
            for other, fault in self._kills
        )

    def present(self, number: int, names: Sequence[str]) -> set[str]:
        """The nodes that can be there when fault `number` comes."""
        there = set(names)
        for other, fault in self._kills:
            if fault.back_after is not None and other != number:
                there |= {replacement(name) for name in _names(fault)}
        return {name for name in there if self.may_be_there(name, number)}

    def _before(self, first: int, second: int) -> bool:
        """Whether one fault of the plan is sure to come before another."""
        if self._waited[second] >> first & 1:
            return True
        began = self._began[second]
        match self.faults[first].when, self.faults[began].when:
            case (AtUpdates(one), AtUpdates(two)) | (AtSeconds(one), AtSeconds(two)):
                return (one, first) < (two, began)
        return False

    def _follow(self) -> None:
        done: set[int] = set()
        for number in range(len(self.faults)):
            # Not by recursion: each may come after the one before.
            path = [number]
            while path[-1] not in done and isinstance(when := self.faults[path[-1]].when, After):
                path.append(when.fault)
            for after, other in zip(reversed(path[:-1]), reversed(path[1:]), strict=True):
                self._began[after] = self._began[other]
                self._waited[after] = self._waited[other] | 1 << other
            done.update(path)


def _may_hit(fault: Fault, name: str) -> bool:
    if isinstance(fault, Kill) and fault.by == "host":
        return True  # it may be on that host
    match fault.target:
        case int():
            return False
        case str() | tuple():
            return name in _names(fault)
        case Seat(seat):
            return name.startswith(seat) and original(name) == original(seat)
        case Among(role=str(role)):
            return name.startswith(f"{role}-")
        case _:
            return True
