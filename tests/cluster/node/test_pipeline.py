"""Computing while sending: what a worker computes on, how stale its updates are, and the end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import dps
from dps import (
    ASP,
    BSP,
    SSP,
    Continue,
    DelayCompensated,
    ParameterServer,
    Part,
    Pipeline,
    Recovery,
    SharedStore,
    Worker,
)
from dps.cluster.backends.local import LocalCluster
from dps.cluster.names import NodeSpec
from dps.errors import ConfigurationError, GroupClosed, NonFiniteGradient
from dps.events import Applied
from tests.support.training import (
    COUNTING,
    PRELOAD,
    SECONDS,
    Events,
    audited,
    counts,
    nodes,
    ones,
    params,
    patient_server,
    results,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

STEPS = 12


def hold(arrays: Mapping[str, Part], flag: str) -> bool:
    """Keep a shard busy until there is a file `flag`: what is sent after it waits."""
    until = time.monotonic() + SECONDS
    while not os.path.exists(flag) and time.monotonic() < until:
        time.sleep(0.005)
    return os.path.exists(flag)


HOLD = {"hold": hold}


def staleness(events: Events, updates: int) -> list[int]:
    """That of each update of the only worker on each shard, in their order."""
    eventually(lambda: sum(len(e.seqs) for e in events.of(Applied)) >= updates, SECONDS)
    rows = [
        row for event in events.of(Applied) for row in zip(event.seqs, event.staleness, strict=True)
    ]
    return [stale for _, stale in sorted(rows)]


def compute_on_what_was_given(worker: Worker) -> None:
    """Compute the second gradient on the first weights, though newer ones have come."""
    gradients = ones(worker.pull())
    first = worker.push_pull_async(gradients)
    eventually(first.done, SECONDS)
    worker.push(gradients)
    first.wait()
    worker.push(gradients)


def compute_on_a_point(worker: Worker) -> None:
    gradients = ones(worker.pull())
    point = worker.read_point
    for _ in range(2):
        worker.push_pull(gradients)
    worker.push(gradients, computed_on=point)


@pytest.mark.parametrize(
    ("train", "stale"), [(compute_on_what_was_given, [0, 1, 1]), (compute_on_a_point, [0, 0, 2])]
)
def test_staleness_counts_from_the_weights_that_were_computed_on(
    plain: Client, train: Any, stale: list[int]
) -> None:
    events = Events()
    with patient_server(plain, params(), optimizer=COUNTING, on_event=events) as ps:
        results(ps.run(train))
        assert staleness(events, 3) == stale


def compensate(worker: Worker) -> list[float]:
    gradients = {"w": np.full(2, -1.0)}
    worker.pull()
    point = worker.read_point
    worker.push_pull(gradients)
    return list(worker.push_pull(gradients, computed_on=point)["w"])


def test_a_rule_gets_the_weights_that_were_computed_on(plain: Client) -> None:
    """The second gradient is compensated for the 1 that the weights have moved since."""
    rule = DelayCompensated(dps.SGD(1.0), 0.5)
    with patient_server(plain, {"w": np.zeros(2)}, optimizer=rule) as ps:
        (found,) = results(ps.run(compensate))
    assert found == [1 + 1 - 0.5] * 2  # g + λ g² (w - base), of which the step is the opposite


def run_ahead(ahead: int, flag: str, worker: Worker) -> tuple[list[float], list[float]]:
    """Compute while the shard is busy; return the weights that were computed on, and the last."""
    computed_on = []
    with Pipeline(worker, ahead) as pipeline:
        gradients = ones(pipeline.weights)
        worker.apply_async("hold", flag)
        for _ in range(ahead):
            computed_on.append(float(pipeline.weights["w"][0]))
            pipeline.push_pull(gradients)
        computed_on.append(float(pipeline.weights["w"][0]))
        Path(flag).touch()
        for _ in range(STEPS - ahead):
            pipeline.push_pull(gradients)
    return computed_on, [float(pipeline.weights["w"].min()), float(pipeline.weights["w"].max())]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_worker_computes_on_while_so_many_updates_are_under_way(
    plain: Client, ahead: int, tmp_path: Path
) -> None:
    events = Events()
    with patient_server(plain, params(), optimizer=COUNTING, functions=HOLD, on_event=events) as ps:
        train = partial(run_ahead, ahead, str(tmp_path / "go on"))
        ((computed_on, last),) = results(ps.run(train))
        assert computed_on == [0.0] * (ahead + 1)
        assert last == [STEPS, STEPS]
        assert counts(ps) == [STEPS]
        (reply,) = audited(ps)
        assert (reply.applied["worker-0"], reply.duplicates) == (STEPS, 0)
        found = staleness(events, STEPS)
        assert found[: ahead + 1] == list(range(ahead + 1))
        assert max(found) == ahead


def push_without_a_shard(pulled: str, down: str, worker: Worker) -> list[int | None]:
    """Push while the shard is down; return how many more may be computed, before and after each.

    `pulled` is there when it may go down, and gone when everything was pushed.
    """
    gradients = ones(worker.pull())
    found = [worker.slack]
    Path(pulled).touch()
    eventually(lambda: os.path.exists(down), SECONDS)
    for _ in range(TAU):
        worker.push_pull(gradients)
        found.append(worker.slack)
    Path(pulled).unlink()
    return found


def test_updates_that_are_buffered_take_from_what_may_be_computed(tmp_path: Path) -> None:
    """The weights stay as they are meanwhile, and say how many may be computed from them."""
    pulled, down = tmp_path / "pulled", tmp_path / "down"
    recovery = Recovery(SharedStore(), Continue())
    choices: dict[str, Any] = {"optimizer": COUNTING, "recovery": recovery}
    with (
        LocalCluster(nodes(servers=1, store=True, workers=1), PRELOAD) as cluster,
        ParameterServer(cluster.client, params(), consistency=SSP(TAU), **choices) as ps,
    ):
        futures = ps.run(partial(push_without_a_shard, str(pulled), str(down)))
        eventually(pulled.exists, SECONDS)
        cluster.kill("server-0")
        eventually(lambda: not ps.table().views[0].serving, SECONDS)
        down.touch()
        eventually(lambda: not pulled.exists(), SECONDS)
        cluster.start(NodeSpec("server-0-b", "server"))  # for the worker ends when it is served
        assert results(futures) == [[TAU - pushed for pushed in range(TAU + 1)]]
        eventually(lambda: counts(ps) == [TAU], SECONDS)


TAU = 2


def note_what_is_lacking(worker: Worker) -> list[tuple[int, int]]:
    """Return how many updates, of this worker and of the other, each gradient's weights lack.

    More of the other's than it has pushed: as if it had pushed as many as this one. Each counts
    its own in an array of its own; worker 1 begins when worker 0 has pushed as many as it may.
    """
    names = ["w", "v"] if worker.index == 0 else ["v", "w"]
    lacking = []
    weights = worker.pull()
    gradient = {names[0]: np.full_like(weights[names[0]], -1.0)}
    if worker.index == 1:
        eventually(lambda: worker.pull()["w"][0] > TAU, SECONDS)
    with Pipeline(worker, TAU) as pipeline:
        for step in range(STEPS):
            mine, theirs = (int(pipeline.weights[name].flat[0]) for name in names)
            lacking.append((step - mine, step - theirs))
            pipeline.push_pull(gradient)
    return lacking


def test_ssp_bounds_what_a_worker_ahead_computes_on(plain: Client) -> None:
    choices: dict[str, Any] = {"optimizer": COUNTING, "consistency": SSP(TAU)}
    with patient_server(plain, params(), **choices) as ps:
        for lacking in results(ps.run(note_what_is_lacking, workers=2)):
            assert len(lacking) == STEPS
            assert max(mine for mine, _ in lacking) <= TAU
            assert max(theirs for _, theirs in lacking) <= TAU
        assert ps.pull()["w"][0] == ps.pull()["v"][0, 0] == STEPS


@pytest.mark.parametrize(
    ("consistency", "ahead", "text"),
    [
        (BSP(), 1, r"ahead=1, but under BSP\(\) a worker may compute 0 more gradients than one"),
        (SSP(1), 2, r"expected ahead=1 at most, or SSP\(tau=2\)"),
        (ASP(), -1, "^ahead=-1, expected 0 or more whole updates$"),
    ],
)
def test_what_the_consistency_model_forbids_is_refused(
    plain: Client, consistency: Any, ahead: Any, text: str
) -> None:
    def train(worker: Worker) -> None:
        Pipeline(worker, ahead)

    with (
        patient_server(plain, params(), consistency=consistency) as ps,
        pytest.raises(ConfigurationError, match=text),
    ):
        results(ps.run(train))


def push_a_bad_one(worker: Worker) -> float:
    good = ones(worker.pull())
    bad = {**good, "w": np.full(30, np.nan)}
    pipeline = Pipeline(worker, 2)

    def push_all() -> None:
        with pipeline:
            for gradients in (good, bad, good):
                pipeline.push_pull(gradients)

    with pytest.raises(NonFiniteGradient):
        push_all()
    pipeline.drain()  # what has failed is told once
    return float(worker.pull()["w"][0])


def test_the_first_error_is_raised_and_what_is_good_is_applied(plain: Client) -> None:
    with patient_server(plain, params(), shards=2, optimizer=COUNTING) as ps:
        (left,) = results(ps.run(push_a_bad_one))
        assert left in (1.0, 2.0)  # the third may have been sent before the second was refused
        assert counts(ps) == [left] * 2


def push_when_closed(worker: Worker) -> float:
    """Push once, and after each way to close a pipeline; return what all came to."""
    gradients = ones(worker.pull())
    with Pipeline(worker, 1) as left:
        left.push_pull(gradients)
    with pytest.raises(ZeroDivisionError), Pipeline(worker, 1) as failed:
        raise ZeroDivisionError
    closed = Pipeline(worker, 1)
    closed.close()
    for pipeline in (left, failed, closed):
        with pytest.raises(GroupClosed, match="create another Pipeline"):
            pipeline.push_pull(gradients)
        pipeline.drain()
        pipeline.close()
    return float(worker.pull()["w"][0])


def test_a_closed_pipeline_sends_nothing(plain: Client) -> None:
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        assert results(ps.run(push_when_closed)) == [1.0]
        assert counts(ps) == [1]
