"""What is said of losses and of what follows."""

from __future__ import annotations

import pytest

from dps.events import (
    CheckpointRefused,
    Detected,
    Event,
    Failover,
    Killed,
    LossReported,
    NodeLeaving,
    Paused,
    Restored,
    Resumed,
    WorkerLeft,
)
from dps.observe.views import sentence

RESTORED = ("checkpoint", 90, "its server was lost", 7, False)
REPLICA = ("replica", 0, "", 0, True)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            Failover(0.0, 2, 4, "server-2", "client", 0.25, "spare-0", True, 1, 1, *RESTORED),
            "shard 2: node server-2 was lost (detected by the client), node spare-0 took over "
            "after 0.25 s; restored from its checkpoint at version 90, because its server was "
            "lost; at least 7 acknowledged updates were lost",
        ),
        (
            Failover(0.0, 2, 4, "a, b", "lease", 1.5, "c", False, 1, 3, *REPLICA),
            "shard 2: nodes a, b were lost (its lease ended), node c serves on after 1.50 s, "
            "with 1 of 3 copies; no update was lost",
        ),
        (
            Detected(0.0, 2, 4, "server-2", False, by="lease"),
            "server-2 detected as lost by the lease; shard 2 is down",
        ),
        (
            LossReported(0.0, 2, 4, 7, False, "checkpoint", 90),
            "shard 2 has lost at least 7 acknowledged updates",
        ),
        (Killed(0.0, 0, "a", 1, 9, gone=True), "a killed after 9 updates, by signal"),
        (
            Killed(0.0, 0, "a", 1, 9, gone=False),
            "a killed after 9 updates, by signal, but its process still exists",
        ),
        (
            Killed(0.0, 0, "a", 1, 9, True, "requeue", "job 7 is pending"),
            "a killed after 9 updates, by requeue (job 7 is pending)",
        ),
        (Paused(0.0, 0, "a", 1, 9, stopped=True), "a paused after 9 updates"),
        (
            Paused(0.0, 0, "a", 1, 9, stopped=False),
            "a paused after 9 updates, but its process is not stopped",
        ),
        (Resumed(0.0, 0, "a", 1, running=True), "a continues"),
        (Resumed(0.0, 0, "a", 1, running=False), "a does not continue"),
        (NodeLeaving(0.0, "a", "server", "lifetime"), "a is leaving: its lifetime ends soon"),
        (NodeLeaving(0.0, "a", "server", "signal"), "a is leaving: it received SIGTERM"),
        (WorkerLeft(0.0, "worker-1", 0, "lost"), "worker-1 lost"),
        (
            Restored(1.0, 0, 2, "server-0", 5, "checkpoint"),
            "shard 0 restored at server-0 from its checkpoint at version 5",
        ),
        (WorkerLeft(0.0, "worker-1", 0, "finished"), None),
        (
            Restored(1.0, 0, 2, "server-0", 5, "shelf"),  # of a durability of another maker
            "shard 0 restored at server-0 from shelf at version 5",
        ),
        (Restored(1.0, 0, 1, "server-0", 0, "initial"), None),
        (
            CheckpointRefused(1.0, 0, "e1.json", "e1.json: the data do not match"),
            "shard 0: skipped a damaged checkpoint: e1.json: the data do not match",
        ),
    ],
)
def test_sentences(event: Event, said: str | None) -> None:
    assert sentence(event) == said
