"""What is told of acknowledged updates that are lost, by default and with `on_loss="raise"`."""

from __future__ import annotations

import os
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dps import Checkpoint, Loss, ParameterServer, Recovery, UpdatesLost, UpdatesLostWarning, Worker
from dps.cluster.backends.local import LocalCluster
from dps.events import LossReported
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


def test_a_loss_is_a_warning_a_record_and_known_to_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert caplog.text.count(text) == 1


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
