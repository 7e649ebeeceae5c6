"""The facade: what a Dask user does with a ParameterServer on a cluster of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from dps import (
    BSP,
    SGD,
    SSP,
    Adam,
    Chain,
    Checkpoint,
    Momentum,
    Recovery,
    Worker,
)
from dps.errors import (
    CapacityError,
    ConfigurationError,
    NonFiniteGradient,
    ShapeMismatch,
)
from dps.events import Applied, Evaluated, EvaluationMissed, ResourceSampled
from tests.support.training import (
    COUNTING,
    SECONDS,
    Events,
    audited,
    count,
    counts,
    ones,
    params,
    patient_server,
    results,
    versions,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

STEPS = 20


# -- training ------------------------------------------------------------------------------------


def test_every_update_of_every_worker_is_applied_once(client: Client) -> None:
    with patient_server(client, params(), shards=2, optimizer=COUNTING) as ps:
        assert results(ps.run(partial(count, STEPS), workers=2)) == [STEPS, STEPS]
        assert counts(ps) == [2 * STEPS] * 2
        for reply in audited(ps):
            assert reply.applied == {"worker-0": STEPS, "worker-1": STEPS}
            assert reply.duplicates == 0


@pytest.mark.parametrize("recovery", ["chain", "stateless"])
def test_replicated_and_stored_state_counts_the_same(plain: Client, recovery: str) -> None:
    with patient_server(plain, params(), optimizer=COUNTING, recovery=recovery) as ps:
        results(ps.run(partial(count, STEPS)))
        assert counts(ps) == [STEPS]


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["tail", "any"])
def test_updates_can_be_summed_before_they_are_replicated(plain: Client, reads: Any) -> None:
    """The traffic down the chain falls with the number of updates in a sum."""
    elements, steps, replicated = 20_000, 10, {}
    for aggregate in (1, 2):
        events = Events()
        recovery = Recovery(Chain(2, reads=reads, aggregate=aggregate, linger=5.0))
        choices: dict[str, Any] = {"recovery": recovery, "consistency": SSP(steps)}  # begin as one
        initial = {"w": np.zeros(elements)}
        with patient_server(plain, initial, optimizer=COUNTING, on_event=events, **choices) as ps:
            results(ps.run(partial(count, steps), workers=2))
            assert counts(ps) == [2 * steps]
        sent = {event.pid: event.sent for event in events.of(ResourceSampled)}
        replicated[aggregate] = sum(links.get("replicate", 0) for links in sent.values())
    one_gradient = 8 * elements
    assert 2 * steps * one_gradient < replicated[1] < (2 * steps + 2) * one_gradient
    assert steps * one_gradient < replicated[2] < (steps + 2) * one_gradient


def test_weights_keep_shape_and_dtype(plain: Client) -> None:
    given = {"w": np.arange(6.0).reshape(2, 3), "v": np.float32([[1.5], [2.5]])}
    with patient_server(plain, given, shards=2) as ps:
        got = ps.pull()
    for name, array in given.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array)


def test_what_was_pulled_or_given_is_not_the_servers_own(plain: Client) -> None:
    given = params()
    with patient_server(plain, given) as ps:
        given["w"][:] = 5.0
        ps.pull()["w"][:] = 7.0
        assert counts(ps) == [0]


def test_workers_of_a_second_run_go_on_from_the_first(plain: Client) -> None:
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        results(ps.run(partial(count, 3)))
        results(ps.run(partial(count, 4)))
        assert counts(ps) == [7]


def test_momentum_accumulates(plain: Client) -> None:
    with patient_server(plain, params(), shards=2, optimizer=Momentum(1.0, 0.5)) as ps:
        results(ps.run(partial(count, 3)))
        np.testing.assert_array_equal(ps.pull()["w"], 1 + 1.5 + 1.75)


def test_adam_takes_steps_of_the_learning_rate(plain: Client) -> None:
    with patient_server(plain, params(), shards=2, optimizer=Adam(0.1)) as ps:
        results(ps.run(partial(count, 10)))
        np.testing.assert_allclose(ps.pull()["w"], 10 * 0.1, rtol=1e-6)


def approach(target: float, worker: Worker) -> None:
    """Descend to a target; what is pushed depends on what was read, to the last bit."""
    weights = worker.pull()
    for step in range(STEPS):
        pull = target / 3 + worker.index + step / 7
        weights = worker.push_pull({name: (w - pull) * 0.9 for name, w in weights.items()})


@pytest.mark.slow
def test_two_runs_under_bsp_are_bitwise_equal(plain: Client) -> None:
    def train() -> dict[str, np.ndarray]:
        choices: dict[str, Any] = {"optimizer": Momentum(0.1), "consistency": BSP()}
        with patient_server(plain, params(), shards=2, **choices) as ps:
            results(ps.run(partial(approach, 1.0), workers=2))
            return ps.pull()

    first, second = train(), train()
    for name, array in first.items():
        assert array.tobytes() == second[name].tobytes()


def paced(flag: str, worker: Worker) -> int:
    """Push and pull; the last worker waits for the file `flag` before its second push."""
    gradients = ones(worker.pull())
    for step in range(STEPS):
        if step == 1 and worker.index == worker.workers - 1:
            eventually(Path(flag).exists, SECONDS)
        worker.push_pull(gradients)
    return STEPS


@pytest.mark.parametrize("tau", [0, 3])
def test_under_ssp_nobody_gets_more_than_the_bound_ahead(
    plain: Client, tmp_path: Path, tau: int
) -> None:
    flag, events = tmp_path / "go on", Events()
    choices: dict[str, Any] = {"optimizer": COUNTING, "consistency": SSP(tau), "on_event": events}
    with patient_server(plain, params(), **choices) as ps:
        futures = ps.run(partial(paced, str(flag)), workers=2)
        eventually(lambda: audited(ps)[0].applied == {"worker-0": tau + 2, "worker-1": 1}, SECONDS)
        flag.touch()
        assert results(futures) == [STEPS, STEPS]
        assert counts(ps) == [2 * STEPS]
    clocks = {"worker-0": 0, "worker-1": 0}
    for applied in sorted(events.of(Applied), key=lambda event: event.versions[0]):
        for name in applied.workers:
            clocks[name] += 1
            assert clocks[name] - min(clocks.values()) <= tau + 1 or STEPS in clocks.values()


# -- evaluation ----------------------------------------------------------------------------------


def first_weight(weights: Mapping[str, np.ndarray]) -> tuple[float, float]:
    return float(weights["w"][0]), 0.5


def test_snapshots_are_scored_until_the_group_is_closed(client: Client) -> None:
    events = Events()
    with patient_server(client, params(), optimizer=COUNTING, on_event=events) as ps:
        ps.evaluate(first_weight, every=0.05)
        results(ps.run(partial(count, STEPS)))
    scores = events.of(Evaluated)
    assert all(score.loss == score.updates for score in scores)
    assert (scores[0].loss, scores[-1].loss) == (0, STEPS)


def test_the_first_and_the_last_score_have_more_time_than_the_interval(plain: Client) -> None:
    events = Events()
    with patient_server(plain, params(), optimizer=COUNTING, on_event=events) as ps:
        ps.evaluate(first_weight, every=1e-6)
        results(ps.run(partial(count, 1)))
    assert events.of(EvaluationMissed)
    assert [score.loss for score in events.of(Evaluated)] == [0, 1]


def fail(weights: Mapping[str, np.ndarray]) -> tuple[float, float]:
    raise ZeroDivisionError


def test_a_score_that_raises_is_recorded(plain: Client) -> None:
    events = Events()
    with patient_server(plain, params(), on_event=events) as ps:
        ps.evaluate(fail, every=0.05)
        results(ps.run(partial(count, 1)))
    assert "ZeroDivisionError" in events.of(EvaluationMissed)[-1].reason


# -- handles -------------------------------------------------------------------------------------


def use_handles(worker: Worker) -> list[float]:
    gradients = ones(worker.pull())
    pushes = [worker.push_async(gradients) for _ in range(STEPS)]
    seen = [float(worker.pull_async().wait()["w"][0])]  # after the pushes made before it
    assert all(push.done() for push in pushes)
    assert [push.wait() for push in pushes] == [None] * STEPS
    both = [worker.push_pull_async(gradients) for _ in range(3)]
    seen.append(float(both[-1].wait(SECONDS)["w"][0]))
    assert all(handle.done() for handle in both)
    return seen


def test_requests_made_by_handles_keep_their_order(plain: Client) -> None:
    with patient_server(plain, params(), shards=2, optimizer=COUNTING) as ps:
        assert results(ps.run(use_handles)) == [[STEPS, STEPS + 3]]
        assert counts(ps) == [STEPS + 3] * 2


def wait_impatiently(flag: str, worker: Worker) -> bool:
    gradients = ones(worker.pull())
    if worker.index == 1:
        eventually(Path(flag).exists, SECONDS)
        worker.push(gradients)
        return True
    push = worker.push_async(gradients)
    with pytest.raises(TimeoutError):
        push.wait(0.1)
    under_way = not push.done()
    Path(flag).touch()
    push.wait(SECONDS)
    return under_way and push.done()


def test_a_request_goes_on_after_waiting_for_it_timed_out(plain: Client, tmp_path: Path) -> None:
    choices: dict[str, Any] = {"optimizer": COUNTING, "consistency": BSP()}
    with patient_server(plain, params(), **choices) as ps:
        train = partial(wait_impatiently, str(tmp_path / "go on"))
        assert results(ps.run(train, workers=2)) == [True, True]
        assert counts(ps) == [2]


def push_partly(worker: Worker) -> tuple[float, float]:
    gradients = ones(worker.pull())
    for _ in range(STEPS):
        worker.push({"w": gradients["w"]})
    weights = worker.push_pull({"v": gradients["v"]})
    return float(weights["w"].min()), float(weights["v"].max())


@pytest.mark.parametrize("shards", [1, 2])
def test_a_push_of_some_arrays_leaves_the_others_alone(plain: Client, shards: int) -> None:
    with patient_server(plain, params(), shards=shards, optimizer=COUNTING) as ps:
        assert results(ps.run(push_partly)) == [(STEPS, 1)]


def write_into_weights(worker: Worker) -> None:
    worker.pull()["w"][:] = 1.0


def test_a_worker_cannot_write_into_the_weights_it_read(plain: Client) -> None:
    with patient_server(plain, params()) as ps, pytest.raises(ValueError, match="read-only"):
        results(ps.run(write_into_weights))


# -- what is refused -----------------------------------------------------------------------------


def _with(name: str, array: np.ndarray) -> Callable[[Mapping[str, np.ndarray]], dict[str, Any]]:
    return lambda gradients: {**gradients, name: array}


REFUSED = {
    "unknown name": (_with("wieghts", np.zeros(3)), ShapeMismatch, "'wieghts'.*w, v"),
    "shape": (_with("w", np.zeros((30, 1))), ShapeMismatch, r"'w' is .*\[30, 1\].*\[30\]"),
    "dtype": (_with("v", np.zeros((3, 7))), ShapeMismatch, "'v' is float64.*float32"),
    "NaN": (_with("v", np.full((3, 7), np.nan, np.float32)), NonFiniteGradient, "'v'"),
    "infinity": (_with("w", np.full(30, np.inf)), NonFiniteGradient, "'w'"),
}


def push_once(change: Callable[[Mapping[str, np.ndarray]], dict[str, Any]], worker: Worker) -> None:
    worker.push(change(ones(worker.pull())))


def push_wrong_then_right(
    change: Callable[[Mapping[str, np.ndarray]], dict[str, Any]], worker: Worker
) -> None:
    with pytest.raises((ShapeMismatch, NonFiniteGradient)):
        push_once(change, worker)
    count(1, worker)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("what", REFUSED)
def test_a_wrong_gradient_is_refused_whole_on_every_shard(
    plain: Client, what: str, shards: int
) -> None:
    change, error, message = REFUSED[what]
    with patient_server(plain, params(), shards=shards, optimizer=COUNTING) as ps:
        with pytest.raises(error, match=message):
            results(ps.run(partial(push_once, change)))
        assert versions(ps) == [0] * shards
        assert counts(ps) == [0] * shards
        results(ps.run(partial(push_wrong_then_right, change)))
        assert counts(ps) == [1] * shards


class OwnRule(SGD):
    """A rule of the user's own, which nothing has registered."""


def test_a_rule_that_cannot_be_kept_beside_checkpoints_is_refused_by_name(
    plain: Client, tmp_path: Path
) -> None:
    recovery = Recovery(Checkpoint(every=10, path=str(tmp_path)))
    with pytest.raises(ConfigurationError, match=r"OwnRule.* beside checkpoints: .*message"):
        patient_server(plain, params(), optimizer=OwnRule(0.1), recovery=recovery)
    assert not list(tmp_path.iterdir())


def test_an_unknown_strategy_is_refused_with_the_nearest_name(plain: Client) -> None:
    with pytest.raises(ConfigurationError, match=r"'chian'; did you mean 'chain'\?"):
        patient_server(plain, params(), recovery="chian")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"params": {}}, "empty"),
        ({"params": {"w": np.zeros(3, np.int64)}}, "int64, expected float32 or float64"),
        ({"params": {"w": np.zeros(3)}, "shards": 9}, "shards=9"),
        ({"recovery": "checkpoint"}, "path"),
    ],
)
def test_choices_that_cannot_work_are_refused_at_once(
    plain: Client, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        patient_server(plain, **{"params": params(), **wrong})


def test_too_few_nodes_are_counted(plain: Client) -> None:
    with pytest.raises(CapacityError, match=r"4 for servers, 1 for workers; there are 4 nodes"):
        patient_server(plain, params(), recovery=Recovery(Chain(replicas=4)))


def test_a_shard_that_no_named_server_is_meant_for_is_refused_at_once(with_roles: Client) -> None:
    with pytest.raises(CapacityError, match="shard 2"):
        patient_server(with_roles, params(), shards=3, recovery="chain")


@pytest.mark.parametrize(("workers", "message"), [(99, "workers=99.*have 2"), (0, "workers=0")])
def test_a_number_of_workers_that_cannot_be_is_refused(
    with_roles: Client, workers: int, message: str
) -> None:
    with (
        patient_server(with_roles, params()) as ps,
        pytest.raises(ConfigurationError, match=message),
    ):
        ps.run(partial(count, 1), workers=workers)


def test_what_is_no_function_is_refused(plain: Client) -> None:
    with (
        patient_server(plain, params()) as ps,
        pytest.raises(ConfigurationError, match="train='count', expected a function of a worker"),
    ):
        ps.run("count")  # type: ignore[arg-type]


# -- in documents ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("document", ["README.md", "docs/sparse-tables.md"])
def test_the_lines_in_a_document_run_as_they_stand(tmp_path: Path, document: str) -> None:
    text = (Path(__file__).parents[3] / document).read_text()
    block = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert block is not None, f"{document} has no ```python block"
    script = tmp_path / "quick_start.py"
    script.write_text(block[1])
    ran = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


def test_what_dps_keeps_on_a_node_is_not_among_dasks_extensions(plain: Client) -> None:
    # Dask goes through them for each heartbeat, and a node is lost if that fails.
    def extensions(dask_worker: Any) -> list[str]:
        return [name for name in dask_worker.extensions if name.startswith("dps")]

    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        results(ps.run(partial(count, 2)))
        assert not any(plain.run(extensions).values())
