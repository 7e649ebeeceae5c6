"""The three axes of recovery as data: durability, outage and replay, and their presets.

A `Recovery` only says what is wanted; `dps.protocol` carries it out.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from dps.errors import ConfigurationError

CHECKPOINT_EVERY = 100


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ConfigurationError(otherwise)


@dataclass(frozen=True, slots=True)
class NoDurability:
    """Shard state survives nothing; a lost shard restarts from its initial values."""

    replicas: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Shard state is written to files; a lost shard restarts from the last complete one.

    Parameters
    ----------
    every
        The promise, in updates: no more than `every` acked updates are ever at risk. If neither
        this nor `seconds` is given, it is 100.
    mode
        "sync" has the acks wait for every write that is due. "async" starts a write when half of
        the interval is over and acks go on meanwhile; they wait only if the promise would be
        broken.
    path
        Any fsspec path that all server nodes can reach. None: a folder of the run's own.
    keep
        How many checkpoints of each shard to keep.
    seconds
        The promise, in time: an acked update is saved within so many seconds, by a timer if no
        other update follows. While the path cannot be written to, nothing more is acked than came
        within that time.
    scope
        What goes back when a shard is lost: "shard", that one alone, or "all" of them, to the
        newest consistent cut, in which all shards hold the same updates. The promise then counts
        from that cut.
    """

    every: int | None = None
    mode: Literal["sync", "async"] = "async"
    path: str | None = None
    keep: int = 2
    seconds: float | None = None
    scope: Literal["shard", "all"] = "shard"
    replicas: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.every is None and self.seconds is None:
            object.__setattr__(self, "every", CHECKPOINT_EVERY)
        _require(
            self.every is None or self.every >= 1,
            f"checkpoint: every={self.every}, expected at least 1 update",
        )
        _require(
            self.seconds is None or 0 < self.seconds < math.inf,
            f"checkpoint: seconds={self.seconds}, expected more than 0",
        )
        _require(self.keep >= 1, f"checkpoint: keep={self.keep}, expected at least 1")
        _require(self.mode in ("sync", "async"), f"checkpoint: mode={self.mode!r} is unknown")
        _require(self.scope in ("shard", "all"), f"checkpoint: scope={self.scope!r} is unknown")


@dataclass(frozen=True, slots=True)
class Chain:
    """Shard state lives on a chain of `replicas` nodes; an update is acked when the tail has it.

    Parameters
    ----------
    reads
        Who serves pulls: the "tail", or "any" replica, which then answers with what it knows to be
        committed, and with nothing older than that worker has seen.
    aggregate
        How many updates are summed into one before they go down the chain (replication after
        aggregation, OSDI 2014, 3.5). Fewer are, when no more come within `linger` seconds.
    linger
        How long an update waits for others to be summed with, in seconds.
    """

    replicas: int = 2
    reads: Literal["tail", "any"] = "tail"
    aggregate: int = 1
    linger: float = 0.01

    def __post_init__(self) -> None:
        _require(self.replicas >= 1, f"chain: replicas={self.replicas}, expected at least 1")
        _require(self.reads in ("tail", "any"), f"chain: reads={self.reads!r} is unknown")
        _require(
            self.aggregate >= 1, f"chain: aggregate={self.aggregate}, expected at least 1 update"
        )
        _require(self.linger > 0, f"chain: linger={self.linger}, expected more than 0 s")


@dataclass(frozen=True, slots=True)
class SharedStore:
    """Shard state lives in a state store on another node (the stateless server).

    An update is acked when the store has a state that contains it; updates that arrive while the
    store is being written share the next write, at most `every` of them.
    """

    every: int = 16
    replicas: ClassVar[int] = 1

    def __post_init__(self) -> None:
        _require(self.every >= 1, f"shared_store: every={self.every}, expected at least 1 update")


@dataclass(frozen=True, slots=True)
class WorkerCache:
    """Shard state lives on in what workers read of it; a lost shard is rebuilt from the freshest.

    Updates that nobody has read since are lost, and the optimizer's state starts anew. If no
    worker that takes part holds a copy, the shard restarts from its initial values.
    """

    replicas: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Wait:
    """A worker whose shard is down waits until it is back."""


@dataclass(frozen=True, slots=True)
class Continue:
    """A worker whose shard is down computes on with the last weights and buffers its gradients.

    Parameters
    ----------
    limit
        How many gradients of one worker and shard are buffered; when there are more, it waits.
    buffer
        "mailbox" keeps them on the store's node, where they survive the worker; "worker" keeps
        them in the worker.
    """

    limit: int = 32
    buffer: Literal["mailbox", "worker"] = "mailbox"

    def __post_init__(self) -> None:
        _require(self.limit >= 1, f"continue: limit={self.limit}, expected at least 1 gradient")
        _require(
            self.buffer in ("mailbox", "worker"), f"continue: buffer={self.buffer!r} is unknown"
        )


Policy = Literal["sum", "mean", "each", "staleness_scaled", "clip", "drop_older", "published"]


@dataclass(frozen=True, slots=True)
class Replay:
    """How buffered gradients are applied after an outage (see `dps.core.replay`)."""

    policy: Policy = "sum"
    clip_norm: float = 1.0
    drop_older_than: int = 100

    def __post_init__(self) -> None:
        known = get_args(Policy)
        _require(
            self.policy in known,
            f"replay: policy={self.policy!r} is unknown; known: {', '.join(known)}",
        )
        _require(self.clip_norm > 0, f"replay: clip_norm={self.clip_norm}, expected more than 0")
        _require(
            self.drop_older_than >= 0,
            f"replay: drop_older_than={self.drop_older_than}, expected 0 or more versions",
        )


Durability = NoDurability | Checkpoint | Chain | SharedStore | WorkerCache
Outage = Wait | Continue


@dataclass(frozen=True, slots=True)
class Recovery:
    """One choice on each axis: where state survives, what workers do meanwhile, and afterwards."""

    durability: Durability = NoDurability()
    outage: Outage = Wait()
    replay: Replay = Replay()

    def __post_init__(self) -> None:
        back_together = isinstance(self.durability, Checkpoint) and self.durability.scope == "all"
        _require(
            not (back_together and isinstance(self.outage, Continue)),
            "checkpoint with scope='all' does not go with outage=continue: gradients buffered for "
            "the lost shard would follow on its cut, but not on those of the others; use "
            "outage=wait, or scope='shard'",
        )

    @property
    def needs_store(self) -> bool:
        """Whether a node for the state store and the mailboxes is needed."""
        in_mailbox = isinstance(self.outage, Continue) and self.outage.buffer == "mailbox"
        return isinstance(self.durability, SharedStore) or in_mailbox


PRESETS: dict[str, Recovery] = {
    "none": Recovery(),
    "checkpoint": Recovery(durability=Checkpoint()),
    "chain": Recovery(durability=Chain()),
    "stateless": Recovery(durability=SharedStore(), outage=Continue()),
}


def preset(name: str) -> Recovery:
    """Return the strategy of that name; raises `ConfigurationError` with the nearest name."""
    try:
        return PRESETS[name]
    except KeyError:
        near = difflib.get_close_matches(name, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigurationError(
            f"unknown recovery strategy {name!r}; {hint}known are: {', '.join(PRESETS)}"
        ) from None


def with_checkpoint_path(recovery: Recovery, path: str) -> Recovery:
    """Return the same recovery with the checkpoint path filled in where none was given."""
    durability = recovery.durability
    if isinstance(durability, Checkpoint) and durability.path is None:
        return replace(recovery, durability=replace(durability, path=path))
    return recovery
