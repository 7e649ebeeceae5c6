"""The errors that dps raises on purpose, with the root `DpsError`, and its warnings.

Errors cross the wire by name and message (see `dps.protocol.wire`), so each takes one string, which
describes the error, its place and the remedy.
"""

from __future__ import annotations


class DpsError(Exception):
    """Root of all errors that dps raises on purpose."""


class ConfigurationError(DpsError):
    """A value, name or combination of choices is invalid."""


class CapacityError(ConfigurationError):
    """The cluster has too few nodes for the servers, replicas, stores and workers."""


class NonFiniteGradient(DpsError):
    """A gradient holds NaN or infinity; nothing of it was applied."""


class ShapeMismatch(DpsError):
    """An array has another name, shape or dtype than its parameter."""


class FunctionFailed(DpsError):
    """A function on a shard raised, or its return value is invalid; nothing changed on that shard.

    The message has the shard, the traceback, and the shards on which the function was carried out.
    """


class RemoteError(DpsError):
    """Code in another process raised an error that is not a `DpsError`, which is a bug there.

    The message contains the error; the log of that process has the traceback. The request is not
    repeated, because it would fail again.
    """


class TransportError(DpsError):
    """A call had no reply; it may have been carried out."""


class Unreachable(TransportError):
    """The connection was refused or lost: the other process has ended, or is ending."""


class DeadlineExceeded(TransportError):
    """No reply came before the call's deadline."""


class SchedulerLost(TransportError):
    """The process of Dask's scheduler, with the coordinator, has ended or is disconnected."""


class InternalError(DpsError):
    """A background task of dps failed with an unforeseen exception, which the message names.

    This is a bug in dps. The event `TaskFailed`, and the log of the node, have the traceback.
    """


class KeysUnknown(DpsError):
    """The shard's node does not have the list of indices of an update; send it too."""


class StaleEpoch(DpsError):
    """The request has another epoch than the replica; fetch the new table."""


class NotServing(DpsError):
    """The node does not serve the shard (yet, or any more); fetch the new table."""


class LeaseExpired(NotServing):
    """The node's lease is over: others may serve in its place, so it refuses requests."""


class Evicted(DpsError):
    """The worker was silent for too long, so others do not wait for it; it must rejoin.

    Its gradients since then may be too stale for the consistency model.
    """


class MailboxClosed(DpsError):
    """The shard's server is back: push to it directly instead of to its mailbox."""


class GroupClosed(DpsError):
    """The parameter server, pipeline or replica was closed: it sends and receives no more."""


class CoordinatorGone(GroupClosed, NotServing):
    """Dask's scheduler has no coordinator of this name: the group was closed."""


class TrainingStopped(DpsError):
    """The training was stopped, or this worker's future cancelled.

    It ends the training function and its Dask future.
    """


class ResultLost(DpsError):
    """The result of a finished worker was lost with its node.

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
    """A shard has had fewer copies than wanted for more than a second.

    It gets another copy as soon as a node for servers is free.
    """


class LastStateNotSavedWarning(UserWarning):
    """The last state of a training is in no checkpoint, so `resume` lacks the last updates."""


class UpdatesDroppedWarning(UserWarning):
    """Updates were dropped as too stale, because others did not wait for their worker."""


class ReturnedWarning(UserWarning):
    """A supervised program was restarted, and continues from its checkpoints."""


class TooManyReturns(DpsError):
    """A supervised program was lost too often, and is not restarted."""


class ProgramFailed(DpsError):
    """A supervised program exited before it returned, or its result cannot be passed on."""


class ShardUnavailable(DpsError):
    """A shard was down for longer than the caller waits."""


class CheckpointCorrupt(DpsError):
    """A checkpoint does not match its manifest; it must not be restored."""


class StoreUnavailable(DpsError):
    """A state store or checkpoint path cannot be read or written."""


def require(holds: bool, otherwise: str) -> None:
    """Raise `ConfigurationError` with the text `otherwise` unless a condition holds."""
    if not holds:
        raise ConfigurationError(otherwise)
