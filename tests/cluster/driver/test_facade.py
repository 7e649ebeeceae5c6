"""The facade: what a Dask user does with a ParameterServer on a cluster of their own."""

from __future__ import annotations

import asyncio
import functools
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

import dps
from dps import BSP, SGD, SSP, Chain, Checkpoint, DelayCompensated, Recovery, TopK, Worker
from dps.errors import CapacityError, ConfigurationError, NonFiniteGradient, ShapeMismatch
from dps.events import Applied, Evaluated, EvaluationMissed, ResourceSampled
from tests.support.training import (
    COUNTING,
    PATIENT,
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


def test_every_update_of_every_worker_is_applied_once(client: Client) -> None:
    with patient_server(client, params(), shards=2, optimizer=COUNTING) as ps:
        assert results(ps.run(partial(count, STEPS), workers=2)) == [STEPS, STEPS]
        assert counts(ps) == [2 * STEPS] * 2
        for reply in audited(ps):
            assert reply.applied == {"worker-0": STEPS, "worker-1": STEPS}
            assert reply.duplicates == 0


@pytest.mark.slow
def test_updates_can_be_summed_before_they_are_replicated(plain: Client) -> None:
    """The traffic down the chain falls with the number of updates in a sum."""
    elements, steps, replicated = 20_000, 10, {}
    for aggregate in (1, 2):
        events = Events()
        recovery = Recovery(Chain(2, aggregate=aggregate, linger=5.0))
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


def test_weights_keep_shape_and_dtype_and_are_not_the_servers_own(plain: Client) -> None:
    given = {"w": np.arange(6.0).reshape(2, 3), "v": np.float32([[1.5], [2.5]])}
    start = {name: array.copy() for name, array in given.items()}
    with patient_server(plain, given, shards=2) as ps:
        given["w"][:] = 5.0
        ps.pull()["w"][:] = 7.0
        got = ps.pull()
    for name, array in start.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(got[name], array)


def paced(flag: str, worker: Worker) -> int:
    """Push and pull; the last worker waits for the file `flag` before its second push."""
    gradients = ones(worker.pull())
    for step in range(STEPS):
        if step == 1 and worker.index == worker.workers - 1:
            eventually(Path(flag).exists, SECONDS)
        worker.push_pull(gradients)
    return STEPS


def test_under_ssp_nobody_gets_more_than_the_bound_ahead(plain: Client, tmp_path: Path) -> None:
    flag, events, tau = tmp_path / "go on", Events(), 3
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


def test_a_push_of_some_arrays_leaves_the_others_alone(plain: Client) -> None:
    with patient_server(plain, params(), shards=2, optimizer=COUNTING) as ps:
        assert results(ps.run(push_partly)) == [(STEPS, 1)]


def push_of_many_kinds(worker: Worker) -> None:
    """Push what is no plain array of the parameter's dtype, and means the same."""
    one, two = np.full(30, -1.0), np.full((3, 7), -1.0)
    for w in (one.astype("f4"), one.astype(">f8"), np.full(60, -1.0)[::-2], np.rec.array(one)):
        worker.push({"w": w, "v": two})
    worker.push({"w": one, "v": np.asmatrix(two)})
    worker.push({"w": one, "v": np.asfortranarray(two, np.float32)})


def test_gradients_of_other_kinds_are_cast(plain: Client) -> None:
    with patient_server(plain, params(), shards=2, optimizer=COUNTING) as ps:
        results(ps.run(push_of_many_kinds))
        assert counts(ps) == [6] * 2


def write_into_weights(by_torch: bool, worker: Worker) -> list[float]:
    """Write into what was pulled; return what is pulled after that, and after a push."""
    pulled = worker.pull()
    for array in pulled.values():
        if by_torch:
            import torch

            torch.from_numpy(array).add_(7.0)
        else:
            array += 7.0
    again = worker.pull()
    pushed = worker.push_pull(ones(again))
    return [float(x) for each in (pulled, again, pushed) for x in (each["w"][5], each["v"][0, 0])]


@pytest.mark.parametrize(
    ("elements", "shards", "by_torch", "transport"),
    [
        (30, 1, False, "auto"),
        (1 << 20, 2, True, "auto"),
        (1 << 20, 1, True, "stream"),
    ],
)
def test_what_a_worker_writes_into_weights_is_its_own(
    plain: Client, elements: int, shards: int, by_torch: bool, transport: Any
) -> None:
    if by_torch:
        pytest.importorskip("torch")
    # Delay compensation looks at the weights that were given.
    rule = DelayCompensated(COUNTING, 1.0)
    choices: dict[str, Any] = {"shards": shards, "transport": transport, "optimizer": rule}
    with patient_server(plain, params(elements), **choices) as ps:
        (found,) = results(ps.run(partial(write_into_weights, by_torch)))
        assert found == [7, 7, 0, 0, 1, 1]
        assert counts(ps) == [1] * shards


def _with(name: str, array: Any) -> Callable[[Mapping[str, np.ndarray]], dict[str, Any]]:
    return lambda gradients: {**gradients, name: array}


REFUSED = {
    "unknown name": (_with("wieghts", np.zeros(3)), ShapeMismatch, "'wieghts'.*w, v"),
    "shape": (_with("w", np.zeros((30, 1))), ShapeMismatch, r"'w' is .*\[30, 1\].*\[30\]"),
    "dtype": (_with("v", np.zeros((3, 7), int)), ShapeMismatch, "'v' is int64.*float32"),
    "imaginary": (_with("w", np.zeros(30, complex)), ShapeMismatch, "'w' is complex128.*float64"),
    "masked": (_with("w", np.ma.zeros(30)), ShapeMismatch, "'w' is a masked array"),
    "nothing": (
        _with("w", None),
        ShapeMismatch,
        "'w' is NoneType, .*leave out arrays without a grad",
    ),
    "no mapping": (lambda given: given["w"], ShapeMismatch, "gradients=array.*expected a mapping"),
    "a list": (lambda given: [given["w"]], ShapeMismatch, "gradients=.*expected a mapping"),
    "NaN": (_with("v", np.full((3, 7), np.nan, np.float32)), NonFiniteGradient, "'v'"),
    "infinity": (_with("w", np.full(30, np.inf)), NonFiniteGradient, "'w'"),
}


def push_once(change: Callable[[Mapping[str, np.ndarray]], dict[str, Any]], worker: Worker) -> None:
    worker.push(change(ones(worker.pull())))


def push_wrong_then_right(worker: Worker) -> None:
    for change, error, _ in REFUSED.values():
        with pytest.raises(error):
            push_once(change, worker)
        count(1, worker)


def test_a_wrong_gradient_is_refused_whole_on_every_shard(plain: Client) -> None:
    """The same worker may push a right one after it."""
    with patient_server(plain, params(), shards=2, optimizer=COUNTING) as ps:
        for change, error, message in REFUSED.values():
            with pytest.raises(error, match=message):
                results(ps.run(partial(push_once, change)))
        assert versions(ps) == [0, 0]
        assert counts(ps) == [0, 0]
        results(ps.run(push_wrong_then_right))
        assert counts(ps) == [len(REFUSED)] * 2


class OwnRule(SGD):
    """A rule of the user's own, which nothing has registered."""


def test_a_rule_that_cannot_be_kept_beside_checkpoints_is_refused_by_name(
    plain: Client, tmp_path: Path
) -> None:
    recovery = Recovery(Checkpoint(every=10, path=str(tmp_path)))
    with pytest.raises(ConfigurationError, match=r"OwnRule.* beside checkpoints: .*message"):
        patient_server(plain, params(), optimizer=OwnRule(0.1), recovery=recovery)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"params": {}}, "empty"),
        ({"params": {"w": np.zeros(3, np.int64)}}, "int64, expected float32 or float64"),
        ({"recovery": "checkpoint"}, "path"),
        ({"recovery": "chian"}, r"'chian'; did you mean 'chain'\?"),
        ({"transport": "pigeon"}, "transport='pigeon', expected 'auto', .* 'dask'"),
        ({"params": [np.zeros(3)]}, "params is list, expected a mapping"),
        ({"shards": 0}, "^shards=0, expected 1 or more whole shards$"),
        ({"timings": 3}, r"^timings=3, expected Timings\(…\)$"),
        ({"functions": 0}, "^functions=0, expected a mapping"),
        ({"filters": {"w": iter([TopK(0.5)])}}, r"^filters\['w'\]=.*, expected a list of filters"),
        ({"about": {"when": np.zeros(1)}}, "^about=.*, expected a mapping that is JSON"),
        ({"seats": "all"}, "^seats='all', expected"),
        ({"on_loss": "rise"}, "^on_loss='rise', expected 'warn', 'raise' or 'ignore'$"),
    ],
)
def test_choices_that_cannot_work_are_refused_at_once(
    plain: Client, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        patient_server(plain, **{"params": params(), **wrong})


def test_too_few_nodes_are_counted(plain: Client) -> None:
    with pytest.raises(
        CapacityError, match=r"4 nodes .* expected at least 4 for servers, 1 for workers"
    ):
        patient_server(plain, params(), recovery=Recovery(Chain(replicas=4)))


def test_a_shard_that_no_named_server_is_meant_for_is_refused_at_once(with_roles: Client) -> None:
    with pytest.raises(CapacityError, match="shard 2"):
        patient_server(with_roles, params(), shards=3, recovery="chain")


def test_a_number_of_workers_that_cannot_be_is_refused(with_roles: Client) -> None:
    with patient_server(with_roles, params()) as ps:
        for workers, message in (
            (99, "workers=99.*have 2"),
            (0, "^workers=0, expected 1 or more whole workers$"),
            (True, "^workers=True, expected 1 or more whole workers$"),
        ):
            with pytest.raises(ConfigurationError, match=message):
                ps.run(partial(count, 1), workers=workers)


async def asynchronous(worker: Worker) -> None:
    await asyncio.sleep(0)


@functools.wraps(asynchronous)
def wrapped(worker: Worker) -> object:
    return asynchronous(worker)


def generating(worker: Worker) -> object:
    return (number for number in range(3))


def test_a_function_whose_body_has_not_run_fails(plain: Client) -> None:
    text = "^what the training function returned=.*, expected the result of a plain function"
    with patient_server(plain, params()) as ps:
        for function in (wrapped, generating):
            (future,) = ps.run(function)
            with pytest.raises(ConfigurationError, match=text):
                future.result(timeout=30)


def test_paths_may_be_of_pathlib(plain: Client, tmp_path: Path) -> None:
    recovery = Recovery(Checkpoint(every=1, path=tmp_path / "kept"))  # type: ignore[arg-type]
    with patient_server(plain, params(), optimizer=COUNTING, recovery=recovery) as ps:
        results(ps.run(partial(count, 3)))
        ps.save(tmp_path / "model")
    with dps.ParameterServer.resume(plain, tmp_path / "kept", timings=PATIENT) as ps:
        assert counts(ps) == [3]
    assert (dps.load(tmp_path / "model")["w"] == 3).all()
    with pytest.raises(ConfigurationError, match=r"^path=b'x', expected a path"):
        dps.ParameterServer.resume(plain, b"x")  # type: ignore[arg-type]


def test_what_is_no_client_is_refused(plain: Client) -> None:
    with Client(plain.scheduler.address, set_as_default=False) as closed:
        pass
    text = r"^client=.*, expected a Dask client: distributed\.Client\(cluster or address\)$"
    wrong: tuple[tuple[Any, str], ...] = (
        (plain.cluster, text),
        ("tcp://127.0.0.1:1", text),
        (None, text),
        (closed, "^the Dask client is closed; expected a connected one$"),
    )
    for client, told in wrong:
        with pytest.raises(ConfigurationError, match=told):
            dps.ParameterServer(client, params())
        with pytest.raises(ConfigurationError, match=told):
            dps.ParameterServer.resume(client, "nowhere")


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
