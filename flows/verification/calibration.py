"""`dps calibrate`: what costs time on a cluster, measured, and written down as a profile.

Nodes of the cluster that a configuration names, or of this machine, push and pull arrays of several
sizes; the same calls on virtual time must then take what they took there. What one measurement
cannot tell apart, others tell: a ping over TCP is the latency of a link, and a step of SGD the
update; the loop and the port have what is left of a call.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from dps.chaos.kill_and_pause import Striker
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec, resource_of
from dps.cluster.node.worker import Worker
from dps.cluster.platform import SystemClock
from dps.core.rules.rule import SGD
from dps.events import Detected, Killed, NodeJoined, ReplicaAdded
from dps.protocol.executor import available_cores
from dps.virtual.client import VirtualClient
from dps.virtual.profile import Disk, Gradient, Link, Profile, Service
from flows.config.trials import Trial
from flows.config.workload import workload_of
from flows.records.live import Watch, eventually
from flows.records.record import Record

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
PATIENCE = 120.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured, in seconds.

    Attributes
    ----------
    calls
        Of `push_pull`, by the number of bytes that go each way.
    ping
        A byte over TCP and back.
    port
        Of each byte over TCP, one way.
    update
        Of each byte in a step of SGD.
    disk
        Of a small write, and of each byte of a large one, both synced.
    handover
        Until a thread has taken over a piece of work, and has given it back.
    starts
        Of nodes, each until it had joined.
    actors
        Of replicas, each from when its actor was there until it held the state.
    detections
        Of killed processes, each until its loss was detected.
    gradients
        Of the configuration's workload, one by one; empty: none was asked for.
    """

    calls: Mapping[int, float]
    ping: float
    port: float
    update: float
    disk: tuple[float, float]
    handover: float
    starts: Sequence[float]
    actors: Sequence[float]
    detections: Sequence[float]
    gradients: Sequence[float] = ()


def calibrate(cluster: Cluster, trial: Trial | None, folder: str | None, tell: Tell) -> Measured:
    """Measure a cluster that has `NODES`.

    Parameters
    ----------
    trial
        Whose gradients are timed; None: nobody's.
    folder
        Where the server's node is to write; None: its folder for temporary files.
    """
    calls = {nbytes: _calls(cluster, nbytes) for nbytes in CALLS}
    tell("calls measured")
    with _group(cluster, SMALLEST) as ps:
        nodes = {node.role: node.address for node in ps.nodes}
        on_server = partial(_on, cluster, nodes["server"])
        on_worker = partial(_on, cluster, nodes["worker"])
        place = on_server(answer_pings)
        ping, port = on_worker(pings, place)
        update, handover, disk = on_server(steps), on_server(handovers), on_server(writes, folder)
        tell("link, updates and disk measured")
        gradients = on_worker(gradient_seconds, trial) if trial is not None else ()
    starts, actors, detections = _losses(cluster)
    tell("losses and starts measured")
    return Measured(
        calls, ping, port, update, disk, handover, starts, actors, detections, gradients
    )


def fitted(name: str, measured: Measured) -> Profile:
    """Return the profile with which calls take what was measured.

    The bytes of a call are fitted to all sizes, each by its relative error.
    """
    fixed = measured.calls[SMALLEST]
    latency = min(measured.ping, fixed) / 2
    pairs = [(nbytes, seconds) for nbytes, seconds in measured.calls.items() if nbytes > SMALLEST]
    slope = sum((n / s) * (1 - fixed / s) for n, s in pairs) / sum((n / s) ** 2 for n, s in pairs)
    update = min(measured.update, max(0.0, slope))
    each_way = max((slope - update) / 2, 1e-13)
    port = min(measured.port, each_way)
    return Profile(
        name,
        Link(_rounded(latency), _rounded(1 / port)),
        Service(
            _rounded(max(0.0, fixed / 2 - latency)), _rounded(each_way - port), _rounded(update)
        ),
        Disk(_rounded(measured.disk[0]), _rounded(1 / measured.disk[1])),
        _gradient(measured.gradients),
        work=_rounded(2 * measured.handover),
        start=_rounded(median(measured.starts)),
        actor=_rounded(median(measured.actors)),
        detection=_rounded(median(measured.detections)),
    )


def predicted(profile: Profile) -> dict[int, float]:
    """Return what the calls take on virtual time, by their bytes."""
    found = {}
    for nbytes in CALLS:
        nodes = [node for node in NODES if node.name in ("server-0", "worker-0")]
        with VirtualClient(nodes, 0, profile) as client, _with(client, nbytes) as ps:
            (seconds,) = client.gather(ps.run(partial(push_pulls, CALLS[nbytes]), workers=1))
            found[nbytes] = median(seconds)
    return found


def as_yaml(profile: Profile, measured: Measured, where: str, day: str) -> dict[str, Any]:
    """Return the profile as its file says it, with where each figure comes from."""
    milliseconds = ", ".join(
        f"{seconds * 1e3:.3g} ms with {size_told(nbytes)}"
        for nbytes, seconds in measured.calls.items()
    )
    sources = [
        f"dps calibrate on {day}: {where}",
        f"link.latency: half of a ping over TCP, {measured.ping * 1e6:.3g} microseconds",
        f"link.bandwidth: TCP, {1 / measured.port:.3g} bytes a second, or what calls need",
        f"service: pushes and pulls, medians of {milliseconds}",
        "service.update: a step of SGD, chunk by chunk; work: a thread that takes work over",
        "disk: files that are written and synced",
        f"detection, start, actor: the medians of {len(measured.detections)} processes that were "
        "killed, of the nodes that took their places, and of the replicas made on these",
    ]
    if measured.gradients:
        sources.append(f"gradient: {len(measured.gradients)} gradients of the configuration")
    costs = asdict(profile)
    return {"name": costs.pop("name"), "sources": sources, **costs}


def here() -> str:
    """This machine in words, without its name."""
    return (
        f"{platform.system()} on {platform.machine()}, {available_cores()} cores, Python "
        f"{platform.python_version()}"
    )


def size_told(nbytes: int) -> str:
    """A number of bytes in words."""
    return f"{nbytes // MEBIBYTE} MB" if nbytes >= MEBIBYTE else f"{nbytes // 1024} KB"


def _gradient(seconds: Sequence[float]) -> Gradient:
    if not seconds:
        return Gradient()
    return Gradient(_rounded(median(seconds)), _rounded(stdev(np.log(seconds).tolist())))


def _rounded(value: float) -> float:
    """Three digits, as more were not measured."""
    return float(f"{value:.3g}")


# -- groups --------------------------------------------------------------------------------------


def _with(client: Any, nbytes: int, **settings: Any) -> ParameterServer:
    weights = {"weights": np.zeros(nbytes // 4, np.float32)}
    return ParameterServer(client, weights, optimizer=SGD(1e-3), **settings)


def _group(cluster: Cluster, nbytes: int, **settings: Any) -> ParameterServer:
    return _with(cluster.client, nbytes, seats=cluster.seats, **settings)


def _calls(cluster: Cluster, nbytes: int) -> float:
    with _group(cluster, nbytes) as ps:
        (future,) = ps.run(partial(push_pulls, CALLS[nbytes]), workers=1)
        seconds: list[float] = future.result(PATIENCE)
        return median(seconds)


def _on(cluster: Cluster, address: str, function: Callable[..., Any], *args: Any) -> Any:
    """Have a function called on a node; return what it returns."""
    future = cluster.client.submit(function, *args, workers=[address], pure=False)
    return future.result(PATIENCE)


def _losses(cluster: Cluster) -> tuple[list[float], list[float], list[float]]:
    """Kill the head of a chain again and again; another node takes its place each time."""
    watch, starts, actors, detections = Watch(), [], [], []
    striker, names = Striker(cluster, SystemClock(), watch), (f"spare-{i}" for i in count(1))
    with _group(cluster, SMALLEST, recovery="chain", on_event=watch, on_loss="ignore") as ps:
        for number in range(LOSSES):
            eventually(lambda: ps.table().complete, "all replicas", PATIENCE)
            node = head_of(ps)
            watch.forget()
            striker.kill(number, node, 0)
            detections.append(watch.until(_detected, f"detection of the loss of {node}", PATIENCE))
            name, began = next(names), time.monotonic()
            cluster.start(NodeSpec(name, "server"))
            watch.until(partial(joined, name), f"start of {name}", PATIENCE)
            starts.append(time.monotonic() - began)
            replica = partial(_made, name)
            actors.append(watch.until(replica, f"replica on {name}", PATIENCE))
    return starts, actors, detections


def _detected(record: Record) -> float | None:
    killed, detected = record.of(Killed), record.of(Detected)
    return max(0.0, detected[0].t - killed[0].t) if killed and detected else None


def _made(name: str, record: Record) -> float | None:
    there = joined(name, record)
    added = next((event for event in record.of(ReplicaAdded) if event.node == name), None)
    return max(0.0, added.t - there.t) if there is not None and added is not None else None


# -- what runs on the nodes ----------------------------------------------------------------------


def push_pulls(calls: int, worker: Worker) -> list[float]:
    """Push and pull all weights so often; return the seconds of each call after the first ones."""
    gradients = {name: np.ones_like(array) for name, array in worker.pull().items()}
    found = []
    for _ in range(WARM_UP + calls):
        worker.sleep(PAUSE)
        began = worker.now()
        worker.push_pull(gradients)
        found.append(worker.now() - began)
    return found[WARM_UP:]


def answer_pings() -> tuple[str, int]:
    """Answer the pings of one connection in a thread; return where."""
    from distributed import get_worker

    listener = socket.create_server((get_worker().host or "127.0.0.1", 0))
    listener.settimeout(PATIENCE)
    threading.Thread(target=_answer, args=(listener,), daemon=True).start()
    host, port = listener.getsockname()[:2]
    return host, port


def _answer(listener: socket.socket) -> None:
    with listener, contextlib.suppress(OSError):
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            for _ in range(PINGS):
                connection.sendall(connection.recv(1))
            room, left = bytearray(MEBIBYTE), BULK
            while left > 0 and (came := connection.recv_into(room)):
                left -= came
            connection.sendall(b"!")


def pings(place: tuple[str, int]) -> tuple[float, float]:
    """Return the median seconds of a byte there and back, and those of each byte of many."""
    found = []
    with socket.create_connection(place, PATIENCE) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            began = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            found.append(time.perf_counter() - began)
        began = time.perf_counter()
        connection.sendall(bytes(BULK))
        connection.recv(1)
        return median(found), (time.perf_counter() - began) / BULK


def steps() -> float:
    """Return the median seconds of each byte in a step of SGD, which checks the gradient first."""
    values, gradient = np.zeros(CHUNK, np.float32), np.ones(CHUNK, np.float32)
    rule, new, found = SGD(1e-3), np.empty_like(values), []
    for number in range(STEPS):
        began = time.perf_counter()
        np.isfinite(gradient).all()
        rule.step(values, gradient, {}, number + 1, 1.0, new)
        found.append(time.perf_counter() - began)
    return median(found) / values.nbytes


def handovers() -> float:
    """Return the median seconds until a thread has done nothing."""
    from concurrent.futures import ThreadPoolExecutor

    found = []
    with ThreadPoolExecutor(1) as threads:
        for _ in range(HANDOVERS):
            began = time.perf_counter()
            threads.submit(int).result()
            found.append(time.perf_counter() - began)
    return median(found)


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
    params, found = workload.initial(rng), []
    for _ in range(GRADIENTS + 1):
        batch = rng.integers(len(data.y_train), size=size)
        x, y = data.x_train[batch], data.y_train[batch]
        began = time.perf_counter()
        workload.gradient(params, x, y)
        found.append(time.perf_counter() - began)
    return found[1:]


def head_of(ps: ParameterServer) -> str:
    """Return the name of the node that heads the first shard."""
    head = ps.table().views[0].chain[0]
    return next(node.name for node in ps.nodes if node.address == head.address)


def joined(name: str, record: Record) -> NodeJoined | None:
    """Return the event that a node of this name has joined; None if it has not."""
    return next((event for event in record.of(NodeJoined) if event.node == name), None)
