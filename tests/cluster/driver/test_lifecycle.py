"""The life of a training function: where it may run, how it ends, and that it runs only once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, wait
from distributed import LocalCluster as DaskCluster

import dps
from dps import BSP, ParameterServer, Worker
from dps.errors import CapacityError, ConfigurationError, GroupClosed, ResultLost
from tests.support.clusters import nannied
from tests.support.training import (
    COUNTING,
    SECONDS,
    count,
    count_until,
    ones,
    params,
    patient_server,
    results,
    versions,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

QUIET: dict[str, Any] = {"dashboard_address": None}


def pids_of(client: Client, ps: ParameterServer, role: str) -> list[int]:
    addresses = [node.address for node in ps.nodes if node.role == role]
    return list(client.run(os.getpid, workers=addresses).values())


@pytest.mark.slow
@pytest.mark.parametrize("role", ["server", "worker"])
def test_a_node_that_comes_back_at_its_old_address_is_a_new_one(role: str) -> None:
    """So it does where nannies are given ports."""
    first = free_port()
    ports = f"{first}:{first + 9}"
    with (
        DaskCluster(2, threads_per_worker=1, worker_port=ports, **QUIET) as cluster,
        Client(cluster) as client,
        patient_server(client, params(), servers=1, optimizer=COUNTING) as ps,
    ):
        (future,) = ps.run(partial(count_slowly, 100))
        eventually(lambda: versions(ps)[0] >= 10, SECONDS)
        for pid in pids_of(client, ps, role):
            os.kill(pid, signal.SIGKILL)
        assert future.result(timeout=SECONDS) == 100
        assert versions(ps)[0] + ps.updates_lost >= 100


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def count_slowly(steps: int, worker: Worker) -> int:
    gradients = ones(worker.pull())
    for _ in range(steps):
        worker.push(gradients)
        time.sleep(0.01)
    return steps


def count_and_return(size: int, worker: Worker) -> Any:
    count(20, worker)
    return np.zeros(size) if size else (20, worker.name, {"losses": [0.5]})


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 1_000_000], ids=["plain", "large"])
def test_finished_work_is_not_done_again_when_its_result_is_lost(size: int) -> None:
    with (
        nannied(3) as client,
        patient_server(client, params(), servers=1, optimizer=COUNTING) as ps,
    ):
        futures = ps.run(partial(count_and_return, size), workers=2)
        wait(futures, timeout=SECONDS)
        for pid in pids_of(client, ps, "worker"):
            os.kill(pid, signal.SIGKILL)
        if size:
            for future in futures:
                with pytest.raises(ResultLost, match=r"the result of worker-\d was lost"):
                    future.result(timeout=SECONDS)
        else:
            assert results(futures) == [(20, f"worker-{i}", {"losses": [0.5]}) for i in range(2)]
        assert versions(ps) == [40]


def end_with(how: type[BaseException], worker: Worker) -> int:
    done = count(3, worker)
    if worker.index == 0:
        raise how("enough")
    return done


def test_a_function_that_exits_fails_its_own_future_alone(plain: Client) -> None:
    choices: dict[str, Any] = {"optimizer": COUNTING, "consistency": BSP()}
    exits = (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
    for how in exits:
        with patient_server(plain, params(), **choices) as ps:
            before = plain.run(os.getpid)
            ending, other = ps.run(partial(end_with, how), workers=2)
            with pytest.raises(RuntimeError, match=r"training function of worker-0 .*enough"):
                ending.result(timeout=SECONDS)
            assert other.result(timeout=SECONDS) == 3
            assert versions(ps) == [6]
            assert plain.run(os.getpid) == before


def fail_at_first(flag: str, worker: Worker) -> int:
    if not Path(flag).exists():
        Path(flag).touch()
        raise ValueError("at first")
    return count(2, worker)


def test_a_worker_that_is_retried_is_shown_as_it_is_then_and_told_of_the_end(
    plain: Client, tmp_path: Path
) -> None:
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        (future,) = ps.run(partial(fail_at_first, str(tmp_path / "failed")))
        assert isinstance(future.exception(timeout=SECONDS), ValueError)
        assert [worker.status for worker in ps.workers] == ["failed"]
        future.retry()
        assert future.result(timeout=SECONDS) == 2
        assert [worker.status for worker in ps.workers] == ["finished"]
        (late,) = ps.run(partial(fail_at_first, str(tmp_path / "failed too")))
        wait([late], timeout=SECONDS)
    late.retry()
    with pytest.raises(GroupClosed, match=f"parameter server {ps.name} is closed"):
        late.result(timeout=SECONDS)


async def train_later(worker: Worker) -> None:
    worker.push(ones(worker.pull()))


def train_by_steps(worker: Worker) -> Iterator[None]:
    yield worker.push(ones(worker.pull()))


class Trainer:
    async def __call__(self, worker: Worker) -> None:
        worker.push(ones(worker.pull()))


def without_worker() -> None:
    pass


def test_what_would_never_train_is_refused_at_once(plain: Client) -> None:
    unawaited = "is async or a generator"
    with patient_server(plain, params()) as ps:
        for train, why in (
            (partial(train_later), unawaited),
            (Trainer(), unawaited),
            (train_by_steps, unawaited),
            (without_worker, r"does not accept the call function\(worker\): too many"),
            (3, "train=3, expected a function"),
        ):
            with pytest.raises(ConfigurationError, match=why):
                ps.run(train)  # type: ignore[arg-type]
        assert ps.workers == ()
        with pytest.raises(ConfigurationError, match=r"^functions\['f'\]=.*async"):
            patient_server(plain, params(), functions={"f": train_later})
        with pytest.raises(ConfigurationError, match=r"^on_event=.* async"):
            patient_server(plain, params(), on_event=train_later)  # type: ignore[arg-type]


def test_a_function_that_holds_what_stays_here_is_one_clear_error(
    plain: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def holding(held: Any) -> Any:
        return lambda worker: held.pull()

    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        trains = [*map(holding, (ps, plain, threading.Lock())), partial(isinstance, ps)]
        for train in trains:
            with (
                caplog.at_level(logging.ERROR),
                pytest.raises(ConfigurationError, match="Use the worker that your function rec"),
            ):
                ps.run(train)
            assert caplog.records == []
        assert results(ps.run(partial(count, 2))) == [2]
        refused = "cannot be sent to a node: .*refers to an object of this process"
        with pytest.raises(ConfigurationError, match=f"score {refused}"):
            ps.evaluate(lambda weights: (ps.pull(), 0.0))  # type: ignore[arg-type, return-value]
        with pytest.raises(ConfigurationError, match=f"functions= .*{refused}"):
            ParameterServer(plain, params(), functions={"f": lambda parts: plain.id})
    assert "Failed to serialize" not in caplog.text


def test_a_run_that_finds_no_free_thread_says_what_holds_them(
    plain: Client, tmp_path: Path
) -> None:
    flag = tmp_path / "go on"
    with patient_server(plain, params(), servers=2, shards=2, optimizer=COUNTING) as first:
        futures = first.run(partial(count_until, str(flag)), workers=2)
        eventually(lambda: min(versions(first)) > 0, SECONDS)
        held = "have 2 threads, of which 0 are free: worker-0, worker-1 of"
        with pytest.raises(CapacityError, match=f"{held} this parameter server run there"):
            first.run(partial(count, 1))
        with (
            patient_server(plain, params(), servers=2, shards=2) as second,
            pytest.raises(CapacityError, match=f"{held} parameter server {first.name} run there"),
        ):
            second.run(partial(count, 1))
        flag.touch()
        results(futures)
        assert results(first.run(partial(count, 1), workers=2)) == [1, 1]


def test_workers_that_are_ended_on_purpose_leave_no_tracebacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nannied(3) as client:
        for stopped in (True, False):
            with patient_server(client, params(), servers=1, optimizer=COUNTING) as ps:
                futures = ps.run(partial(count_until, str(tmp_path / "never")), workers=2)
                eventually(lambda each=ps: versions(each)[0] > 5, SECONDS)  # type: ignore[misc]
                if stopped:
                    ps.stop()
                    wait(futures, timeout=SECONDS)
            wait(futures, timeout=SECONDS)
        logs = [line for lines in client.get_worker_logs().values() for _, line in lines]
        assert not any("Traceback" in line for line in logs)
        ended = [line for line in logs if "dps-worker-" in line]
        assert len(ended) <= 4, "one line of each worker"
    assert "No handler" not in caplog.text  # of the scheduler, which is in this process


SCRIPT = """
import sys
import threading
import time

import numpy as np
from distributed import Client
from dps import SGD, ParameterServer

def train(worker):
    while True:
        worker.push({"w": -np.ones(8)})

def tell(main):
    while sys._current_frames()[main].f_code.co_name != "wait":
        time.sleep(0.01)
    print("waiting", flush=True)

if __name__ == "__main__":
    with Client(n_workers=4, threads_per_worker=1, dashboard_address=None) as client:
        with ParameterServer(client, {"w": np.zeros(8)}, servers=1, optimizer=SGD(1.0)) as ps:
            futures = ps.run(train, workers=3)
            while ps.audit()[0].version < 20:
                pass
            threading.Thread(target=tell, args=[threading.get_ident()], daemon=True).start()
            ps.progress()
"""


@pytest.mark.slow
def test_ctrl_c_prints_the_traceback_of_the_program_alone(tmp_path: Path) -> None:
    """It reaches every process of the terminal, and so each of the nodes."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    ) as program:
        assert program.stdout is not None
        # While it imports something, an interrupt may end in a callback of the garbage collector.
        assert program.stdout.readline() == "waiting\n"
        os.killpg(program.pid, signal.SIGINT)
        _, said = program.communicate(timeout=SECONDS)
    # Dask's workers may report, in its own frames alone, that the scheduler left before they did.
    ours = (str(script), str(Path(dps.__file__).parent))
    tracebacks = said.split("Traceback (most recent call last)")[1:]
    assert len([one for one in tracebacks if any(path in one for path in ours)]) == 1, said
    assert said.rstrip().endswith("KeyboardInterrupt")
