"""What is said of losses and of what follows."""

from __future__ import annotations

import pytest

from dps.events import Detected, Event, Failover, LossReported, WorkerLeft
from dps.observe.sentences import sentence

RESTORED = ("checkpoint", 90, "its server was lost", 7, False)
REPLICA = ("replica", 0, "", 0, True)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            Failover(0.0, 2, 4, "server-2", "client", 0.25, "spare-0", True, 1, 1, *RESTORED),
            "shard 2: node server-2 was lost (noticed by the client), node spare-0 took over after "
            "0.25 s; restored from its checkpoint at version 90, because its server was lost; at "
            "least 7 acknowledged updates were lost",
        ),
        (
            Failover(0.0, 2, 4, "a, b", "lease", 1.5, "c", False, 1, 3, *REPLICA),
            "shard 2: nodes a, b were lost (its lease ended), node c serves on after 1.50 s, "
            "with 1 of 3 copies; no update was lost",
        ),
        (
            Failover(0.0, 2, 4, "a", "monitor", 1.5, "a", False, 1, 1, *REPLICA),
            "shard 2: node a was silent (noticed by the monitor), node a serves on after 1.50 s; "
            "no update was lost",
        ),
        (
            Detected(0.0, 2, 4, "server-2", False, by="lease"),
            "server-2 found lost by the lease; shard 2 is down",
        ),
        (
            LossReported(0.0, 2, 4, 7, False, "checkpoint", 90),
            "shard 2 has lost at least 7 acknowledged updates",
        ),
        (WorkerLeft(0.0, "worker-1", 0, "lost"), "worker-1 lost"),
        (WorkerLeft(0.0, "worker-1", 0, "finished"), None),
    ],
    ids=["restored", "chain", "silent", "lost", "updates", "worker", "finished"],
)
def test_sentences(event: Event, said: str | None) -> None:
    assert sentence(event) == said
