"""Messages of checkpoints of all shards, and those to the state store and the mailbox."""

from __future__ import annotations

from dataclasses import dataclass

from dps.core.shard import ShardState
from dps.core.updates import Operation
from dps.protocol.wire import message

# How far each active worker is: its incarnation, and its clock, which is the number of its last
# update, or that of the round in which it entered.
Reach = dict[str, tuple[int, int]]


@message
@dataclass(frozen=True, slots=True)
class HoldCut:
    """Admit no further gradients, so that a cut can be taken. Reply: Held.

    After `patience` seconds they are admitted again, whatever becomes of the cut.
    """

    shard: int
    epoch: int
    cut: int
    patience: float


@message
@dataclass(frozen=True, slots=True)
class Held:
    """How far each active worker is on a shard that admits no further gradients."""

    reach: Reach


@message
@dataclass(frozen=True, slots=True)
class TakeCut:
    """Write the state in which every worker has come just so far. Reply: Taken, when written."""

    shard: int
    epoch: int
    cut: int
    upto: Reach


@message
@dataclass(frozen=True, slots=True)
class Taken:
    """The shard's version in the cut."""

    version: int


@message
@dataclass(frozen=True, slots=True)
class EndCut:
    """The cut is complete, or given up; cuts before `oldest` are not needed any more."""

    shard: int
    epoch: int
    cut: int
    complete: bool
    oldest: int


@message
@dataclass(frozen=True, slots=True)
class WantCut:
    """A shard's checkpoint is due: take a cut that holds its `version` soon. Reply: Done."""

    shard: int
    epoch: int
    version: int


@message
@dataclass(frozen=True, slots=True)
class PutSince:
    """Keep a state as by `PutState`, of which what the store holds already was left out.

    Of each table in `kept`, so many of the oldest levels are those of the state of index `base`.
    """

    shard: int
    epoch: int
    state: ShardState
    base: int
    kept: dict[str, int]


# -- to the store's node -----------------------------------------------------------------------


@message
@dataclass(frozen=True, slots=True)
class PutState:
    """Keep this state of a shard; refused if a server of a later epoch has used the store."""

    shard: int
    epoch: int
    state: ShardState


@message
@dataclass(frozen=True, slots=True)
class LookUp:
    """Refuse servers of earlier epochs from now on. Reply: StoredAt."""

    shard: int
    epoch: int


@message
@dataclass(frozen=True, slots=True)
class StoredAt:
    """The index of the state that a store has of a shard; -1: it has none."""

    index: int


@message
@dataclass(frozen=True, slots=True)
class GetState:
    """Return the shard's state and refuse servers of earlier epochs from now on."""

    shard: int
    epoch: int


@message
@dataclass(frozen=True, slots=True)
class Deposit:
    """Keep a gradient for a shard that is down in `epoch`."""

    shard: int
    epoch: int
    operation: Operation


@message
@dataclass(frozen=True, slots=True)
class TakeMail:
    """Close the shard's mailbox for `epoch` and return what is in it. Reply: Mail."""

    shard: int
    epoch: int


@message
@dataclass(frozen=True, slots=True)
class Mail:
    """Buffered gradients, in the order in which they were deposited."""

    operations: tuple[Operation, ...]


@message
@dataclass(frozen=True, slots=True)
class ClearMail:
    """The shard is served in this epoch, with what was taken from its mailbox; forget that."""

    shard: int
    epoch: int


@message
@dataclass(frozen=True, slots=True)
class Save:
    """To a shard's tail: write what is acknowledged by now to its checkpoint. Reply: SavedAt.

    With consistent cuts, that is one which holds it.
    """

    shard: int
    epoch: int


@message
@dataclass(frozen=True, slots=True)
class SavedAt:
    """The version of a shard that is in its checkpoint, or an earlier one than that is."""

    version: int
