"""Events as sentences: faults, losses and recoveries, as `dps run` and `dps top` show them."""

from __future__ import annotations

from dps import events
from dps.core.names import restored_from

_TEMPLATES: dict[type[events.Event], str] = {
    events.Killed: "{e.node} killed after {e.updates} updates, by {e.by}{still}{proof}",
    events.Paused: "{e.node} paused after {e.updates} updates{not_stopped}",
    events.Resumed: "{e.node} {resumed}",
    events.Disturbed: "{e.node} {e.kind} after {e.updates} updates: {e.evidence}",
    events.Undisturbed: "{e.node} is no longer disturbed: {e.evidence}",
    events.PhaseMet: "the fault struck during a {e.phase}: {e.evidence}",
    events.FaultMissed: "the fault on {e.target} did not happen: {e.reason}",
    events.FaultSkipped: "a fault on {e.target} was left out: {e.reason}",
    events.Detected: "{e.node} detected as lost by the {e.by}; shard {e.shard} {state}",
    events.Failover: "{e}",
    events.LossReported: "shard {e.shard} has lost {least}{e.updates} acknowledged updates",
    events.RolledBack: "all shards go back to cut {e.cut}, for shard {e.shard}",
    events.CapacityRestored: "{e.node} is up and replaces the lost node",
    events.Promoted: "shard {e.shard} continues at {e.node}, at version {e.version}",
    events.Restored: "shard {e.shard} restored at {e.node} from {source}",
    events.ReplicaAdded: "shard {e.shard} has a new replica at {e.node}",
    events.Rebuilt: "shard {e.shard}: the copy of {e.donor} was {e.age_seconds:.1f} s old",
    events.Replayed: "shard {e.shard}: {e.count} buffered updates applied",
    events.CheckpointRefused: "shard {e.shard}: skipped a damaged checkpoint: {e.reason}",
    events.Moved: "shard {e.shard} moved from {e.source} to {e.target}, paused for "
    "{e.pause_seconds:.3f} s",
    events.Rescaled: "after {e.updates} updates, the new target is {wanted}",
    events.NodeLeaving: "{e.node} will leave: {why}",
    events.NodeDrained: "{e.node} was emptied in {e.seconds:.1f} s",
    events.NodeLeft: "{e.node} left, and nothing was lost",
    events.WorkerLeft: "{e.worker} {e.reason}",
    events.TrialResumed: "resumed at update {e.updates}, from checkpoints in {e.path}",
}
_WHY = {"lifetime": "its lifetime is nearly over", "signal": "it received SIGTERM"}


def sentence(event: events.Event) -> str | None:
    """Return an event as a sentence; None unless it is a fault, a loss or a recovery."""
    match event:
        case events.WorkerLeft(reason="finished"):
            return None
        case events.Restored(epoch=1) | events.ReplicaAdded(epoch=1):  # while shards start up
            return None
    why, evidence = getattr(event, "why", ""), getattr(event, "evidence", "")
    gone, stopped, running = (getattr(event, n, True) for n in ("gone", "stopped", "running"))
    counts = ((what, getattr(event, what, None)) for what in ("servers", "workers"))
    words = {
        "state": "continues" if getattr(event, "serving", False) else "is down",
        "least": "" if getattr(event, "exact", True) else "at least ",
        "wanted": ", ".join(f"{n} {what}" for what, n in counts if n is not None),
        "source": restored_from(getattr(event, "source", ""), getattr(event, "version", 0)),
        "still": "" if gone else ", but its process is still there",
        "not_stopped": "" if stopped else ", but its process is not stopped",
        "resumed": "continues" if running else "does not continue",
        "proof": f" ({evidence})" if evidence else "",
        "why": _WHY.get(why, why),
    }
    template = _TEMPLATES.get(type(event))
    return template and template.format(e=event, **words)
