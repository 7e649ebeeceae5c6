"""The measurement of time costs on a cluster, and the profile that `dps calibrate` writes.

Nodes of the cluster that a configuration names, or of this machine, push and pull arrays of several
sizes; the same calls on virtual time must then take the same time. A ping over TCP measures the
latency of a link, and a step of SGD the update; the rest of a call is assigned to the loop and the
port.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, stdev
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec, resource_of
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD
from dps.errors import DeadlineExceeded
from dps.events import Detected, Event, Killed, NodeJoined, ReplicaAdded
from dps.faults.acts import Striker
from dps.virtual.client import VirtualClient
from dps.virtual.profile import Disk, Gradient, Link, Profile, Service
from flows.config.trials import Trial
from flows.config.workload import workload_of

if TYPE_CHECKING:
    from dps.cluster.backends.base import Cluster

PRELOAD = ("dps.cluster.driver.parameter_server", __name__)
NODES = tuple(NodeSpec(name, resource_of(name)) for name in ("server-0", "replica-0-1", "worker-0"))
MEBIBYTE = 1 << 20
# Sizes of the arrays, and how often each is sent. Experiments have models of these sizes.
CALLS = {1024: 200, MEBIBYTE >> 2: 100, 4 * MEBIBYTE: 30, 32 * MEBIBYTE: 8}
SMALLEST = min(CALLS)
PAUSE = 0.01  # before each, as in a training: calls without are quicker, for cores stay awake
WARM_UP = 3  # first calls, in which connections are made and memory is mapped
PINGS = 500
BULK = 64 * MEBIBYTE
LOSSES = 5
GRADIENTS = 40
CHUNK = 1 << 14  # elements of which gradient, weights and step fit into a core's cache
STEPS = 200
HANDOVERS = 200
WRITES = 5
PATIENCE, POLL_SECONDS = 120.0, 0.01

T = TypeVar("T")
E = TypeVar("E", Killed, Detected, NodeJoined, ReplicaAdded)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured times, in seconds."""

    calls: Mapping[int, float]  # of `push_pull`, by the number of bytes that go each way
    ping: float  # a byte over TCP and back
    port: float  # each byte over TCP, one way
    update: float  # each byte in a step of SGD
    disk: tuple[float, float]  # a small write, and each byte of a large one, both synced
    handover: float  # until a thread has taken over a piece of work, and has given it back
    starts: Sequence[float]  # of nodes, each until it had joined
    actors: Sequence[float]  # of replicas, each from the start of its actor until it held the state
    detections: Sequence[float]  # of killed processes, each until its loss was detected
    gradients: Sequence[float] = ()  # of the configuration's workload; empty: it was not given


def calibrate(cluster: Cluster, trial: Trial | None, folder: str | None) -> Measured:
    """Measure a cluster that has `NODES`, and the gradients of a trial if one is given.

    The server's node writes into `folder`; None: into its folder for temporary files.
    """
    calls = {nbytes: _calls(cluster, nbytes) for nbytes in CALLS}
    with _group(cluster.client, SMALLEST, seats=cluster.seats) as ps:
        nodes = {node.role: node.address for node in ps.nodes}

        def on(role: str, function: Callable[..., Any], *args: Any) -> Any:
            submit = partial(cluster.client.submit, workers=[nodes[role]], pure=False)
            return submit(function, *args).result(PATIENCE)

        ping, port = on("worker", pings, on("server", answer_pings))
        update, handover = on("server", steps), on("server", handovers)
        disk = on("server", writes, folder)
        gradients = on("worker", gradient_seconds, trial) if trial is not None else ()
    starts, actors, detections = _losses(cluster)
    return Measured(
        calls, ping, port, update, disk, handover, starts, actors, detections, gradients
    )


def fitted(name: str, measured: Measured) -> Profile:
    """Return the profile with which calls take the measured times.

    The bytes of a call are fitted to all sizes, each by its relative error.
    """
    fixed = measured.calls[SMALLEST]
    latency = min(measured.ping, fixed) / 2
    pairs = [(nbytes, seconds) for nbytes, seconds in measured.calls.items() if nbytes > SMALLEST]
    slope = sum((n / s) * (1 - fixed / s) for n, s in pairs) / sum((n / s) ** 2 for n, s in pairs)
    update = min(measured.update, max(0.0, slope))
    each_way = max((slope - update) / 2, 1e-13)
    port, gradient = min(measured.port, each_way), Gradient()
    if measured.gradients:
        spread = stdev(np.log(measured.gradients).tolist())
        gradient = Gradient(_rounded(median(measured.gradients)), _rounded(spread))
    return Profile(
        name,
        Link(_rounded(latency), _rounded(1 / port)),
        Service(
            _rounded(max(0.0, fixed / 2 - latency)), _rounded(each_way - port), _rounded(update)
        ),
        Disk(_rounded(measured.disk[0]), _rounded(1 / measured.disk[1])),
        gradient,
        work=_rounded(2 * measured.handover),
        start=_rounded(median(measured.starts)),
        actor=_rounded(median(measured.actors)),
        detection=_rounded(median(measured.detections)),
    )


def predicted(profile: Profile) -> dict[int, float]:
    """Return the seconds of the calls on virtual time, by their bytes."""
    seconds_of = {}
    for nbytes in CALLS:
        nodes = [node for node in NODES if node.name in ("server-0", "worker-0")]
        with VirtualClient(nodes, 0, profile) as client, _group(client, nbytes) as ps:
            (seconds,) = client.gather(ps.run(partial(push_pulls, CALLS[nbytes]), workers=1))
            seconds_of[nbytes] = median(seconds)
    return seconds_of


def _rounded(value: float) -> float:
    """Three digits, as more were not measured."""
    return float(f"{value:.3g}")


# -- groups --------------------------------------------------------------------------------------


def _group(client: Any, nbytes: int, **settings: Any) -> ParameterServer:
    weights = {"weights": np.zeros(nbytes // 4, np.float32)}
    return ParameterServer(client, weights, optimizer=SGD(1e-3), **settings)


def _calls(cluster: Cluster, nbytes: int) -> float:
    with _group(cluster.client, nbytes, seats=cluster.seats) as ps:
        (future,) = ps.run(partial(push_pulls, CALLS[nbytes]), workers=1)
        seconds: list[float] = future.result(PATIENCE)
        return median(seconds)


def _losses(cluster: Cluster) -> tuple[list[float], list[float], list[float]]:
    """Kill the head of a chain repeatedly; another node takes its place each time."""
    events, starts, actors, detections = list[Event](), list[float](), list[float](), list[float]()
    watch = events.append
    striker = Striker(cluster, watch)

    def event_of(kind: type[E], node: str) -> E:
        def look() -> E | None:
            return next((e for e in [*events] if isinstance(e, kind) and e.node == node), None)

        return _until(look, f"{kind.__name__} of {node}")

    settings = {"recovery": "chain", "on_event": watch, "on_loss": "ignore"}
    with _group(cluster.client, SMALLEST, seats=cluster.seats, **settings) as ps:
        for number in range(LOSSES):
            _until(lambda: ps.table().complete or None, "all replicas")
            head = ps.table().views[0].chain[0]
            node = next(node.name for node in ps.nodes if node.address == head.address)
            striker.kill(number, node, 0)
            lost = event_of(Detected, node).t - event_of(Killed, node).t
            detections.append(max(0.0, lost))
            name, began = f"spare-{number + 1}", time.monotonic()
            cluster.start(NodeSpec(name, "server"))
            joined = event_of(NodeJoined, name)
            starts.append(time.monotonic() - began)
            actors.append(max(0.0, event_of(ReplicaAdded, name).t - joined.t))
    return starts, actors, detections


def _until(look: Callable[[], T | None], what: str) -> T:
    deadline = time.monotonic() + PATIENCE
    while (result := look()) is None:
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{what} took longer than {PATIENCE:g} s")
        time.sleep(POLL_SECONDS)
    return result


# -- what runs on the nodes ----------------------------------------------------------------------


def push_pulls(calls: int, worker: Worker) -> list[float]:
    """Push and pull all weights repeatedly; return the seconds of each call after warm-up."""
    gradients = {name: np.ones_like(array) for name, array in worker.pull().items()}
    seconds = []
    for _ in range(WARM_UP + calls):
        worker.sleep(PAUSE)
        began = worker.now()
        worker.push_pull(gradients)
        seconds.append(worker.now() - began)
    return seconds[WARM_UP:]


def answer_pings() -> tuple[str, int]:
    """Answer the pings of one connection in a thread; return where."""
    from distributed import get_worker

    listener = socket.create_server((get_worker().host or "127.0.0.1", 0))
    listener.settimeout(PATIENCE)

    def answer() -> None:
        with listener, contextlib.suppress(OSError), listener.accept()[0] as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                connection.sendall(connection.recv(1))
            room, left = bytearray(MEBIBYTE), BULK
            while left > 0 and (came := connection.recv_into(room)):
                left -= came
            connection.sendall(b"!")

    threading.Thread(target=answer, daemon=True).start()
    host, port = listener.getsockname()[:2]
    return host, port


def pings(place: tuple[str, int]) -> tuple[float, float]:
    """Return the median seconds of a byte there and back, and those of each byte of many."""
    seconds = []
    with socket.create_connection(place, PATIENCE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            began = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            seconds.append(time.perf_counter() - began)
        began = time.perf_counter()
        connection.sendall(bytes(BULK))
        connection.recv(1)
        return median(seconds), (time.perf_counter() - began) / BULK


def steps() -> float:
    """Return the median seconds of each byte in a step of SGD, which checks the gradient first."""
    values, gradient = np.zeros(CHUNK, np.float32), np.ones(CHUNK, np.float32)
    rule, new, seconds = SGD(1e-3), np.empty_like(values), []
    for number in range(STEPS):
        began = time.perf_counter()
        np.isfinite(gradient).all()
        rule.step(values, gradient, {}, number + 1, 1.0, new)
        seconds.append(time.perf_counter() - began)
    return median(seconds) / values.nbytes


def handovers() -> float:
    """Return the median seconds until a thread has done nothing."""
    seconds = []
    with ThreadPoolExecutor(1) as threads:
        for _ in range(HANDOVERS):
            began = time.perf_counter()
            threads.submit(int).result()
            seconds.append(time.perf_counter() - began)
    return median(seconds)


def writes(folder: str | None) -> tuple[float, float]:
    """Return the median seconds of a small file, and of each byte of a large one, both synced."""
    small, large = (list(_written(folder, nbytes)) for nbytes in (1024, BULK))
    latency = median(small)
    return latency, max(median(large) - latency, 1e-9) / BULK


def _written(folder: str | None, nbytes: int) -> Iterator[float]:
    data = os.urandom(min(nbytes, MEBIBYTE)) * max(1, nbytes // MEBIBYTE)
    with tempfile.TemporaryDirectory(prefix="dps-calibrate-", dir=folder) as place:
        for number in range(WRITES):
            began = time.perf_counter()
            with Path(place, str(number)).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield time.perf_counter() - began


def gradient_seconds(trial: Trial) -> list[float]:
    """Return the seconds of gradients of a trial's workload, after the first one."""
    config = trial.config
    data, size = config.dataset.load("train"), config.training.batch_size
    workload, rng = workload_of(config), np.random.default_rng(0)
    params, seconds = workload.initial(rng), []
    for _ in range(GRADIENTS + 1):
        batch = rng.integers(len(data.y_train), size=size)
        x, y = data.x_train[batch], data.y_train[batch]
        began = time.perf_counter()
        workload.gradient(params, x, y)
        seconds.append(time.perf_counter() - began)
    return seconds[1:]
