"""What the user of a parameter server is told: in their own thread, in their cell, at the end."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from distributed import Client

from dps import (
    Checkpoint,
    CopiesMissingWarning,
    LastStateNotSavedWarning,
    ParameterServer,
    Recovery,
    UpdatesLostWarning,
    Worker,
)
from dps.cluster.backends.local import LocalCluster
from dps.errors import GroupClosed
from dps.events import Event
from tests.cluster.driver.test_losses import kill_head
from tests.support.training import (
    COUNTING,
    PATIENT,
    PRELOAD,
    SECONDS,
    count,
    count_until,
    nodes,
    ones,
    params,
    patient_server,
    results,
    versions,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster


def test_a_failover_is_shown_wherever_a_user_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    flag = tmp_path / "stop"
    with (
        LocalCluster(nodes(servers=1, replicas=1), PRELOAD) as cluster,
        ParameterServer(cluster.client, params(), optimizer=COUNTING, recovery="chain") as ps,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        futures = ps.run(partial(count_until, str(flag)), workers=2)
        eventually(lambda: min(versions(ps)) >= 20, SECONDS)
        eventually(lambda: ps.shards[0].replicas[1:], SECONDS)
        lost, other = ps.shards[0].replicas
        kill_head(cluster, ps, 0)
        (failover,) = eventually(lambda: ps.failovers, SECONDS)
        assert (failover.lost, failover.node, failover.took_over) == (lost, other, True)
        assert (failover.copies, failover.wanted, failover.updates_lost) == (1, 2, 0)
        missing = CopiesMissingWarning
        eventually(lambda: ps.failovers and any(w.category is missing for w in caught), SECONDS)
        assert "1 of 2" in repr(ps.shards)
        for shown in (repr(ps), ps._repr_html_()):
            assert "failovers: 1, see ps.failovers" in shown
            assert "shard 0 has 1 of 2 copies" in shown
        flag.touch()
        ps.progress()
        said = capsys.readouterr().out
        assert str(failover) in said
        assert "shard 0 has 1 of 2 copies" in said
        results(futures)
        assert ps.losses == []
    assert not any(w.category is UpdatesLostWarning for w in caught)


def test_warnings_are_issued_in_the_thread_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the user asks for losses, or closes only."""
    found: list[tuple[threading.Thread, str]] = []

    def show(message: Any, category: Any, filename: str, *_: Any) -> None:
        found.append((threading.current_thread(), filename))

    monkeypatch.setattr(warnings, "showwarning", show)
    with (
        LocalCluster(nodes(servers=1, spares=2), PRELOAD) as cluster,
        warnings.catch_warnings(),
        ParameterServer(cluster.client, params(), optimizer=COUNTING) as ps,
    ):
        warnings.simplefilter("always", UpdatesLostWarning)
        results(ps.run(partial(count, 5)))
        kill_head(cluster, ps, 0)
        eventually(lambda: ps.losses, SECONDS)
        asked = len(found)
        assert asked
        results(ps.run(partial(count, 5)))
        kill_head(cluster, ps, 0)
        eventually(lambda: len(ps._driver.incidents.losses) == 2, SECONDS)
    assert len(found) > asked
    assert {thread for thread, _ in found} == {threading.main_thread()}
    assert {Path(file).parent for _, file in found} == {Path(__file__).parent}, "not inside dps"


CELLS = [
    """
import os, signal, time
import numpy as np
from distributed import Client
from dps import SGD, ParameterServer
client = Client(n_workers=4, threads_per_worker=1, dashboard_address=None)
ps = ParameterServer(client, {"w": np.zeros(8)}, servers=1, optimizer=SGD(1.0))
""",
    """
def train(worker):
    for _ in range(300):
        worker.push({"w": -np.ones(8)})
        time.sleep(0.01)

futures = ps.run(train, workers=2)
while ps.audit()[0].version < 50:
    time.sleep(0.05)
""",
    """
head = ps.table().views[0].chain[0].address
os.kill(client.run(os.getpid, workers=[head])[head], signal.SIGKILL)
client.gather(futures)
""",
    "client.close()",
    "ps.close()\nps",
]


@pytest.mark.slow
def test_so_does_a_real_one() -> None:
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    texts = ["".join(o.get("text", "") for o in cell.outputs) for cell in notebook.cells]
    assert [text.count("UpdatesLostWarning: dps: ") for text in texts] == [0, 0, 1, 0, 0]
    assert "closed" in str(notebook.cells[-1].outputs)


def fail_on(kind: str, seen: list[str], event: Event) -> None:
    seen.append(type(event).__name__)
    if seen[-1] == kind:
        raise ZeroDivisionError("in on_event")


def test_a_sink_that_raises_is_one_traceback_and_a_count(
    plain: Client, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    sink = partial(fail_on, "WorkerJoined", seen)
    with (
        caplog.at_level(logging.WARNING, "distributed.client"),
        warnings.catch_warnings(record=True) as caught,
        patient_server(plain, params(), optimizer=COUNTING, on_event=sink) as ps,
    ):
        warnings.simplefilter("always")
        for _ in range(12):
            results(ps.run(partial(count, 1)))
    assert seen.count("WorkerJoined") == 12
    assert "WorkerLeft" in seen
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    kind = "on_event failed on WorkerJoined: ZeroDivisionError"
    assert caplog.text.count(f"{kind}, 10 times so far") == 1
    assert [str(w.message) for w in caught if kind in str(w.message)] == [
        f"dps: {kind}: in on_event"
    ]


def exits(event: object) -> None:
    raise SystemExit


def test_a_sink_cannot_end_the_event_loop(plain: Client) -> None:
    with (
        pytest.warns(RuntimeWarning, match="on_event failed on WorkerJoined: SystemExit"),
        patient_server(plain, params(), optimizer=COUNTING, on_event=exits) as ps,
    ):
        assert results(ps.run(partial(count, 1))) == [1]


def report_once(worker: Worker) -> None:
    worker.push(ones(worker.pull()))
    worker.report(loss=0.5)


def test_everything_can_be_looked_at_when_the_client_is_closed(tmp_path: Path) -> None:
    recovery = Recovery(Checkpoint(every=1000, path=str(tmp_path)))
    with Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        choices: dict[str, Any] = {"recovery": recovery, "timings": PATIENT}
        ps = ParameterServer(client, params(), optimizer=COUNTING, **choices)
        results(ps.run(report_once))
        assert len(ps.history()) == 1
    check_closed_client(ps)
    with pytest.warns(LastStateNotSavedWarning, match="the Dask client was closed before it"):
        ps.close()
    assert ps.closed
    check_views(ps)


def check_closed_client(ps: ParameterServer) -> None:
    check_views(ps)
    for act in (ps.pull, ps.stop, ps.table, ps.progress, partial(ps.run, report_once)):
        with pytest.raises(GroupClosed, match="the Dask client of this parameter server is closed"):
            act()


def check_views(ps: ParameterServer) -> None:
    assert ps.name in repr(ps)
    assert ps.name in ps._repr_html_()
    assert [worker.status for worker in ps.workers] == ["finished"]
    assert len(ps.shards) == 1
    assert (ps.losses, ps.failovers, ps.updates_lost) == ([], [], 0)
    assert ps.history()["value"].tolist() == [0.5]


PROGRAM = """
import os, sys
import numpy as np
from distributed import Client
from dps import Checkpoint, ParameterServer, Recovery

def train(worker):
    for _ in range(100):
        worker.push({"w": -np.ones(8)})

def trained(client, path):
    recovery = Recovery(Checkpoint(every=1000, path=path))
    ps = ParameterServer(client, {"w": np.zeros(8)}, servers=1, recovery=recovery)
    client.gather(ps.run(train))
    return ps

if __name__ == "__main__":
    client = Client(n_workers=3, threads_per_worker=1, dashboard_address=None)
    saved = trained(client, os.path.join(sys.argv[1], "saved"))
    saved.checkpoint()
    left = trained(client, os.path.join(sys.argv[1], "left"))
    print(left.name)
"""


def test_a_program_that_ends_without_closing_says_what_it_loses(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert ran.returncode == 0, ran.stderr
    (line,) = [line for line in ran.stderr.splitlines() if "LastStateNotSavedWarning" in line]
    assert ran.stdout.strip() in line
    assert re.search(r"was not closed: updates since the last checkpoint \(Checkpoint\(", line)
