"""The end of workers and of groups: what goes on, what is told, and what is left on the cluster."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import warnings
import weakref
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client
from distributed.client import FutureCancelledError

from dps import SGD, Checkpoint, LastStateNotSavedWarning, ParameterServer, Recovery, Worker
from dps.cluster.backends.local import LocalCluster
from dps.errors import CapacityError, ConfigurationError, GroupClosed
from dps.events import Evaluated
from dps.protocol.coordinator.coordinator import Coordinator
from dps.protocol.timings import Timings
from tests.cluster.driver.test_facade import STEPS, first_weight
from tests.support.training import (
    COUNTING,
    PATIENT,
    PRELOAD,
    SECONDS,
    Events,
    audited,
    count,
    count_until,
    counts,
    nodes,
    params,
    results,
    versions,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster


def traces(client: Client, group: str) -> list[str]:
    """Names of what the group has on the cluster: actors, tasks, plugins and handlers."""

    def on_scheduler(dask_scheduler: Any) -> list[str]:
        return [
            *dask_scheduler.plugins,
            *dask_scheduler.handlers,
            *dask_scheduler.tasks,
        ]

    def on_node(dask_worker: Any) -> list[str]:
        return [*dask_worker.state.actors, *dask_worker.state.tasks]

    found = [*client.run_on_scheduler(on_scheduler), *chain(*client.run(on_node).values())]
    return [name for name in found if group in name]


def test_close_leaves_the_cluster_as_it_was(client: Client) -> None:
    with ParameterServer(client, params(), shards=2, recovery="chain") as ps:
        results(ps.run(partial(count, 2)))
        group = ps.group.name
        assert len(traces(client, group)) >= 4
    eventually(lambda: not traces(client, group), SECONDS)
    assert client.submit(sum, [1, 2]).result(timeout=SECONDS) == 3


def test_close_leaves_it_as_it_was_though_its_warning_is_an_error(
    plain: Client, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    recovery = Recovery(Checkpoint(every=100, path=str(saved)))
    ps = ParameterServer(plain, params(), optimizer=COUNTING, recovery=recovery)
    results(ps.run(partial(count, 3)))
    saved.rename(tmp_path / "moved")
    saved.touch()  # nothing can be written there any more
    with warnings.catch_warnings():
        warnings.simplefilter("error", LastStateNotSavedWarning)
        with pytest.raises(
            LastStateNotSavedWarning, match=r"lack its last state, .* ps\.checkpoint\(\)"
        ):
            ps.close()
    eventually(lambda: not traces(plain, ps.group.name), SECONDS)


def held_by_scheduler(dask_scheduler: Any) -> int:
    gc.collect()
    return sum(isinstance(thing, Coordinator) for thing in gc.get_objects())


@pytest.mark.slow
def test_nothing_of_a_closed_group_is_kept(with_roles: Client) -> None:
    def bring_up_and_close() -> weakref.ref[ParameterServer]:
        with ParameterServer(with_roles, params(), on_event=Events()) as ps:
            results(ps.run(partial(count, STEPS)))
            return weakref.ref(ps)

    groups = [bring_up_and_close() for _ in range(3)]

    def forgotten() -> bool:
        gc.collect()
        return not any(group() for group in groups)

    eventually(forgotten, SECONDS)
    eventually(lambda: with_roles.run_on_scheduler(held_by_scheduler) == 0, SECONDS)


def test_workers_end_when_the_group_is_closed_under_them(plain: Client, tmp_path: Path) -> None:
    """Also one whose future nobody has kept."""
    flag = tmp_path / "ended"
    with ParameterServer(plain, params(), optimizer=COUNTING) as ps:
        (future,) = ps.run(partial(count_until, str(tmp_path / "never")))
        ps.run(partial(tell_of_the_end, str(flag)))
        eventually(lambda: len(audited(ps)[0].applied) == 2, SECONDS)
        eventually(lambda: min(audited(ps)[0].applied.values()) > 5, SECONDS)
    with pytest.raises(GroupClosed):
        future.result(timeout=SECONDS)
    eventually(flag.exists, SECONDS)


def tell_of_the_end(flag: str, worker: Worker) -> None:
    try:
        count_until(f"{flag} never", worker)
    except GroupClosed:
        Path(flag).touch()


def compute_until(flag: str, worker: Worker) -> None:
    Path(f"{flag} is awaited").touch()
    eventually(Path(flag).exists, SECONDS)
    worker.pull()


def test_close_does_not_wait_for_long_computations(
    plain: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flag = tmp_path / "computed"
    with ParameterServer(plain, params(), timings=Timings(call=0.2, hold=0.1)) as ps:
        futures = ps.run(partial(compute_until, str(flag)))
        eventually(Path(f"{flag} is awaited").exists, SECONDS)
    assert futures[0].cancelled()
    flag.touch()
    eventually(lambda: not traces(plain, ps.group.name), SECONDS)
    assert "No handler" not in caplog.text  # of the scheduler, which is in this process


def hold(flag: Path, _: int) -> None:
    eventually(flag.exists, SECONDS)


def test_a_cluster_that_is_busy_is_not_waited_for_forever(
    plain: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dps.cluster.driver.group_driver.START_SECONDS", 0.3)
    flag = tmp_path / "go on"
    busy = plain.map(partial(hold, flag), range(4), pure=False)
    eventually(lambda: sum(map(len, plain.processing().values())) == 4, SECONDS)
    with pytest.raises(CapacityError, match="check the load of the Dask workers"):
        ParameterServer(plain, params())
    flag.touch()
    results(busy)


def test_two_groups_share_a_client(plain: Client) -> None:
    with (
        ParameterServer(plain, params(), optimizer=COUNTING) as one,
        ParameterServer(plain, params(), shards=2, optimizer=SGD(2.0)) as other,
    ):
        futures = [*one.run(partial(count, 3)), *other.run(partial(count, 4))]
        assert results(futures) == [3, 4]
        assert counts(one) == [3]
        assert counts(other) == [8, 8]


def test_an_asynchronous_client_awaits_the_same_methods(with_roles: Client) -> None:
    events = Events()

    async def train() -> np.ndarray:
        choices: dict[str, Any] = {"security": with_roles.security, "set_as_default": False}
        async with (
            Client(with_roles.scheduler.address, asynchronous=True, **choices) as client,
            ParameterServer(client, params(), shards=2, optimizer=COUNTING, on_event=events) as ps,
        ):
            await ps.evaluate(first_weight, every=0.05)
            done = await client.gather(ps.run(partial(count, STEPS), workers=2))
            assert done == [STEPS, STEPS]
            assert [reply.version for reply in await ps.audit()] == [2 * STEPS] * 2
            weights: np.ndarray = (await ps.pull())["w"]
            return weights

    np.testing.assert_array_equal(asyncio.run(train()), 2 * STEPS)
    assert events.of(Evaluated)[-1].loss == 2 * STEPS


def test_a_with_statement_that_does_not_go_with_the_client_is_refused(
    with_roles: Client, recwarn: pytest.WarningsRecorder
) -> None:
    async def asynchronously() -> None:
        choices: dict[str, Any] = {"security": with_roles.security, "set_as_default": False}
        async with Client(with_roles.scheduler.address, asynchronous=True, **choices) as client:
            with (
                pytest.raises(ConfigurationError, match="use `async with ParameterServer"),
                ParameterServer(client, params()),
            ):
                pytest.fail("it is not up")
            async with ParameterServer(client, params()) as ps:
                assert not ps.closed

    async def wrongly(ps: ParameterServer) -> None:
        async with ps:
            pytest.fail("it is up already")

    asyncio.run(asynchronously())
    with ParameterServer(with_roles, params()) as ps:
        with pytest.raises(ConfigurationError, match="use `with ParameterServer"):
            asyncio.run(wrongly(ps))
        assert not ps.closed
    gc.collect()
    assert not [warning for warning in recwarn if "never awaited" in str(warning.message)]


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "in-order"])
def test_closing_does_not_wait_for_a_scheduler_that_is_lost(tmp_path: Path, fails: bool) -> None:
    recovery = Recovery(Checkpoint(path=str(tmp_path / "checkpoints")))
    with LocalCluster(nodes(), PRELOAD) as cluster:
        ps = ParameterServer(cluster.client, params(), recovery=recovery, timings=PATIENT)
        assert not ps.scheduler_lost
        futures = ps.run(partial(count_until, "/nowhere"), workers=2)
        eventually(lambda: min(versions(ps)) > 0, SECONDS)
        os.kill(cluster.pids["scheduler"], signal.SIGKILL)
        if fails:
            with pytest.raises(FutureCancelledError):
                futures[0].result(timeout=SECONDS)
            ps.close(checkpoint=False)
        else:  # perhaps before anybody knows
            with pytest.warns(
                LastStateNotSavedWarning, match="connection to Dask.s scheduler is gone"
            ):
                ps.close()
        # Whatever waited for an answer would wait for longer than this test may take.
        assert ps.closed
        assert ps.scheduler_lost


def test_a_group_that_nobody_closes_ends_with_one_line(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """That its client was closed first is no lost scheduler."""
    with LocalCluster(nodes(), PRELOAD) as cluster:
        one = cluster.client
        with ParameterServer(one, params()) as closed:
            (future,) = closed.run(partial(count_until, str(tmp_path / "never")))
            eventually(lambda: versions(closed)[0] > 0, SECONDS)
        eventually(future.done, SECONDS)
        same: dict[str, Any] = {"security": one.security, "loop": one.loop}  # which goes on
        with Client(one.scheduler.address, set_as_default=False, **same) as client:
            ps = ParameterServer(client, params(), timings=PATIENT)
            name = ps.name
        eventually(lambda: "was not closed" in caplog.text, SECONDS)
        assert (ps.scheduler_lost, ps.closed) == (False, False)
        del ps
        gc.collect()  # asyncio complains of a task's error that nobody has asked for
    assert caplog.text.count("was not closed") == 1
    told = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith(f"dps: parameter server {name} was not closed")
    assert told[0].endswith("Leave its `with` block or call ps.close() first")
    assert "never retrieved" not in caplog.text
