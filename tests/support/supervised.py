"""A supervised program that counts, for tests that kill its driver and its scheduler.

Each worker notes what it was told is durable in a file, byte by byte, so that nothing of it is lost
with any process: as many bytes as acknowledged updates of an incarnation of the program.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from distributed import Client

from dps import Checkpoint, ParameterServer, Recovery, Session, Worker
from dps.cluster.backends.base import Cluster
from dps.cluster.backends.existing import ExistingCluster
from dps.cluster.backends.local import LocalCluster
from tests.support.training import COUNTING, PRELOAD, SECONDS, audited, counts, nodes, ones, params

EVERY = 20
SHARDS = 2
WORKERS = 2
NOBODY = "tcp://127.0.0.1:1"  # a port that nobody listens on


@dataclass(frozen=True)
class Outcome:
    """What a program that has ended says: each shard's count, and what its audit says."""

    counts: list[int]
    versions: list[int]
    applied: list[dict[str, int]]
    returns: int


def train(folder: Path, returns: int, steps: int, worker: Worker) -> int:
    """Push until this worker has `steps` updates, and note each that was acknowledged."""
    gradients = ones(worker.pull())
    with acked_file(folder, returns, worker.name).open("ab", buffering=0) as file:
        for _ in range(worker.done, steps):
            worker.push(gradients)
            file.write(b".")
    return worker.done


def acked_file(folder: Path, returns: int, worker: str) -> Path:
    """Where a worker of an incarnation notes its acknowledged updates."""
    return folder / f"acked-{returns}-{worker}"


def acked(folder: Path, returns: int) -> list[int]:
    """How many updates of each worker were acknowledged in an incarnation of the program."""
    files = [acked_file(folder, returns, f"worker-{number}") for number in range(WORKERS)]
    return [file.stat().st_size if file.exists() else 0 for file in files]


def program(folder: Path, scope: str, steps: int, session: Session) -> Outcome:
    """Train on a local cluster, and say what has become of it."""
    with LocalCluster(nodes(), PRELOAD) as cluster:
        return trained(cluster, folder, scope, steps, session)


def killed_as_it_returns(folder: Path, steps: int, session: Session) -> Outcome:
    """Train, but for the first return, in which the driver dies before anything is up."""
    if session.returns == 1:
        killing(session)
    return program(folder, "shard", steps, session)


def program_there(folder: Path, address: str, steps: int, session: Session) -> Outcome:
    """Train on a Dask deployment, whose processes outlive this one."""
    with ExistingCluster(address, nodes(), patience=SECONDS) as cluster:
        return trained(cluster, folder, "shard", steps, session)


def trained(cluster: Cluster, folder: Path, scope: str, steps: int, session: Session) -> Outcome:
    """Train on a cluster from wherever the session is."""
    recovery = Recovery(Checkpoint(every=EVERY, path=str(folder / "checkpoints"), scope=scope))  # type: ignore[arg-type]
    choices = {"optimizer": COUNTING, "recovery": recovery, "seats": cluster.seats}
    with session.parameter_server(cluster.client, params(), shards=SHARDS, **choices) as ps:
        note(folder, session, cluster, ps)
        for future in ps.run(partial(train, folder, session.returns, steps), workers=WORKERS):
            future.result()
        replies = audited(ps)
        return Outcome(
            counts(ps),
            [reply.version for reply in replies],
            [dict(reply.applied) for reply in replies],
            session.returns,
        )


@dataclass(frozen=True)
class Beginning:
    """What an incarnation of a program begins with, and the processes to kill."""

    driver: int
    scheduler: int
    versions: list[int]
    of_workers: list[int]


def note(folder: Path, session: Session, cluster: Cluster, ps: ParameterServer) -> None:
    """Write down how an incarnation of the program begins."""
    states = ps.saved.states if ps.saved else ()
    done = ps.saved.applied if ps.saved else {}
    pids = os.getpid(), cluster.pids.get("scheduler", 0)
    of_workers = [done.get(f"worker-{number}", 0) for number in range(WORKERS)]
    beginning = Beginning(*pids, [state.version for state in states] or [0] * SHARDS, of_workers)
    scratch = folder / "beginning.tmp"
    scratch.write_text(json.dumps(asdict(beginning)))
    scratch.rename(beginning_file(folder, session.returns))


def beginning_file(folder: Path, returns: int) -> Path:
    """Where an incarnation writes down how it begins."""
    return folder / f"beginning-{returns}.json"


def beginning(folder: Path, returns: int) -> Beginning:
    """How an incarnation began."""
    return Beginning(**json.loads(beginning_file(folder, returns).read_text()))


def killing(session: Session) -> None:
    """End this process as the system would."""
    os.kill(os.getpid(), signal.SIGKILL)


def failing(session: Session) -> None:
    """Fail as any program may."""
    raise ValueError(f"no luck in start {session.returns}")


def exiting(session: Session) -> None:
    """Exit without a word."""
    os._exit(3)


def returning(session: Session) -> object:
    """Return what cannot be sent."""
    return (each for each in range(session.returns))


def waiting(flag: Path, session: Session) -> None:
    """Wait for ever, and note when it is interrupted."""
    try:
        flag.with_suffix(".began").touch()
        for _ in itertools.count():
            time.sleep(0.1)
    finally:
        flag.touch()


def recovering(recovery: Recovery, session: Session) -> None:
    """Ask for a recovery that could not be gone on from."""
    with LocalCluster([], security="off", notify=lambda text: None) as cluster:
        session.parameter_server(cluster.client, params(), recovery=recovery)


def left_open(folder: Path, session: Session) -> int:
    """Leave a parameter server open when its cluster is closed."""
    recovery = Recovery(Checkpoint(path=str(folder)))
    with LocalCluster(nodes(), PRELOAD) as cluster:
        session.parameter_server(cluster.client, params(), recovery=recovery)
    return session.returns


def scheduler_lost_at_first(folder: Path, session: Session) -> str:
    """Have the scheduler die before there is a parameter server; return what that was taken for."""
    recovery = Recovery(Checkpoint(path=str(folder)))
    with LocalCluster(nodes(), PRELOAD) as cluster:
        if session.returns == 0:
            os.kill(cluster.pids["scheduler"], signal.SIGKILL)
        with session.parameter_server(cluster.client, params(), recovery=recovery):
            return session.cause


def no_cluster_at_first(session: Session) -> str:
    """Be killed, then find no cluster, and return what that was taken for."""
    if session.returns == 0:
        killing(session)
    if session.returns == 1:
        Client(NOBODY, timeout=0.2)
    return session.cause


def killed_at_first(folder: Path, session: Session) -> int:
    """Be killed before there is a parameter server; return how often that was."""
    if session.returns == 0:
        killing(session)
    return left_open(folder, session)


def opening_a_file(path: Path, session: Session) -> None:
    """Be killed, then open a file."""
    if session.returns == 0:
        killing(session)
    path.open()
