"""`dps top`: pictures of records as they grow, of a real group, and of a real experiment."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps import Chain, Recovery
from dps.cluster.backends.existing import connected
from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.tls import temporary
from dps.errors import ConfigurationError
from dps.events import (
    Applied,
    Detected,
    Event,
    LossReported,
    Moved,
    Promoted,
    ReplicaAdded,
    Reported,
    Restored,
    WorkerJoined,
    WorkerLeft,
)
from dps.observe.views import Listing, ShardView, TrainingView
from flows.cli.top import _drawn
from flows.monitor.top import Ended, Rates, SchedulerSource, TrialSource, look_twice, source_of
from flows.records.events import TrialEnded
from flows.records.owner import at_work
from flows.records.record import (
    EVENTS_FILE,
    GRID_FILE,
    EventWriter,
    RecordDamaged,
    RecordReader,
    read_record,
)
from tests.observe.test_progress import HALF
from tests.support import commands
from tests.support.synthetic import toy_events, write_events
from tests.support.tls import files_of
from tests.support.training import (
    COUNTING,
    PRELOAD,
    SECONDS,
    count_until,
    nodes,
    params,
    patient_server,
    versions,
)
from tests.support.waiting import eventually

START_SECONDS = 4 * SECONDS  # until an experiment trains, on a machine that is busy


def in_order(events: Sequence[Event]) -> list[Event]:
    started, *rest, ended = events
    return [started, *sorted(rest, key=lambda event: event.t), ended]


def dps(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return commands.dps(here, "top", *words, COLUMNS="120")


WITHOUT_DPS = """
import asyncio, sys
from distributed import Scheduler
sys.modules["dps"] = None

async def main():
    async with Scheduler(host="127.0.0.1", port=0, dashboard_address=":0") as scheduler:
        print(scheduler.address, flush=True)
        await scheduler.finished()

asyncio.run(main())
"""


# -- records ---------------------------------------------------------------------------------------


def test_a_record_is_read_on_from_where_it_was_read_to(tmp_path: Path) -> None:
    path = tmp_path / EVENTS_FILE
    events = in_order(toy_events())
    reader = RecordReader(path)
    with EventWriter(path) as write:
        for event in events[:10]:
            write(event)
        assert reader.read() == (tuple(events[:10]), True)
        assert reader.read() == ((), False)
        for event in events[10:]:
            write(event)
        found, anew = reader.read()
        assert not anew
        assert found == read_record(path).events[10:]
    half = path.read_bytes()[:-5]
    path.write_bytes(half)
    assert reader.read() == (read_record(path).events, True), "it is shorter than it was"
    with path.open("ab") as file:
        file.write(b"nonsense\n")
    damaged = half.count(b"\n") + 1
    with pytest.raises(RecordDamaged, match=rf"line {damaged} "):
        reader.read()


def test_a_picture_of_a_trial_says_what_its_record_says(tmp_path: Path) -> None:
    events = in_order(toy_events("none"))
    path = tmp_path / "none.kill.seed-0" / EVENTS_FILE
    source = TrialSource(path)
    with EventWriter(path) as write:
        write(events[0])
        [picture] = source.look()
        assert picture.state == "running"
        assert (picture.total, picture.shards) == (800, ())
        for event in events[1:-1]:
            write(event)
        loss = LossReported(events[-1].t, 0, 2, 317, True, "initial", 0)
        write(loss)
        [picture] = source.look()
    last: dict[int, Applied] = {
        event.shard: event for event in events if isinstance(event, Applied) and event.head
    }
    assert {shard.shard: (shard.node, shard.version) for shard in picture.shards} == {
        shard: (event.node, event.versions[-1]) for shard, event in last.items()
    }
    assert picture.done == min(event.versions[-1] for event in last.values())
    assert all(shard.rate and shard.rate > 0 for shard in picture.shards)
    assert all(shard.staleness is not None for shard in picture.shards)
    assert [worker.worker for worker in picture.workers] == ["worker-0", "worker-1"]
    assert picture.lost == 317
    said = [text for _, text in picture.recent]
    assert any(line.startswith("server-0 killed after ") for line in said)
    assert any("from its initial values" in line for line in said)
    write_events(path.parent, [*events[:-1], TrialEnded(events[-1].t, "valid", "")])
    [picture] = source.look()
    assert (picture.state, picture.lost) == ("valid", 0), "another record has taken its place"


def applied(
    t: float, node: str, shard: int, epoch: int, head: bool, *rows: tuple[str, int, int]
) -> Applied:
    """Updates of a worker, each with its number, and the version that it makes."""
    workers, seqs, made = zip(*rows, strict=True)
    n = len(rows)
    each = ((t,) * n, workers, (1,) * n, seqs, made, (0,) * n, (0.0,) * n, (False,) * n)
    return Applied(t, node, shard, epoch, head, *each)


def pictured(folder: Path, *events: Event) -> TrainingView:
    """The picture of a record that does not end yet."""
    started, *_ = toy_events("chain")
    path = write_events(folder / "trial", [replace(started, t=0.0), *events])
    [picture] = TrialSource(path).look()
    return picture


def test_a_shard_is_shown_where_it_is_served(tmp_path: Path) -> None:
    events: list[Event] = [
        Restored(1.0, 0, 1, "server-0", 0, "initial"),
        ReplicaAdded(1.1, 0, 1, "server-1", 0),
        applied(1.2, "server-0", 0, 1, True, ("worker-0", 1, 1), ("worker-0", 2, 2)),
        applied(1.3, "server-1", 0, 1, False, ("worker-0", 1, 1)),
        Moved(2.0, 0, 2, "server-0", "spare-0", 8, 0.1, 0.01),
        Detected(3.0, 0, 3, "spare-0", True, "lease"),
        Promoted(3.1, 0, 3, "server-1", 1),
        Detected(4.0, 0, 4, "server-1", False, "scheduler"),
    ]
    shown_after = {
        3: ("server-0", 2, 1, ("server-0", "server-1")),
        4: ("server-0", 2, 1, ("server-0", "server-1")),
        5: ("spare-0", 2, 2, ("spare-0", "server-1")),
        6: ("", 2, 3, ("server-1",)),
        7: ("server-1", 1, 3, ("server-1",)),
        8: ("", 1, 4, ()),
    }
    for count, expected in shown_after.items():
        (row,) = pictured(tmp_path / str(count), *events[:count]).shards
        assert (row.node, row.version, row.epoch, row.replicas) == expected


def test_a_worker_is_shown_with_what_it_has_done_by_itself(tmp_path: Path) -> None:
    events: list[Event] = [
        WorkerJoined(1.0, "worker-0", 1, "node-0"),
        applied(2.0, "server-0", 0, 1, True, ("worker-0", 2, 1), ("worker-0", 1, 2)),
        # Calls have numbers of their own, and no clock goes by them.
        applied(2.5, "server-0", 0, 1, True, ("worker-0", 4, 3), ("worker-0/calls", 40, 4)),
        applied(2.5, "server-1", 1, 1, True, ("worker-0", 3, 1)),
        Reported(2.6, "worker-0", 1, "loss", (2.1, 2.2), (1, 2), (0.9, 0.5)),
    ]
    (row,) = pictured(tmp_path / "first", *events).workers
    assert (row.node, row.status, row.clock, row.updates) == ("node-0", "running", 4, 3)
    assert row.loss == 0.5
    events += [
        WorkerLeft(3.0, "worker-0", 1, "lost"),
        WorkerJoined(4.0, "worker-0", 2, "node-1"),
        applied(5.0, "server-0", 0, 1, True, ("worker-0", 1, 5)),
    ]
    (row,) = pictured(tmp_path / "again", *events).workers
    assert (row.node, row.status, row.clock, row.updates) == ("node-1", "running", 1, 4)
    assert row.rate == pytest.approx(1.0), "of this time alone"


def test_folders_and_names_are_found(tmp_path: Path) -> None:
    path = write_events(tmp_path / "results" / "demo" / "chain.kill.seed-0", toy_events())
    for target in ("demo/chain.kill.seed-0", str(path.parent)):
        assert [each.state for each in source_of(target, tmp_path).look()] == ["valid"]
    with pytest.raises(ConfigurationError, match=r"demo: .* it does not run"):
        source_of("demo", tmp_path)
    with pytest.raises(ConfigurationError, match=r"no experiment 'dmo'.*did you mean 'demo'"):
        source_of("dmo", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "no experiment is running"),
        (["tcp://127.0.0.1:1"], "no Dask scheduler answers at tcp://127.0.0.1:1"),
        (["tls://127.0.0.1:1"], "--tls-ca-file FILE"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    refused = dps(tmp_path, *words, "--once")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert told in refused.stderr
    assert "Traceback" not in refused.stderr


# -- a group ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(nodes(replicas=1), PRELOAD) as cluster:
        yield cluster


@pytest.mark.cluster
def test_a_group_is_shown_from_its_scheduler_alone(cluster: LocalCluster, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    chain = Recovery(Chain(2))
    with patient_server(
        cluster.client, params(), shards=2, optimizer=COUNTING, recovery=chain
    ) as ps:
        futures = ps.run(partial(count_until, str(flag)), workers=2)
        source = SchedulerSource(cluster.client)

        def trains() -> TrainingView | None:
            [picture] = look_twice(source)
            rates = [s.rate for s in picture.shards] + [w.rate for w in picture.workers]
            return picture if len(picture.workers) == 2 and all(rates) else None

        picture = eventually(trains, SECONDS)
        assert picture is not None
        assert picture.name == ps.name
        assert [len(shard.replicas) for shard in picture.shards] == [2, 2]
        assert {worker.node for worker in picture.workers} == {"worker-0", "worker-1"}
        assert all(worker.clock for worker in picture.workers)
        before = picture.done or 0
        assert before
        cluster.kill(picture.shards[0].node)

        def told() -> TrainingView | None:
            [picture] = source.look()
            assert picture.done, "a shard that does not answer still has what it was known to"
            said = [text for _, text in picture.recent]
            over = any("took over after" in line for line in said)
            return picture if over and picture.done > before else None

        after = eventually(told, SECONDS)
        assert after is not None
        assert after.shards[0].epoch > picture.shards[0].epoch
        assert after.shards[0].node == picture.shards[0].replicas[1]
        flag.touch()
        for future in futures:
            future.result(timeout=SECONDS)
        [end] = source.look()
        assert [shard.version for shard in end.shards] == versions(ps)
        assert {worker.status for worker in end.workers} == {"ended"}
    assert source.look() == []


@pytest.mark.cluster
def test_the_command_looks_at_a_scheduler_with_certificates(tmp_path: Path) -> None:
    made = temporary()
    files = files_of(made, tmp_path / "tls")
    words = [f"--tls-{name.replace('_', '-')}={path}" for name, path in files.items()]
    with (
        LocalCluster(nodes(), PRELOAD, security=made) as cluster,
        patient_server(cluster.client, params(), shards=2) as ps,
    ):
        found = dps(tmp_path, cluster.address, *words, "--json")
        assert found.returncode == 0, found.stderr
        [picture] = json.loads(found.stdout)
        assert picture["name"] == ps.name
        assert [shard["version"] for shard in picture["shards"]] == [0, 0]
        once = dps(tmp_path, cluster.address, *words, "--once")
        assert f"{ps.name}: running  (" in once.stdout


@pytest.mark.slow
@pytest.mark.cluster
def test_the_end_of_a_scheduler_is_told() -> None:
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(nodes(servers=1, workers=1), PRELOAD))
        client = stack.enter_context(connected(cluster.address, cluster.security))
        source = SchedulerSource(client)
        assert source.look() == []
        cluster.close()
        with pytest.raises(Ended, match=f"{cluster.address} is gone"):
            source.look()


@pytest.mark.cluster
def test_a_scheduler_without_dps_is_told(tmp_path: Path) -> None:
    script = tmp_path / "scheduler.py"
    script.write_text(WITHOUT_DPS)
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scheduler:
        try:
            assert scheduler.stdout is not None
            address = scheduler.stdout.readline().strip()
            refused = dps(tmp_path, address, "--once")
        finally:
            scheduler.kill()
    assert (refused.returncode, refused.stdout) == (2, "")
    assert f"dps: the Dask scheduler at {address} has no dps" in refused.stderr
    assert "Traceback" not in refused.stderr


# -- an experiment ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.cluster
def test_a_running_experiment_is_shown_by_its_name(tmp_path: Path) -> None:
    config: dict[str, Any] = {
        "experiment": "small",
        "workload": {"kind": "softmax"},
        "dataset": {"kind": "digits"},
        "training": {"updates": 100_000, "compute_seconds": 0.02},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "recovery": "chain",
        "time_limit": 300,
    }
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(config))
    folder = tmp_path / "results" / "small"
    command = [sys.executable, "-m", "flows.cli", "run", "small.yaml"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        try:

            def trains() -> bool:
                if run.poll() is not None or at_work(folder) is None:
                    return False
                return any(picture.done for picture in source_of("small", tmp_path).look())

            eventually(lambda: (folder / GRID_FILE).exists(), START_SECONDS)
            eventually(trains, START_SECONDS)
            [picture] = json.loads(dps(tmp_path, "--json").stdout)
            assert picture["name"] == "small/seed-0"
            assert picture["total"] == 100_000
            assert [shard["node"] for shard in picture["shards"]] == ["server-0", "server-1"]
            assert all(shard["rate"] > 0 for shard in picture["shards"])
            assert all(worker["reported"]["loss"] > 0 for worker in picture["workers"])
            assert "small/seed-0: running" in dps(tmp_path, "small", "--once").stdout
            told = commands.dps(tmp_path, "status").stdout
            assert f"1 trial: 1 running, by process {run.pid} on" in told
            assert "/100000" in told
        finally:
            run.send_signal(signal.SIGINT)
            run.wait(SECONDS)
    assert dps(tmp_path, "small", "--once").returncode == 2
    after = commands.dps(tmp_path, "status").stdout
    assert "small: 1 trial: 1 interrupted; it does not run" in after
    assert "1 missing or failed: dps run small.yaml\n" in after


def test_views_get_rates_from_the_second_on_and_keep_what_is_known() -> None:
    def view(t: float, version: int | None, epoch: int = 1) -> TrainingView:
        shards = Listing([ShardView(0, "a" if version else "", (), version, epoch)])
        return replace(HALF, t=t, done=None, shards=shards)

    rates = Rates()
    first = rates.added_to(view(1.0, 100))
    assert (first.done, first.shards[0].rate, first.workers[0].rate) == (100, None, None)
    second = rates.added_to(view(2.0, 150))
    assert (second.shards[0].rate, second.workers[0].rate) == (50.0, 0.0)
    down = rates.added_to(view(3.0, None, 2))
    assert (down.done, down.shards[0].version) == (150, 150)
    assert down.remarks() == ["loss 0.25", "shard 0 is down"]


def test_a_terminal_shows_shards_workers_and_what_happened() -> None:
    from rich.console import Console

    shards = Listing([ShardView(0, "server-0", ("server-0",), 500, 1)])
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(_drawn(replace(HALF, shards=shards, recent=((0.0, "server-1 killed"),))))
    text = console.export_text()
    for part in ("t: running", "500 of 1,000", "server-0", "worker-3", "server-1 killed"):
        assert part in text
