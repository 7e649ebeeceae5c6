"""How many updates shards lack after a return, as far as that shows."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from multiprocessing import Pipe

import numpy as np
import pytest
from distributed import Client, LocalCluster

from dps import Timings
from dps.cluster.supervision.messages import Known, Past
from dps.cluster.supervision.session import Session, _lost
from dps.core.shard import Progress, ShardState
from dps.errors import DeadlineExceeded


def state(**workers: tuple[int, int, int]) -> ShardState:
    """A shard that has updates: of each worker the incarnation, the last number, and how many."""
    known = {name: Progress(*numbers[:2], 0, numbers[2], True) for name, numbers in workers.items()}
    version = sum(progress.applied for progress in known.values())
    return ShardState(version, version, version, np.zeros(0, np.uint8), {}, known)


@pytest.mark.parametrize(
    ("states", "seen", "lost"),
    [
        ([state(a=(1, 7, 7)), state(a=(1, 7, 7))], (), (0, 0)),
        ([state(a=(1, 7, 7)), state(a=(1, 4, 4))], (), (0, 3)),
        ([state(a=(1, 7, 7)), state(a=(1, 4, 4))], (9, 9), (2, 5)),
        # More was written than was seen last.
        ([state(a=(1, 7, 7)), state(a=(1, 7, 7))], (5, 6), (0, 0)),
        # Each lacks what the other one has.
        ([state(a=(1, 7, 7), b=(1, 2, 2)), state(a=(1, 5, 5), b=(1, 8, 8))], (), (6, 2)),
        # What was missing before the worker began again is no loss of this return.
        ([state(a=(2, 5, 25)), state(a=(2, 5, 18))], (), (0, 0)),
        ([state(a=(2, 5, 25)), state(a=(2, 4, 17))], (), (0, 1)),
        ([state(a=(2, 5, 25)), state(a=(1, 20, 20))], (), (0, 5)),
        ([state(a=(1, 3, 3)), state()], (), (0, 3)),
        # Numbers that were refused as too stale are no updates.
        ([state(a=(1, 9, 7)), state(a=(1, 4, 4))], (), (0, 3)),
        ([], (), ()),
    ],
)
def test_what_is_lost_at_least(
    states: list[ShardState], seen: tuple[int, ...], lost: tuple[int, ...]
) -> None:
    assert _lost(states, seen) == lost


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_a_return_does_not_wait_for_ever_for_a_dask_worker_that_hangs() -> None:
    timings = replace(Timings(), unavailable=2.0)
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        noticed = time.monotonic()
        session = Session(Pipe()[0], Past(returns=1, noticed=noticed))
        session._settle(client, Known("/checkpoints/dps-group"), Timings())
        assert time.monotonic() >= noticed + Timings().lease, "one may have been given until then"
        (address, pid), _ = client.run(os.getpid).items()
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded, match=rf"{address} do not answer for 2 s"):
                session._settle(client, Known("/checkpoints/dps-group"), timings)
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(120)
def test_a_return_waits_for_hosts_of_its_own_group_and_of_no_other() -> None:
    timings = replace(Timings(), unavailable=10.0)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        session = Session(Pipe()[0], Past(returns=1, noticed=time.monotonic()))
        other = client.submit(int, key="host-dps-group2-0")
        assert other.result() == 0
        session._settle(client, Known("/checkpoints/dps-group"), timings)
        own = client.submit(int, key="host-dps-group-0")
        assert own.result() == 0
        with pytest.raises(
            DeadlineExceeded, match="dps-group are still on Dask workers after 10 s"
        ):
            session._settle(client, Known("/checkpoints/dps-group"), timings)
