"""Every error that dps raises on purpose; all share the root `DpsError`. And the warnings.

Errors cross the wire by name and message (see `dps.protocol.wire`), so each takes one string, and
the string is written for the person who reads it: what is wrong, where, and what to do.
"""

from __future__ import annotations


class DpsError(Exception):
    """Root of all errors that dps raises on purpose."""


class ConfigurationError(DpsError):
    """What was asked for cannot work as asked: a wrong value, name or combination of choices."""


class RecordDamaged(ConfigurationError):
    """The record of a trial holds what no trial of this version of dps has written."""


class CapacityError(ConfigurationError):
    """The cluster has too few nodes for the servers, replicas, stores and workers asked for."""


class NonFiniteGradient(DpsError):
    """A gradient holds NaN or infinity. It was refused whole: nothing of it was applied."""


class ShapeMismatch(DpsError):
    """A pushed array has another name, shape or dtype than the parameter it is meant for."""


class FunctionFailed(DpsError):
    """A function that was run on a shard raised, or returned what it may not.

    Nothing of it was applied on that shard. The message says which one it was, and holds the
    traceback; if there are several shards, it says on which of them the function was carried out.
    """


class RemoteError(DpsError):
    """Code in another process raised an error that is not a `DpsError`, which is a bug there.

    The message contains the error; the log of that process has the traceback. The request is not
    repeated, because it would fail again.
    """


class TransportError(DpsError):
    """A call did not bring a reply. The other side may or may not have carried it out."""


class Unreachable(TransportError):
    """The connection was refused or lost: the process at the other end is gone, or going."""


class DeadlineExceeded(TransportError):
    """No reply came before the call's deadline."""


class SchedulerLost(TransportError):
    """The process of Dask's scheduler has ended, or the connection to it broke.

    The coordinator is in that process, so the parameter server is lost with it.
    """


class InternalError(DpsError):
    """A background task of dps failed with an unforeseen exception, which the message names.

    This is a bug in dps. The event `TaskFailed`, and the log of the node, have the traceback.
    """


class KeysUnknown(DpsError):
    """The shard's node does not have the list of indices that an update counts on; send it too."""


class StaleEpoch(DpsError):
    """The request names another epoch of the shard than the replica is in; fetch the new table."""


class NotServing(DpsError):
    """The node does not hold what was asked for (any more, or yet); fetch the new table."""


class LeaseExpired(NotServing):
    """The node's lease has run out: others may serve in its place, so it answers nobody."""


class Evicted(DpsError):
    """The worker did not answer for too long, and others do not wait for it any more.

    What it computed meanwhile may be too stale for the consistency model; it must enter again.
    """


class MailboxClosed(DpsError):
    """The shard's server is back: push to it directly instead of to its mailbox."""


class GroupClosed(DpsError):
    """The parameter server was closed; nothing can be pushed to it or pulled from it any more.

    Or a pipeline, or what was attached, was: nothing can be pushed by it, but by another one.
    """


class CoordinatorGone(GroupClosed, NotServing):
    """Dask's scheduler has no coordinator of this name (any more): the group was closed."""


class TrainingStopped(DpsError):
    """The training was stopped, or this worker's future cancelled: it pushes and pulls no more.

    A training function that does not catch it ends with it, and so does its Dask future.
    """


class ResultLost(DpsError):
    """A worker had finished, and the result of its function was lost with its node.

    Its updates are in the weights. Its function is not called again.
    """


class UpdatesLost(DpsError):
    """Updates that had been acknowledged were lost, and `on_loss="raise"` ends the training."""


class UpdatesDropped(DpsError):
    """Most updates of a worker were dropped as too stale, so its result means little.

    The worker was stopped, unreachable, or busy for longer than `Timings.patience`, so the other
    workers did not wait for it. Its function may be run again with `future.retry()`.
    """


class UpdatesLostWarning(UserWarning):
    """Updates that had been acknowledged were lost. Shown by default."""


class CopiesMissingWarning(UserWarning):
    """A shard has had fewer copies than `recovery=` asks for, for longer than a second.

    It gets another copy as soon as a node for servers is free.
    """


class LastStateNotSavedWarning(UserWarning):
    """The state at the end of a training is in no checkpoint; the one before is whole.

    No update was lost while the parameter server was up, but `resume` does not have the last ones.
    """


class UpdatesDroppedWarning(UserWarning):
    """Updates were dropped as too stale: others did not wait for their worker. Shown once."""


class ReturnedWarning(UserWarning):
    """A supervised program was started again, and goes on from its checkpoints."""


class TooManyReturns(DpsError):
    """A supervised program was lost again, and is not started again: it was so too often."""


class ProgramFailed(DpsError):
    """The process of a supervised program exited by itself, or its result cannot be passed on."""


class ShardUnavailable(DpsError):
    """A shard stayed down for longer than the caller was ready to wait."""


class CheckpointCorrupt(DpsError):
    """A checkpoint's bytes do not match its manifest; it must not be restored."""


class StoreUnavailable(DpsError):
    """The state store or the checkpoint path could not be read or written."""


def require(holds: bool, otherwise: str) -> None:
    """Raise `ConfigurationError` with a text unless something holds."""
    if not holds:
        raise ConfigurationError(otherwise)
