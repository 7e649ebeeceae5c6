"""How a training ends: in its checkpoint, stopped by its driver, or with its futures cancelled."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from dps import (
    BSP,
    Checkpoint,
    LastStateNotSavedWarning,
    ParameterServer,
    Recovery,
    TrainingStopped,
    UpdatesLostWarning,
    Worker,
)
from dps.cluster.backends.local import LocalCluster
from dps.errors import ConfigurationError, ShardUnavailable, StoreUnavailable
from dps.protocol.storage.manifest import find_saved
from dps.protocol.timings import Timings
from tests.support.training import (
    COUNTING,
    PATIENT,
    PRELOAD,
    SECONDS,
    count,
    count_until,
    counts,
    nodes,
    ones,
    params,
    results,
    versions,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster


def saved_versions(path: Path) -> list[int]:
    return [state.version for state in find_saved(str(path)).states]


# -- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["shard", "all"])
@pytest.mark.parametrize("keep", [1, 2])
def test_a_finished_training_is_in_its_checkpoint(
    plain: Client, tmp_path: Path, scope: Any, keep: int
) -> None:
    durability = Checkpoint(every=100, path=str(tmp_path), scope=scope, keep=keep)
    choices: dict[str, Any] = {"optimizer": COUNTING, "recovery": Recovery(durability)}
    with ParameterServer(plain, params(), shards=2, **choices) as ps:
        results(ps.run(partial(count, 120)))
    assert saved_versions(tmp_path) == [120, 120]
    with ParameterServer.resume(plain, str(tmp_path)) as ps:
        assert counts(ps) == [120, 120]


@pytest.mark.parametrize("scope", ["shard", "all"])
def test_a_checkpoint_can_be_asked_for_while_workers_push(
    plain: Client, tmp_path: Path, scope: Any
) -> None:
    durability = Checkpoint(every=100_000, path=str(tmp_path / "saved"), scope=scope)
    choices: dict[str, Any] = {"optimizer": COUNTING, "recovery": Recovery(durability)}
    with ParameterServer(plain, params(), shards=2, timings=PATIENT, **choices) as ps:
        futures = ps.run(partial(count_until, str(tmp_path / "stop")), workers=2)
        for _ in range(3):
            before = eventually(lambda: min(versions(ps)), SECONDS) + 10
            eventually(lambda least=before: min(versions(ps)) >= least, SECONDS)  # type: ignore[misc]
            there = versions(ps)
            ps.checkpoint()
            saved = saved_versions(tmp_path / "saved")
            assert all(s >= t for s, t in zip(saved, there, strict=True))
            if scope == "all":
                assert len(set(saved)) == 1
        (tmp_path / "stop").touch()
        pushed = sum(results(futures))
    assert saved_versions(tmp_path / "saved") == [pushed, pushed]


def test_a_server_that_is_lost_just_before_the_end_is_in_the_last_checkpoint(
    plain: Client, tmp_path: Path
) -> None:
    recovery = Recovery(Checkpoint(every=100, path=str(tmp_path)))
    timings = Timings(call=30.0)  # on a busy machine the node takes seconds to start again
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ps = ParameterServer(
            plain, params(), optimizer=COUNTING, recovery=recovery, timings=timings
        )
        with ps:
            results(ps.run(partial(count, 150)))
            head = ps.table().views[0].chain[0].address
            os.kill(plain.run(os.getpid, workers=[head])[head], signal.SIGKILL)
    assert not any(w.category is LastStateNotSavedWarning for w in caught)
    told = [str(w.message) for w in caught if w.category is UpdatesLostWarning]
    assert len(told) == len(ps.losses)
    assert 0 <= ps.updates_lost <= 100
    assert saved_versions(tmp_path) == [150 - ps.updates_lost]


def test_after_an_error_the_last_state_is_not_written(plain: Client, tmp_path: Path) -> None:
    recovery = Recovery(Checkpoint(every=100, path=str(tmp_path)))

    def train() -> None:
        with ParameterServer(plain, params(), optimizer=COUNTING, recovery=recovery) as ps:
            results(ps.run(partial(count, 120)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert saved_versions(tmp_path) < [120]


def test_a_recovery_without_checkpoints_says_so(plain: Client) -> None:
    with (
        ParameterServer(plain, params(), recovery="chain") as ps,
        pytest.raises(ConfigurationError, match="Chain writes no checkpoints: give recovery="),
    ):
        ps.checkpoint()


DRIVER = """
import sys
from functools import partial
from dps import Checkpoint, ParameterServer, Recovery
from dps.cluster.backends.local import LocalCluster
from tests.support.training import COUNTING, PRELOAD, count, nodes, params, results

if __name__ == "__main__":
    path, scope = sys.argv[1:]
    recovery = Recovery(Checkpoint(every=100, path=path, scope=scope, keep=1))
    with LocalCluster(nodes(), PRELOAD) as cluster:
        choices = {"shards": 2, "optimizer": COUNTING, "recovery": recovery}
        with ParameterServer(cluster.client, params(200_000), **choices) as ps:
            results(ps.run(partial(count, 120)))
            print("closing", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["shard", "all"])
@pytest.mark.parametrize("after", [0.0, 0.03])
def test_a_crash_while_it_closes_leaves_a_whole_checkpoint(
    tmp_path: Path, scope: str, after: float
) -> None:
    path, script = tmp_path / "saved", tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    with subprocess.Popen(
        [sys.executable, str(script), str(path), scope],
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "closing\n"
        time.sleep(after)  # anywhere in the midst of it
        os.killpg(driver.pid, signal.SIGKILL)
    assert all(20 <= version <= 120 for version in saved_versions(path))


# -- a full disk ---------------------------------------------------------------------------------


def test_a_full_disk_keeps_the_checkpoint_before_and_is_told(
    plain: Client, small_disk: Path
) -> None:
    recovery = Recovery(Checkpoint(every=100_000, path=str(small_disk / "saved")))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ParameterServer(plain, params(), optimizer=COUNTING, recovery=recovery) as ps:
            results(ps.run(partial(count, 5)))
            ps.checkpoint()
            results(ps.run(partial(count, 3)))
            fill(small_disk)
            with pytest.raises(StoreUnavailable, match=r"version 8 .*No space left.*version 5"):
                ps.checkpoint()
            assert counts(ps) == [8]
    assert saved_versions(small_disk / "saved") == [5]
    assert not any(w.category is UpdatesLostWarning for w in caught)
    (warning,) = (str(w.message) for w in caught if w.category is LastStateNotSavedWarning)
    assert "is not in its checkpoints, for it could not be written at the end: " in warning
    assert "No space left" in warning


@pytest.mark.slow
def test_a_path_that_stays_full_is_the_reason_why_pushes_end(
    plain: Client, small_disk: Path
) -> None:
    recovery = Recovery(Checkpoint(every=10, path=str(small_disk / "saved")))
    choices: dict[str, Any] = {"recovery": recovery, "timings": Timings(unavailable=3.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LastStateNotSavedWarning)
        with ParameterServer(plain, params(), optimizer=COUNTING, **choices) as ps:
            fill(small_disk)
            (future,) = ps.run(partial(count, 100))
            with pytest.raises(ShardUnavailable, match=r"for 3 s: .*No space left on device"):
                future.result(timeout=SECONDS)
            assert versions(ps)[0] <= 11  # one more than is acknowledged
    assert saved_versions(small_disk / "saved") == [0]


def fill(folder: Path) -> None:
    """Write until there is no space left."""
    with (folder / "rest").open("wb", buffering=0) as rest, contextlib.suppress(OSError):
        while rest.write(bytes(4096)):
            pass
    assert os.statvfs(folder).f_bavail == 0


# -- stop ----------------------------------------------------------------------------------------


def test_nothing_is_pushed_after_a_stop(plain: Client) -> None:
    with ParameterServer(plain, params(), shards=2, optimizer=COUNTING) as ps:
        futures = ps.run(partial(count_until, "/nowhere"), workers=2)
        eventually(lambda: min(versions(ps)) >= 20, SECONDS)
        ps.stop()
        there = versions(ps)
        for future in futures:
            with pytest.raises(TrainingStopped, match=r"ParameterServer\.stop"):
                future.result(timeout=SECONDS)
        assert versions(ps) == there
        assert results(ps.run(partial(count, 3))) == [3]  # those that are started later go on
        assert versions(ps) == [version + 3 for version in there]


def test_a_function_that_catches_it_has_a_result(plain: Client) -> None:
    with ParameterServer(plain, params(), optimizer=COUNTING) as ps:
        (future,) = ps.run(return_what_it_did)
        eventually(lambda: min(versions(ps)) >= 5, SECONDS)
        ps.stop()
        (there,) = versions(ps)
        # The last one may have been under way when the training was stopped.
        assert future.result(timeout=SECONDS) in (there, there - 1)


def return_what_it_did(worker: Worker) -> int:
    gradients = ones(worker.pull())
    for step in itertools.count():
        try:
            worker.push(gradients)
        except TrainingStopped:
            return step
    raise AssertionError


def compute_then_push(flag: str, worker: Worker) -> None:
    worker.push(ones(worker.pull()))
    Path(f"{flag} is awaited").touch()
    eventually(Path(flag).exists, SECONDS)
    worker.push(ones(worker.pull()))


def test_a_worker_that_computes_is_not_waited_for_but_pushes_no_more(
    plain: Client, tmp_path: Path
) -> None:
    flag = tmp_path / "computed"
    with ParameterServer(plain, params(), optimizer=COUNTING) as ps:
        (future,) = ps.run(partial(compute_then_push, str(flag)))
        eventually(Path(f"{flag} is awaited").exists, SECONDS)
        ps.stop()
        flag.touch()
        with pytest.raises(TrainingStopped):
            future.result(timeout=SECONDS)
        assert versions(ps) == [1]


def push_by_turns(flag: str, worker: Worker) -> None:
    """Under BSP, have worker-0 wait in its push for one that does not come."""
    if worker.index == 1:
        eventually(Path(flag).exists, SECONDS)
    count_until("/nowhere", worker)


def test_a_push_that_waits_for_others_ends_as_well(plain: Client, tmp_path: Path) -> None:
    flag = tmp_path / "go on"
    choices: dict[str, Any] = {"optimizer": COUNTING, "consistency": BSP()}
    with ParameterServer(plain, params(), **choices) as ps:
        futures = ps.run(partial(push_by_turns, str(flag)), workers=2)
        eventually(lambda: ps.audit()[0].applied.keys() == {"worker-0", "worker-1"}, SECONDS)  # type: ignore[union-attr]
        ps.stop()
        there = versions(ps)
        assert there[0] <= 1  # one, if worker-1 has left the round before worker-0
        flag.touch()
        for future in futures:
            with pytest.raises(TrainingStopped):
                future.result(timeout=SECONDS)
        assert versions(ps) == there


def test_a_worker_that_waits_for_others_to_come_ends_as_well(tmp_path: Path) -> None:
    flag = tmp_path / "go on"
    with LocalCluster(nodes(servers=1), PRELOAD) as cluster:
        choices: dict[str, Any] = {"optimizer": COUNTING, "consistency": BSP()}
        with ParameterServer(cluster.client, params(), **choices) as ps:
            (node,) = (n.address for n in ps.nodes if n.name == "worker-1")
            busy = cluster.client.submit(
                partial(eventually, flag.exists, SECONDS), workers=[node], resources={"worker": 1}
            )
            eventually(lambda: cluster.client.processing([node])[node], SECONDS)
            futures = ps.run(partial(count, 1), workers=2)
            eventually(lambda: ps.audit()[0].applied, SECONDS)  # type: ignore[union-attr]
            ps.stop()
            with pytest.raises(TrainingStopped):
                futures[0].result(timeout=SECONDS)
            flag.touch()
            assert busy.result(timeout=SECONDS)
            with pytest.raises(TrainingStopped):
                futures[1].result(timeout=SECONDS)
            assert versions(ps) == [0]


# -- cancelled futures ---------------------------------------------------------------------------


def tell_why(flag: str, worker: Worker) -> None:
    said = Path(f"{flag}-{worker.name}")
    said.write_text("begun")
    try:
        count_until("/nowhere", worker)
    except TrainingStopped as error:
        said.write_text(str(error))
        raise


def test_workers_of_cancelled_futures_push_no_more(plain: Client, tmp_path: Path) -> None:
    with ParameterServer(plain, params(), optimizer=COUNTING) as ps:
        futures = ps.run(partial(tell_why, str(tmp_path / "why")), workers=2)
        # A task that is cancelled before it has begun does nothing at all.
        eventually(lambda: len(list(tmp_path.iterdir())) == 2 and min(versions(ps)) >= 20, SECONDS)
        plain.cancel(futures)
        why = {f"why-worker-{i}": f"the future of worker-{i} was cancelled" for i in range(2)}
        eventually(lambda: {p.name: p.read_text() for p in tmp_path.iterdir()} == why, SECONDS)
        there = versions(ps)
        assert results(ps.run(partial(count, 2))) == [2]
        assert versions(ps) == [there[0] + 2]


@pytest.mark.slow
def test_one_future_of_two_is_cancelled(tmp_path: Path) -> None:
    flag = tmp_path / "stop"
    with LocalCluster(nodes(servers=1), PRELOAD) as cluster:
        choices: dict[str, Any] = {"optimizer": COUNTING, "consistency": BSP()}
        with ParameterServer(cluster.client, params(), **choices) as ps:
            gone, kept = ps.run(partial(count_until, str(flag)), workers=2)
            eventually(lambda: min(versions(ps)) >= 20, SECONDS)
            cluster.client.cancel([gone])
            there = versions(ps)[0]
            eventually(lambda: versions(ps)[0] > there + 50, SECONDS)  # nobody waits for it
            flag.touch()
            kept.result(timeout=SECONDS)
