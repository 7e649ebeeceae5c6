"""What is said of losses and of what follows."""

from __future__ import annotations

import pytest

from dps.events import Decided, Detected, Event, LossReported, WorkerLeft
from dps.observe.sentences import sentence


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (Decided(0.0, 2, 1, "server-2", "restore"), "shard 2 is starting at server-2"),
        (Decided(0.0, 2, 4, "spare-0", "restore"), "shard 2 is to be restored at spare-0"),
        (Decided(0.0, 2, 4, "replica-2-1", "reconfigure"), "shard 2 is to go on at replica-2-1"),
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
    ids=["start", "restore", "chain", "lost", "updates", "worker", "finished"],
)
def test_sentences(event: Event, said: str | None) -> None:
    assert sentence(event) == said
