"""The checks of `dps doctor`: this machine, or a cluster by a small job that runs on it."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import psutil

from dps import Timings, __version__
from dps.cluster.backends.base import Cluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec, resource_of
from dps.cluster.node.worker import Worker
from dps.cluster.transport.memory import here as check_memory
from dps.core.credentials import masked
from dps.errors import CapacityError, ConfigurationError, DpsError, StoreUnavailable
from dps.observe.tracking import SQLITE, check_sqlite, store_errors
from dps.protocol.executor import available_cores
from flows.config.cluster import QueueSection
from flows.config.trials import Trial
from flows.statistics.finished import RESULTS
from flows.tracking.store import default_uri
from flows.workloads import DATASETS

PACKAGES = ("dask", "distributed", "mlflow", "numpy", "scikit-learn", "pydantic", "torch")
NODES = tuple(NodeSpec(name, resource_of(name)) for name in ("server-0", "replica-0-1", "worker-0"))
PRELOAD = ("dps.cluster.driver.parameter_server", __name__)
# Versions that must agree on all nodes, because objects are pickled here and read there.
ALIKE = ("dps", "distributed", "dask", "cloudpickle", "msgpack", "numpy")
ANSWER_SECONDS = 60.0

Ask = Callable[..., dict[str, Any]]  # calls a function on each node, and returns its results


@dataclass(frozen=True, slots=True)
class Finding:
    """The subject of a check, its result, and whether experiments can run with it."""

    subject: str
    found: str
    good: bool = True


def examine(here: Path, store: str | None) -> Iterator[Finding]:
    """Check the machine and a working directory without changing anything.

    `store` is the URI of the tracking store; None selects the store of the directory.
    """
    yield Finding("dps", __version__)
    yield Finding("python", platform.python_version())
    for package in PACKAGES:
        try:
            yield Finding(package, version(package))
        except PackageNotFoundError:
            optional = package == "torch"
            why = "only workloads with torch need it" if optional else "dps needs it"
            yield Finding(package, f"not installed; {why}", good=optional)
    memory = psutil.virtual_memory()
    yield Finding("cores", f"{available_cores()} usable of {psutil.cpu_count()}")
    yield Finding(
        "memory", f"{memory.available / 1e9:.1f} GB available of {memory.total / 1e9:.1f} GB"
    )
    transport = "shared memory between processes here, streams to other hosts"
    try:
        check_memory()
    except OSError as error:
        transport = f"streams; no shared memory between processes: {error}"
    yield Finding("transport", transport)
    for kind, dataset in DATASETS.items():
        try:
            place = dataset().find() or "not found; downloaded on first use"
            yield Finding(f"dataset {kind}", str(place))
        except ConfigurationError as error:
            yield Finding(f"dataset {kind}", str(error), good=False)
    uri = store or default_uri(here)
    try:
        if not uri.startswith(SQLITE):
            yield Finding("store", f"{masked(uri)} (from MLFLOW_TRACKING_URI; not contacted)")
        elif not Path(uri.removeprefix(SQLITE)).exists():
            yield Finding("store", f"{uri} (created on first use)")
        else:
            with store_errors(uri):
                check_sqlite(uri)
            yield Finding("store", uri)
    except StoreUnavailable as error:
        yield Finding("store", str(error), good=False)


def examine_cluster(
    trials: Sequence[Trial], here: Path, seconds: float, notify: Callable[[str], None]
) -> Iterator[Finding]:
    """Start three nodes like those of a trial (server, replica, worker) and check them.

    The cluster of the first trial is checked, and the checkpoint paths of all trials. Nodes must
    have started within `seconds`. Raises `ConfigurationError` if the trials run on virtual time.
    """
    section = trials[0].config.cluster
    if section.kind == "virtual":
        raise ConfigurationError(
            "cluster.kind: virtual time has no nodes to check; choose another cluster, such as "
            "--set cluster.kind=local"
        )
    if "patience" in type(section).model_fields:
        section = section.model_copy(update={"patience": seconds})
    began = time.monotonic()
    try:
        if isinstance(section, QueueSection):
            section.check(NODES)
        cluster = section.open(NODES, PRELOAD, notify)
    except (CapacityError, ConfigurationError) as error:
        advice = ". `dps plan CONFIG --job-script` shows the jobs that are submitted"
        advice *= isinstance(section, QueueSection)
        yield Finding("start", f"{masked(str(error))}{advice}", good=False)
        return
    try:
        with cluster:
            took = time.monotonic() - began
            ask = _asking(cluster)
            hosts = ", ".join(sorted({*ask(socket.gethostname).values()}))
            late = f"; expected at most {seconds:g} s" if took > seconds else ""
            nodes = f"{len(NODES)} nodes in {took:.1f} s, on {hosts}"
            yield Finding("start", nodes + late, good=not late)
            yield _versions(ask)
            durabilities = (trial.config.recovery.build().durability for trial in trials)
            paths = (d.path or str(here / RESULTS) for d in durabilities if d.writes_checkpoints)
            for path in dict.fromkeys(paths):
                yield _shared(ask, path)
            yield _reached(cluster)
    except (DpsError, OSError, TimeoutError) as error:
        yield Finding("nodes", f"stopped answering: {masked(str(error))}", good=False)


def _asking(cluster: Cluster) -> Ask:
    """Return a function that asks only the three nodes; other workers may be stopped or busy."""
    names = {node.name for node in NODES}
    weights = {"w": np.zeros(1, np.float32)}
    with ParameterServer(cluster.client, weights, seats=cluster.seats) as ps:
        addresses = {node.name: node.address for node in ps.nodes if node.name in names}

    def ask(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
        submit = partial(cluster.client.submit, function, *args, pure=False)
        futures = {name: submit(workers=[address]) for name, address in addresses.items()}
        return {name: future.result(ANSWER_SECONDS) for name, future in futures.items()}

    return ask


def _versions(ask: Ask) -> Finding:
    """Check that objects pickled here can be read on the nodes."""
    ours = versions()
    differences = [
        f"{name} has {package} {theirs[package]}, this machine {wanted}"
        for name, theirs in ask(versions).items()
        for package, wanted in ours.items()
        if theirs[package] != wanted
    ]
    if differences:
        text = f"{'; '.join(differences)}. Install the same versions on all nodes"
        return Finding("versions", text, good=False)
    return Finding("versions", f"python {ours['python']}, dps {ours['dps']} and Dask are the same")


def _shared(ask: Ask, path: str) -> Finding:
    """Check that files of one node are visible to the others and to this machine."""
    folder = f"{path.rstrip('/')}/.dps-doctor-{secrets.token_hex(4)}"
    try:
        fs, root = fsspec.url_to_fs(folder)
        fs.makedirs(root, exist_ok=True)
    except Exception as error:  # noqa: BLE001 - any error of the file system is reported
        return Finding("checkpoints", f"{masked(path)} cannot be written: {error}", False)
    try:
        failures = ask(write_into, folder)
        wrong = [f"{name}: {error}" for name, error in failures.items() if error]
        expected = len(failures) - len(wrong)
        counts = ask(seen_in, folder) | {"this machine": seen_in(folder)}
        wrong += [
            f"{name} sees {count} of {expected} files that nodes wrote"
            for name, count in counts.items()
            if count != expected
        ]
    finally:
        fs.rm(root, recursive=True)
    if wrong:
        advice = "set recovery.durability.path to a path that all nodes can write"
        return Finding("checkpoints", f"{masked(path)}: {'; '.join(wrong)}; {advice}", good=False)
    text = f"{masked(path)}: all nodes can write there and see the files of the others"
    return Finding("checkpoints", text)


def _reached(cluster: Cluster) -> Finding:
    """Check that a worker reaches a server, and the server its replica."""
    with ParameterServer(
        cluster.client,
        {"w": np.zeros(1000, np.float32)},
        recovery="chain",
        seats=cluster.seats,
        timings=Timings(lease=ANSWER_SECONDS),
        on_loss="ignore",
    ) as ps:
        (future,) = ps.run(push_once, workers=1)
        try:
            seconds = future.result(ANSWER_SECONDS)
        except Exception as error:  # noqa: BLE001 - any error of the task is reported
            return Finding(
                "network",
                f"a worker cannot reach a server: {error}. Open the ports between the nodes, or "
                "set cluster.interface to a network that they share",
                good=False,
            )
    took = f"{1e3 * seconds:.1f} ms"
    return Finding(
        "network", f"a worker pushed to a server, and the server to its replica, in {took}"
    )


# -- what runs on the nodes ------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return the versions installed here."""
    return {"python": platform.python_version(), **{name: version(name) for name in ALIKE}}


def write_into(folder: str) -> str:
    """Write a file of this process into a folder; return why that cannot be done, or ""."""
    try:
        with fsspec.open(f"{folder}/{socket.gethostname()}-{os.getpid()}", "wb") as file:
            file.write(b"dps")
    except Exception as error:  # noqa: BLE001 - any error of the file system is reported
        return f"cannot be written: {error}"
    return ""


def seen_in(folder: str) -> int:
    """Return the number of files in a folder."""
    fs, root = fsspec.url_to_fs(folder)
    fs.invalidate_cache()
    return len(fs.ls(root, detail=False)) if fs.exists(root) else 0


def push_once(worker: Worker) -> float:
    """Pull and push once; return how many seconds a push with its acknowledgement took."""
    weights = worker.pull()
    began = worker.now()
    worker.push_pull({name: np.zeros_like(array) for name, array in weights.items()})
    return worker.now() - began
