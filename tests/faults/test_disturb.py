"""Disturbances on real processes: each has an effect, proves it and is taken back, or is missed."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from dps import Chain, Checkpoint, ParameterServer, Recovery
from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.processes import is_gone, state_of
from dps.events import (
    CheckpointFailed,
    CheckpointRefused,
    Detected,
    Disturbed,
    Event,
    FaultMissed,
    Promoted,
    Restored,
    Undisturbed,
    WorkerJoined,
)
from dps.faults import (
    AtUpdates,
    Corrupt,
    Cut,
    Delay,
    Direction,
    DiskFull,
    Fault,
    Slow,
)
from dps.faults.acts import Acts
from tests.support.training import (
    COUNTING,
    PRELOAD,
    SECONDS,
    Events,
    count_until,
    counts,
    nodes,
    params,
    results,
    versions,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

NOW = AtUpdates(1)  # a disturber is told when it is the moment
CHAIN = Recovery(Chain())


class Training:
    """A group whose workers count until they are told to stop, and what disturbs it."""

    def __init__(self, cluster: LocalCluster, ps: ParameterServer, events: Events) -> None:
        self.cluster = cluster
        self.ps = ps
        self.events = events
        self.disturber = Acts(cluster, ps, events)

    @property
    def version(self) -> int:
        return versions(self.ps)[0]

    def advances(self) -> None:
        """Wait until more updates are applied."""
        before = eventually(lambda: max(0, self.version), SECONDS)
        eventually(lambda: self.version > before, SECONDS)

    def stands_still(self) -> bool:
        """Whether no update is applied for a while, in which there were many before."""
        return len({self.version for _ in spaced(20, 0.01)}) == 1

    def begin(self, fault: Fault, node: str) -> Disturbed:
        """Begin a fault that must have its effect; return its evidence."""
        assert self.disturber.begin(7, fault, node, updates=3)
        disturbed = self.events.of(Disturbed)[-1]
        assert (disturbed.fault, disturbed.node, disturbed.updates) == (7, node, 3)
        assert disturbed.kind == fault.kind
        assert disturbed.effective
        return disturbed

    def end(self) -> str:
        """End it; it must have been seen to have an effect until then."""
        self.disturber.end(7)
        undisturbed = self.events.of(Undisturbed)[-1]
        assert undisturbed.fault == 7
        assert not self.events.of(FaultMissed)
        return undisturbed.evidence

    def misses(self, fault: Fault, node: str) -> str:
        """Carry a fault out that has no effect; return how that is told."""
        before = len(self.events.of(FaultMissed))
        if self.disturber.begin(7, fault, node, updates=3):
            self.disturber.end(7)
        (missed,) = {event.reason for event in self.events.of(FaultMissed)[before:]}
        return missed


@contextmanager
def training(
    cluster: LocalCluster, folder: Path, recovery: str | Recovery = CHAIN, workers: int = 2
) -> Iterator[Training]:
    """Train; after the block the workers end, and all that they pushed must be there."""
    events, flag, listening = Events(), folder / "stop", list[Acts]()

    def on_event(event: Event) -> None:
        events(event)
        for disturber in listening:
            disturber.note(event)

    with ParameterServer(
        cluster.client, params(), optimizer=COUNTING, recovery=recovery, on_event=on_event
    ) as ps:
        running = Training(cluster, ps, events)
        listening.append(running.disturber)
        futures = ps.run(partial(count_until, str(flag)), workers) if workers else []
        if futures:
            running.advances()
        yield running
        flag.touch()
        pushed = sum(results(futures))
        assert counts(ps) == [pushed]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Nodes that most tests here share: these harm none for good."""
    with LocalCluster(nodes(1, replicas=1, store=True), PRELOAD) as cluster:
        yield cluster


@pytest.fixture
def own_cluster() -> Iterator[LocalCluster]:
    """Nodes that a test may kill."""
    with LocalCluster(nodes(1, replicas=1, store=True, workers=1), PRELOAD) as cluster:
        yield cluster


def spaced(times: int, seconds: float) -> Iterator[int]:
    """Count, with so many seconds in between."""
    for number in range(times):
        yield number
        time.sleep(seconds)


@contextmanager
def rival(act: Callable[[], object]) -> Iterator[None]:
    """Do something again and again meanwhile, as an outsider might."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(0.001):
            act()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def head(t: Training) -> str:
    """The node that serves the shard."""
    address = t.ps.table().views[0].chain[0].address
    return next(node.name for node in t.ps.nodes if node.address == address)


def place(t: Training) -> str:
    """The node of the only worker."""
    return eventually(lambda: t.events.of(WorkerJoined), SECONDS)[0].node


def checkpoint(folder: Path, every: int = 20) -> Recovery:
    return Recovery(Checkpoint(every=every, path=str(folder)))


# -- slow ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slow_node_gets_its_part_of_the_time_and_is_not_given_up(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with training(cluster, tmp_path) as t:
        disturbed = t.begin(Slow("server-0", NOW, factor=5, seconds=1e3), "server-0")
        assert f"process {cluster.pids['server-0']} was stopped for" in disturbed.evidence
        process = psutil.Process(cluster.pids["server-0"])
        looks = [process.status() == psutil.STATUS_STOPPED for _ in spaced(100, 0.01)]
        assert 0.4 < sum(looks) / len(looks) < 1, "it is to be stopped for 80% of the time"
        t.advances()
        assert "turns" in t.end()
        assert state_of(process.pid) == "running"
        assert not t.events.of(Detected)


def test_a_process_that_is_let_go_on_at_once_is_not_slow(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with training(cluster, tmp_path) as t, rival(lambda: cluster.resume("replica-0-1")):
        reason = t.misses(Slow("replica-0-1", NOW, factor=20, seconds=1), "replica-0-1")
        assert reason.startswith("no effect was seen: process")
        assert reason.endswith("; expected at least 10.5 times, for factor 20")
        assert state_of(cluster.pids["replica-0-1"]) == "running"


def test_a_node_may_be_killed_while_it_is_slow(own_cluster: LocalCluster, tmp_path: Path) -> None:
    with training(own_cluster, tmp_path, workers=1) as t:
        t.begin(Slow("replica-0-1", NOW, factor=1.5, seconds=60), "replica-0-1")
        assert is_gone(own_cluster.kill("replica-0-1"), SECONDS)
        assert "it had ended" in t.end()
        assert t.misses(Slow("replica-0-1", NOW), "replica-0-1") == "no such process"


# -- cut and delay ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["in", "both"])
def test_the_links_of_a_worker_are_cut(
    direction: Direction, cluster: LocalCluster, tmp_path: Path
) -> None:
    with training(cluster, tmp_path, workers=1) as t:
        disturbed = t.begin(Cut(place(t), NOW, 1e3, direction), place(t))
        assert "more than 250 ms during" in disturbed.evidence
        eventually(t.stands_still, SECONDS)
        assert "messages were held back" in t.end()
        t.advances()


@pytest.mark.slow
def test_a_head_that_is_cut_off_is_replaced_and_comes_back(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with training(cluster, tmp_path) as t:
        t.begin(Cut("server-0", NOW, 1e3, "out"), "server-0")
        (detected,) = eventually(lambda: t.events.of(Detected), SECONDS)
        assert (detected.node, detected.by) == ("server-0", "lease")
        eventually(lambda: t.events.of(Promoted), SECONDS)
        t.advances()
        t.end()
        eventually(lambda: t.ps.table().complete, SECONDS)


def test_every_message_of_a_node_is_delayed(cluster: LocalCluster, tmp_path: Path) -> None:
    with training(cluster, tmp_path) as t:
        t.begin(Delay("server-0", NOW, delay_seconds=0.05, seconds=1e3), "server-0")
        before = t.version
        assert eventually(lambda: t.version - before >= 4, SECONDS)
        assert t.version - before < 50
        assert "messages were delayed" in t.end()
        t.advances()
        assert not t.events.of(Detected)


def test_what_a_short_cut_holds_back_is_not_taken_for_a_probe(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """A probe has too little time to come back by itself, and other messages are held back."""
    with training(cluster, tmp_path) as t:
        for _ in range(100):
            assert not t.disturber.begin(7, Cut("server-0", NOW, 1e-4), "server-0", updates=3)


# -- files -----------------------------------------------------------------------------------------


def test_a_server_whose_disk_is_full_writes_no_checkpoint(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with training(cluster, tmp_path, checkpoint(tmp_path)) as t:
        node = head(t)
        disturbed = t.begin(DiskFull(node, NOW), node)
        assert disturbed.evidence.endswith("is 0 bytes")
        failed = eventually(lambda: t.events.of(CheckpointFailed), SECONDS)[0]
        assert "File too large" in failed.reason
        assert "checkpoints failed" in t.end()
        t.advances()


def test_what_has_no_effect_is_missed(cluster: LocalCluster, tmp_path: Path) -> None:
    with training(cluster, tmp_path, "stateless", workers=0) as t:
        full = DiskFull("server-0", NOW)
        assert t.misses(full, "server-0") == "no write was tried; the limit is lifted"
        assert t.misses(Corrupt(0, NOW), "shard-0") == "there are no checkpoints"
        for fault in (Cut("server-0", NOW, 1e-6), Delay("server-0", NOW, 1e-6, 1.0)):
            assert t.misses(fault, "server-0").startswith("no effect was seen: a probe")
        for fault in (Cut("server-9", NOW), Delay("server-9", NOW)):
            assert t.misses(fault, "server-9") == "no such process"


@pytest.mark.slow
def test_a_damaged_checkpoint_is_not_restored(own_cluster: LocalCluster, tmp_path: Path) -> None:
    events = Events()
    recovery = checkpoint(tmp_path, every=10**9)  # it must stay the newest
    with ParameterServer(
        own_cluster.client, params(), optimizer=COUNTING, recovery=recovery, on_event=events
    ) as ps:
        (path,) = tmp_path.rglob("*.safetensors")
        before = hashlib.sha256(path.read_bytes()).hexdigest()
        disturber = Acts(own_cluster, ps, events)
        assert disturber.begin(0, Corrupt(0, NOW), "shard-0", 3)
        (disturbed,) = events.of(Disturbed)
        after = hashlib.sha256(path.read_bytes()).hexdigest()
        assert before != after
        assert before[:16] in disturbed.evidence
        assert after[:16] in disturbed.evidence
        own_cluster.kill("server-0")
        refused = eventually(lambda: events.of(CheckpointRefused), SECONDS)
        assert refused[0].shard == 0
    assert all(event.epoch == 1 for event in events.of(Restored)), "as it was brought up"
    assert not events.of(FaultMissed)
