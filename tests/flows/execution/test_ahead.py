"""Trials whose workers compute while they send: every gradient once, as stale as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps.events import Applied, WorkerJoined
from flows.records.events import Audited
from tests.support.virtual_trials import virtual_trial

UPDATES = 80
AHEAD = 2


@pytest.mark.parametrize("ahead", [0, AHEAD])
def test_one_worker_is_as_stale_as_it_is_ahead(tmp_path: Path, ahead: int) -> None:
    training = {"workers": 1, "updates": UPDATES, "compute_seconds": 0.01, "ahead": ahead}
    done = virtual_trial(tmp_path / "trial", training=training, recovery="chain")
    assert done.outcome.status == "valid", done.outcome.reason
    assert [audited.version for audited in done.record.of(Audited)] == [UPDATES, UPDATES]
    stale = [each for event in done.record.of(Applied) if event.head for each in event.staleness]
    assert len(stale) == 2 * UPDATES
    assert max(stale) <= ahead
    assert (max(stale) > 0) == (ahead > 0)


def test_what_was_under_way_when_a_worker_died_is_computed_again_or_was_applied(
    tmp_path: Path,
) -> None:
    done = virtual_trial(
        tmp_path / "trial",
        training={"workers": 2, "updates": UPDATES, "compute_seconds": 0.01, "ahead": AHEAD},
        faults=[{"kind": "kill", "target": "worker-1", "at_updates": 20, "back_after": 0.0}],
        consistency={"kind": "ssp", "tau": AHEAD},
        recovery="chain",
    )
    assert done.outcome.status == "valid", done.outcome.reason
    assert [joined.incarnation for joined in done.record.of(WorkerJoined)].count(2) == 1
    for audited in done.record.of(Audited):
        assert UPDATES <= audited.version <= UPDATES + AHEAD + 1
        assert audited.version == sum(audited.applied.values())
