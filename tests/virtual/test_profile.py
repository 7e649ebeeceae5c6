"""What costs time on virtual nodes: each cost by itself, and the shipped profiles as a whole."""

from __future__ import annotations

import gc
import tracemalloc
from contextvars import copy_context
from itertools import islice
from random import Random
from statistics import mean, median

import numpy as np
import pytest

from dps import SGD, Checkpoint, ParameterServer, Recovery, Worker
from dps.cluster.names import NodeSpec
from dps.errors import ConfigurationError
from dps.events import CheckpointWritten, Event, ResourceSampled
from dps.virtual.client import VirtualClient
from dps.virtual.loop import VirtualLoop
from dps.virtual.network import SMALL_BYTES, Ports
from dps.virtual.profile import PLENTY, Disk, Gradient, Link, Profile, Service
from flows.config.profile import load_profile

MEGABYTE = 1 << 20


def nodes(workers: int = 1) -> list[NodeSpec]:
    return [
        NodeSpec("server-0", "server"),
        *(NodeSpec(f"worker-{i}", "worker") for i in range(workers)),
    ]


def round_trips(profile: Profile, nbytes: int, workers: int = 1, trips: int = 3) -> list[float]:
    """How long the last of some round trips took each worker."""

    def train(worker: Worker) -> float:
        gradients = {"w": np.ones(nbytes // 4, np.float32)}
        for _ in range(trips):
            began = worker.now()
            worker.push_pull(gradients)
        return worker.now() - began

    start = {"w": np.zeros(nbytes // 4, np.float32)}
    with (
        VirtualClient(nodes(workers), 0, profile) as client,
        ParameterServer(client, start, optimizer=SGD(1e-3)) as ps,
    ):
        return client.gather(ps.run(train, workers=workers))


def arrivals(*sent: tuple[str, str, int, float]) -> list[float]:
    """When each of some transfers is over: from, to, bytes, and when it begins, at 1 MB/s."""
    loop = VirtualLoop(Random(0), 0.0)
    ports, came = Ports(loop, 1e6, copy_context()), [0.0] * len(sent)
    for number, (source, target, nbytes, when) in enumerate(sent):

        def done(number: int = number) -> None:
            came[number] = loop.time()

        loop.call_at(when, ports.send, source, target, nbytes, 0.0, done)
    loop.call_at(100.0, loop.stop)
    loop.run_forever()
    loop.close()
    return came


def test_transfers_share_the_port_that_they_leave_by_and_the_one_that_they_reach() -> None:
    assert arrivals(("a", "b", 10**6, 0.0)) == pytest.approx([1.0])
    assert arrivals(("a", "b", 10**6, 0.0), ("a", "c", 10**6, 0.0)) == pytest.approx([2.0, 2.0])
    assert arrivals(("a", "c", 10**6, 0.0), ("b", "c", 10**6, 0.0)) == pytest.approx([2.0, 2.0])
    assert arrivals(("a", "b", 10**6, 0.0), ("c", "d", 10**6, 0.0)) == pytest.approx([1.0, 1.0])
    assert arrivals(("a", "b", 10**6, 0.0), ("b", "a", 10**6, 0.0)) == pytest.approx([1.0, 1.0])


def test_a_transfer_has_the_port_for_itself_again_when_another_one_is_over() -> None:
    # Half a second alone, then a second for half a megabyte shared; the other goes on alone.
    assert arrivals(("a", "b", 10**6, 0.0), ("a", "b", 10**6, 0.5)) == pytest.approx([1.5, 2.0])


def test_bytes_that_have_arrived_are_let_go_of_without_a_collection() -> None:
    # On virtual time the collector looks seldom, and each message of a model has megabytes.
    profile = Profile("links", Link(1e-5, bandwidth=1e9))
    peaks = []
    for trips in (2, 12):
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            round_trips(profile, MEGABYTE, trips=trips)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
            gc.enable()
    assert peaks[1] < peaks[0] + 4 * MEGABYTE


def test_short_messages_do_not_wait_for_long_ones() -> None:
    short = SMALL_BYTES // 2
    assert arrivals(("a", "b", 10**6, 0.0), ("a", "b", short, 0.5)) == pytest.approx(
        [1.0, 0.5 + short / 1e6]
    )


def test_a_server_takes_in_one_message_after_the_other() -> None:
    busy = Profile("busy", Link(1e-5), Service(message=0.01))
    (alone,) = round_trips(busy, 4)
    assert alone == pytest.approx(0.02, rel=0.1)  # the server's, then the worker's own
    crowd = round_trips(busy, 4, workers=8)
    assert mean(crowd) >= 2 * alone


def test_bytes_and_updates_take_a_server_time() -> None:
    size = 8 * MEGABYTE
    none, byte, update = (
        round_trips(Profile("p", Link(1e-5), service, work=0.0), size)[0]
        for service in (Service(1e-6), Service(1e-6, byte=1e-8), Service(1e-6, update=1e-8))
    )
    assert byte - none == pytest.approx(2 * size * 1e-8, rel=0.05)  # there and back
    assert update - none == pytest.approx(size * 1e-8, rel=0.05)  # the gradient alone


def test_work_on_messages_is_what_a_process_is_said_to_have_used() -> None:
    events: list[Event] = []
    busy = Profile("busy", Link(1e-5), Service(message=0.01))
    with (
        VirtualClient(nodes(), 0, busy) as client,
        ParameterServer(client, {"w": np.zeros(4)}, on_event=events.append) as ps,
    ):
        client.gather(ps.run(lambda worker: [worker.push({"w": np.ones(4)}) for _ in range(50)]))
    samples = [e for e in events if isinstance(e, ResourceSampled) and e.node == "server-0"]
    assert max(e.cpu_seconds for e in samples) >= 0.5


def test_files_take_as_long_as_their_bytes() -> None:
    def written(disk: Disk) -> float:
        events: list[Event] = []
        with (
            VirtualClient(nodes(), 0, Profile("p", Link(1e-5), disk=disk, work=0.0)) as client,
            ParameterServer(
                client,
                {"w": np.zeros(MEGABYTE // 8)},
                recovery=Recovery(Checkpoint(every=1, mode="sync")),
                on_event=events.append,
            ) as ps,
        ):
            client.gather(ps.run(lambda worker: worker.push({"w": np.ones(MEGABYTE // 8)})))
        return next(e.seconds for e in events if isinstance(e, CheckpointWritten))

    assert written(Disk()) < 0.01
    assert written(Disk(0.5)) == pytest.approx(0.5, abs=0.01)
    assert written(Disk(0.0, MEGABYTE)) == pytest.approx(1.0, abs=0.05)


def test_gradients_are_drawn_as_the_profile_says() -> None:
    def drawn(gradient: Gradient) -> list[float]:
        return list(islice(gradient.draw(Random(0)), 4000))

    assert set(drawn(Gradient(0.5))) == {0.5}
    spread = drawn(Gradient(0.5, spread=0.3))
    assert median(spread) == pytest.approx(0.5, rel=0.05)
    assert len(set(spread)) == 4000
    slow = drawn(Gradient(0.5, straggling=0.25, factor=4))
    assert set(slow) == {0.5, 2.0}
    assert slow.count(2.0) / 4000 == pytest.approx(0.25, abs=0.03)
    assert drawn(Gradient(1.0, 0.2)) == drawn(Gradient(1.0, 0.2))


@pytest.mark.parametrize(
    ("nbytes", "measured", "within"), [(1024, 0.7e-3, 0.1), (64 * MEGABYTE, 66e-3, 0.2)]
)
def test_the_profile_of_a_laptop_comes_to_what_was_measured_there(
    nbytes: int, measured: float, within: float
) -> None:
    (found,) = round_trips(load_profile("laptop").build(), nbytes)
    assert found == pytest.approx(measured, rel=within)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(0.0),
        lambda: Gradient(straggling=2.0),
        lambda: Profile("p", PLENTY.link, start=-1.0),
        lambda: Gradient(float("nan")),
    ],
)
def test_a_cost_that_is_none_is_refused(make: object) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        make()  # type: ignore[operator]
