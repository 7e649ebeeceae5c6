"""What is told of acknowledged updates that are lost, by default and with `on_loss="raise"`."""

from __future__ import annotations

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
    SSP,
    Checkpoint,
    Loss,
    ParameterServer,
    Recovery,
    UpdatesDroppedWarning,
    UpdatesLost,
    UpdatesLostWarning,
    Worker,
)
from dps.cluster.backends.local import LocalCluster
from dps.errors import ConfigurationError
from dps.events import LossReported, WorkerJoined, WorkerLeft
from tests.support.training import (
    COUNTING,
    PRELOAD,
    SECONDS,
    Events,
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

TRIES = 10


def tell_losses(flag: str, worker: Worker) -> tuple[int, list[Loss]]:
    """Push until there is a file `flag`, and once more; return how often, and what was lost."""
    pushed = count_until(flag, worker)
    return pushed, worker.losses


def kill_head(cluster: LocalCluster, ps: ParameterServer, shard: int) -> None:
    """Kill the process of a shard's head, and wait until another one serves."""
    view = ps.table().views[shard]
    (name,) = (n.name for n in ps.nodes if n.address == view.chain[0].address)
    os.kill(cluster.pids[name], signal.SIGKILL)

    def restored() -> bool:
        now = ps.table().views[shard]
        return now.serving and now.epoch > view.epoch

    eventually(restored, SECONDS)


def test_a_loss_is_a_warning_a_record_and_known_to_the_worker(tmp_path: Path) -> None:
    events, flag = Events(), tmp_path / "stop"
    with (
        LocalCluster(nodes(spares=1), PRELOAD) as cluster,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        choices: dict[str, Any] = {"optimizer": COUNTING, "on_event": events}
        with ParameterServer(cluster.client, params(), shards=2, **choices) as ps:
            futures = ps.run(partial(tell_losses, str(flag)), workers=2)
            eventually(lambda: min(versions(ps)) >= 50, SECONDS)
            kill_head(cluster, ps, 1)
            flag.touch()
            told = results(futures)
            pushed = sum(number for number, _ in told)
            there = counts(ps)
            (loss,) = ps.losses
            assert ps.updates_lost == loss.updates
        assert there == [pushed, pushed - loss.updates]
        assert loss.updates >= 50
        assert (loss.shard, loss.exact, loss.source, loss.version) == (1, True, "initial", 0)
        assert sum(own.updates for _, losses in told for own in losses) == loss.updates
        assert {own.shard for _, losses in told for own in losses} == {1}
        assert loss.workers == {
            f"worker-{i}": own.updates for i, (_, losses) in enumerate(told) for own in losses
        }
        assert [e.updates for e in events.of(LossReported)] == [loss.updates]
        assert ps.losses == [loss]
    (warning,) = (w for w in caught if w.category is UpdatesLostWarning)
    text = f"shard 1 has lost {loss.updates} acknowledged updates: it was restored from its initial"
    assert text in str(warning.message)


def push_until(flag: str, worker: Worker) -> int:
    """Push until there is a file `flag`; return how many were dropped.

    Files say which process this is, and that one has been dropped.
    """
    Path(f"{flag}-pid-{worker.name}").write_text(str(os.getpid()))
    gradients = ones(worker.pull())
    until = time.monotonic() + 2 * SECONDS
    while not os.path.exists(flag) and time.monotonic() < until:
        worker.push(gradients)
        if worker.dropped:
            Path(f"{flag}-dropped-{worker.name}").touch()
            worker.pull()  # else whatever it pushes is as stale
    return worker.dropped


def pause_and_resume(pid: int, name: str, events: Events) -> None:
    """Pause a worker's process until it is given up, and resume it until it has joined again."""

    def number(kind: type[WorkerLeft] | type[WorkerJoined]) -> int:
        return sum(event.worker == name for event in events.of(kind))

    left, joined = number(WorkerLeft), number(WorkerJoined)
    os.kill(pid, signal.SIGSTOP)
    try:
        eventually(lambda: number(WorkerLeft) > left, SECONDS)
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: number(WorkerJoined) > joined, SECONDS)


@pytest.mark.slow
@pytest.mark.parametrize(("on_loss", "told"), [("warn", 1), ("ignore", 0)])
def test_dropped_updates_are_a_warning_once(tmp_path: Path, on_loss: str, told: int) -> None:
    """Both workers are given up, one after the other, and come back."""
    events, flag = Events(), tmp_path / "stop"
    with (
        LocalCluster(nodes(), PRELOAD) as cluster,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        choices: dict[str, Any] = {"optimizer": COUNTING, "on_event": events, "on_loss": on_loss}
        with ParameterServer(cluster.client, params(), consistency=SSP(2), **choices) as ps:
            futures = ps.run(partial(push_until, str(flag)), workers=2)
            pids = [tmp_path / f"stop-pid-{name}" for name in ("worker-0", "worker-1")]
            eventually(lambda: all(each.exists() and each.read_text() for each in pids), SECONDS)
            eventually(lambda: len(events.of(WorkerJoined)) >= 2, SECONDS)
            for name in ("worker-0", "worker-1"):
                pid = int((tmp_path / f"stop-pid-{name}").read_text())
                # Paused between two pushes, it may join again before the next: nothing is dropped.
                for _ in range(TRIES):
                    before = min(versions(ps))
                    eventually(lambda least=before: min(versions(ps)) > least, SECONDS)  # type: ignore[misc]
                    pause_and_resume(pid, name, events)
                    if (tmp_path / f"stop-dropped-{name}").exists():
                        break
            flag.touch()
            assert min(results(futures)) >= 1
    found = [str(w.message) for w in caught if w.category is UpdatesDroppedWarning]
    assert len(found) == told
    for text in found:
        assert "dps: updates of worker-" in text
        assert "longer than its lease (10 s)" in text
        assert "timings=dps.Timings(patience=600)" in text


def test_what_a_checkpoint_lacks_is_told_with_its_version(tmp_path: Path) -> None:
    recovery = Recovery(Checkpoint(every=10_000, path=str(tmp_path / "checkpoints")))
    with (
        LocalCluster(nodes(servers=1, spares=1), PRELOAD) as cluster,
        ParameterServer(cluster.client, params(), optimizer=COUNTING, recovery=recovery) as ps,
    ):
        results(ps.run(partial(count, 20)))
        ps.checkpoint()
        results(ps.run(partial(count, 7)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kill_head(cluster, ps, 0)
            (loss,) = eventually(lambda: ps.losses, SECONDS)
        (warning,) = (str(w.message) for w in caught if w.category is UpdatesLostWarning)
        assert "lost 7 acknowledged updates" in warning
        assert "restored from its checkpoint at version 20" in warning
        assert (loss.updates, loss.exact, loss.version) == (7, True, 20)
        assert loss.workers == {"worker-1": 7}
        assert counts(ps) == [20]


def test_a_chain_that_goes_on_has_lost_nothing(tmp_path: Path) -> None:
    flag = tmp_path / "stop"
    with (
        LocalCluster(nodes(servers=1, replicas=1), PRELOAD) as cluster,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error", UpdatesLostWarning)
        with ParameterServer(cluster.client, params(), optimizer=COUNTING, recovery="chain") as ps:
            futures = ps.run(partial(tell_losses, str(flag)), workers=2)
            eventually(lambda: min(versions(ps)) >= 50, SECONDS)
            kill_head(cluster, ps, 0)
            flag.touch()
            assert [losses for _, losses in results(futures)] == [[], []]
            assert ps.losses == []


def push_on(flag: str, worker: Worker) -> None:
    """Push until that raises, and say in a file how far this has come."""
    gradients, said = ones(worker.pull()), Path(f"{flag}-{worker.name}")
    worker.push(gradients)
    said.write_text("begun")
    while True:
        try:
            worker.push(gradients)
        except UpdatesLost:
            said.write_text("told")
            with pytest.raises(UpdatesLost):
                worker.pull()
            raise


def test_the_training_ends_with_an_error_if_that_is_wanted(tmp_path: Path) -> None:
    flag = tmp_path / "told"
    with LocalCluster(nodes(spares=1), PRELOAD) as cluster:
        choices: dict[str, Any] = {"optimizer": COUNTING, "on_loss": "raise"}
        with (
            ParameterServer(cluster.client, params(), shards=2, **choices) as ps,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore", UpdatesLostWarning)
            futures = ps.run(partial(push_on, str(flag)), workers=2)
            eventually(lambda: min(versions(ps)) >= 20, SECONDS)
            eventually(lambda: len(list(tmp_path.iterdir())) == 2, SECONDS)
            kill_head(cluster, ps, 0)
            for future in futures:
                with pytest.raises(UpdatesLost, match="shard"):
                    future.result(timeout=SECONDS)
            ended = versions(ps)
            with pytest.raises(UpdatesLost):
                results(ps.run(partial(count, 1)))
            assert versions(ps) == ended
            assert ps.pull().keys() == params().keys()
    assert [file.read_text() for file in tmp_path.iterdir()] == ["told"] * 2


SCRIPT = """
import os, signal, sys, time
import numpy as np
from distributed import Client
from dps import SGD, ParameterServer

def train(worker):
    for _ in range(300):
        worker.push({"w": -np.ones(8)})

if __name__ == "__main__":
    with Client(n_workers=4, threads_per_worker=1, dashboard_address=None) as client:
        with ParameterServer(client, {"w": np.zeros(8)}, shards=2, optimizer=SGD(1.0)) as ps:
            futures = ps.run(train, workers=2)
            while ps.audit()[1].version < 50:
                time.sleep(0.01)
            head = ps.table().views[1].chain[0].address
            os.kill(client.run(os.getpid, workers=[head])[head], signal.SIGKILL)
            client.gather(futures)
            print([ps.audit()[0].version, ps.audit()[1].version + ps.updates_lost])
            logs = [line for lines in client.get_worker_logs().values() for _, line in lines]
            print(sum("dps: of the updates of worker-" in line for line in logs))
            print(sum("dps: shard 1 has lost" in line for _, line in client.get_scheduler_logs()))
"""


def test_a_first_time_user_sees_it_without_asking(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[600, 600]", "2", "1"]
    (warning,) = (line for line in ran.stderr.splitlines() if "UpdatesLostWarning: dps: " in line)
    assert "shard 1 has lost" in warning
    assert "its initial values" in warning


def test_what_is_to_follow_a_loss_is_checked_at_once(plain: Client) -> None:
    with pytest.raises(ConfigurationError, match="on_loss='rise', expected 'warn', 'raise' or"):
        ParameterServer(plain, params(), on_loss="rise")
