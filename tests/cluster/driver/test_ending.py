"""How a training ends: in its checkpoint, stopped by its driver, or with its futures cancelled."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from dps import (
    Checkpoint,
    LastStateNotSavedWarning,
    ParameterServer,
    Recovery,
    TrainingStopped,
    UpdatesLostWarning,
    Worker,
)
from dps.errors import ConfigurationError, ShardUnavailable, StoreUnavailable
from dps.protocol.timings import Timings
from dps.recovery.manifest import find_saved
from tests.support.training import (
    COUNTING,
    PATIENT,
    SECONDS,
    count,
    count_until,
    counts,
    ones,
    params,
    results,
    versions,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster


def saved_versions(path: Path) -> list[int]:
    return [state.version for state in find_saved(str(path)).states]


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
    with ParameterServer.resume(plain, str(tmp_path / "saved"), timings=PATIENT) as ps:
        assert counts(ps) == [pushed, pushed]


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
    assert "because it could not be written at the end (" in warning
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


def compute_then_push(flag: str, worker: Worker) -> int:
    worker.push(ones(worker.pull()))
    Path(f"{flag} is awaited").touch()
    eventually(Path(flag).exists, SECONDS)
    with pytest.raises(TrainingStopped):
        worker.push(ones(worker.pull()))
    return 1


def test_a_worker_that_computes_is_not_waited_for_but_pushes_no_more(
    plain: Client, tmp_path: Path
) -> None:
    flag = tmp_path / "computed"
    with ParameterServer(plain, params(), optimizer=COUNTING) as ps:
        (future,) = ps.run(partial(compute_then_push, str(flag)))
        eventually(Path(f"{flag} is awaited").exists, SECONDS)
        ps.stop()
        flag.touch()
        assert future.result(timeout=SECONDS) == 1, "whoever catches it has a result"
        assert versions(ps) == [1]


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
