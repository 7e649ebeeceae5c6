"""The look at a cluster by a small job that is run on it: `dps doctor --cluster CONFIG`.

Three nodes are started as those of a trial would be, a server, a replica and a worker. What an
experiment takes for granted is tried with them, one thing after the other, and then they are ended.
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import psutil

from dps import Timings
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec, resource_of
from dps.cluster.node.worker import Worker
from dps.core.credentials import masked
from dps.errors import CapacityError, ConfigurationError, DpsError
from flows.analysis.finished import RESULTS
from flows.config.cluster import QueueSection
from flows.records.live import TookTooLong, eventually

if TYPE_CHECKING:
    from dps.cluster.backends.base import Cluster
    from flows.config.cluster import ClusterSection
    from flows.config.trials import Trial

NODES = tuple(NodeSpec(name, resource_of(name)) for name in ("server-0", "replica-0-1", "worker-0"))
PRELOAD = ("dps.cluster.driver.parameter_server", __name__)
# What has to be the same everywhere: what is pickled here is read there.
PACKAGES = ("dps", "distributed", "dask", "cloudpickle", "msgpack", "numpy")
ANSWER_SECONDS = 60.0
END_SECONDS = 20.0
ELEMENTS = 1000
CLOCK_SECONDS = 2.0  # by which two accounts of when a process began may differ

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Check:
    """What was tried, what came of it, and whether experiments can run with it."""

    subject: str
    found: str
    good: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """A process: on which host it runs, and when it began."""

    host: str
    pid: int
    began: float


def check_cluster(
    trials: Sequence[Trial], here: Path, seconds: float, tell: Tell
) -> Iterator[Check]:
    """Try each cluster that trials name, once, and yield what comes of each thing that is tried.

    Where there are several, a check with the subject `cluster` says which one those after it are
    of.

    Parameters
    ----------
    trials
        Say where they run; checkpoints go where any of those on a cluster says.
    here
        The working directory, whose `results` have the checkpoints for which no path is given.
    seconds
        Within which nodes must have started.
    tell
        Is told what is waited for.

    Raises
    ------
    ConfigurationError
        They run on virtual time, where there is no cluster.
    """
    by_cluster = _by_cluster(trials)
    real = [those for those in by_cluster if those[0].config.cluster.kind != "virtual"]
    if not real:
        raise ConfigurationError(
            "cluster.kind: on virtual time there are no nodes to check; name another cluster, as "
            "by --set cluster.kind=local"
        )
    for those in real:
        if len(by_cluster) > 1:
            yield Check("cluster", _name(those[0]))
        yield from _checked(those, here, seconds, tell)


# -- parts -----------------------------------------------------------------------------------------


def _by_cluster(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Trials in groups of the same cluster, in order."""
    groups: list[list[Trial]] = []
    for trial in trials:
        wanted = trial.config.cluster
        known = next((each for each in groups if each[0].config.cluster == wanted), None)
        if known is None:
            groups.append([trial])
        else:
            known.append(trial)
    return groups


def _name(trial: Trial) -> str:
    """What a trial's cluster is called: its labels on the axes that vary it, else its kind."""
    varied = [label for axis, label in trial.labels.items() if axis.partition(".")[0] == "cluster"]
    return ", ".join(varied) or trial.config.cluster.kind


def _checked(trials: Sequence[Trial], here: Path, seconds: float, tell: Tell) -> Iterator[Check]:
    """Try the one cluster that all of some trials run on."""
    section = trials[0].config.cluster
    if "patience" in type(section).model_fields:
        section = section.model_copy(update={"patience": seconds})
    began = time.monotonic()
    try:
        cluster = _opened(section, tell)
    except (CapacityError, ConfigurationError) as error:
        yield Check("start", f"{masked(str(error))}{_where_to_look(section)}", good=False)
        return
    places: dict[str, Place] = {}
    try:
        with cluster:
            took = time.monotonic() - began
            places = _asked(cluster, place)
            hosts = sorted({each.host for each in places.values()})
            on = f"{len(NODES)} nodes in {took:.1f} s, on {', '.join(hosts)}"
            late = f"; expected {seconds:g} s at most" if took > seconds else ""
            yield Check("start", on + late, good=not late)
            yield _versions(cluster)
            for path in _checkpoint_paths(trials, here):
                yield _shared(cluster, path)
            yield _reached(cluster)
    except (DpsError, OSError, TimeoutError) as error:
        yield Check("nodes", f"stopped answering: {masked(str(error))}", good=False)
    yield _left(places) if section.kind == "existing" else _ended(places)


def _opened(section: ClusterSection, tell: Tell) -> Cluster:
    if isinstance(section, QueueSection):
        section.check(NODES)
    return section.open(NODES, PRELOAD, tell)


def _where_to_look(section: ClusterSection) -> str:
    if isinstance(section, QueueSection):
        return ". `dps plan CONFIG --job-script` shows the jobs that are submitted"
    return ""


def _asked(cluster: Cluster, function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """What each node returns, by its name."""
    names = {name: address for name, address in _addresses(cluster).items() if name in _NAMES}
    futures = {
        name: cluster.client.submit(function, *args, workers=[address], pure=False)
        for name, address in names.items()
    }
    return {name: future.result(ANSWER_SECONDS) for name, future in futures.items()}


_NAMES = frozenset(node.name for node in NODES)


def _addresses(cluster: Cluster) -> dict[str, str]:
    weights = {"w": np.zeros(1, np.float32)}
    with ParameterServer(cluster.client, weights, seats=cluster.seats) as ps:
        return {node.name: node.address for node in ps.nodes}


def _versions(cluster: Cluster) -> Check:
    ours, differences = versions(), []
    for name, theirs in _asked(cluster, versions).items():
        for package, wanted in ours.items():
            found = theirs[package]
            if found != wanted:
                differences.append(f"{name} has {package} {found}, here it is {wanted}")
    if differences:
        return Check(
            "versions", f"{'; '.join(differences)}. Install the same there as here", good=False
        )
    return Check(
        "versions", f"python {ours['python']}, dps {ours['dps']} and the rest are the same"
    )


def _checkpoint_paths(trials: Sequence[Trial], here: Path) -> list[str]:
    """Where trials write checkpoints: each place once, and none if no trial writes any."""
    durabilities = [trial.config.build_recovery().durability for trial in trials]
    writing = (each for each in durabilities if each.writes_checkpoints)
    return list(dict.fromkeys(each.path or str(here / RESULTS) for each in writing))


def _shared(cluster: Cluster, path: str) -> Check:
    """Whether what one node writes is there for the others, and for this machine."""
    folder = f"{path.rstrip('/')}/.dps-doctor-{secrets.token_hex(4)}"
    advice = "; name a path that all nodes can write as recovery.durability.path"
    try:
        fs, root = fsspec.url_to_fs(folder)
        fs.makedirs(root, exist_ok=True)
    except Exception as error:  # noqa: BLE001 - whatever the file system raises is told
        return Check("checkpoints", f"{masked(path)}: cannot be written here: {error}", good=False)
    try:
        written = _asked(cluster, write_into, folder)
        wrong = [f"{name}: {error}" for name, error in written.items() if error]
        seen = _asked(cluster, seen_in, folder)
        seen["this machine"] = seen_in(folder)
        wanted = {name for name, error in written.items() if not error}
        expected = len(wanted)
        wrong += [
            f"{name} sees {count} of {expected} files that nodes wrote"
            for name, count in seen.items()
            if count != expected
        ]
    finally:
        fs.rm(root, recursive=True)
    if wrong:
        return Check("checkpoints", f"{masked(path)}: {'; '.join(wrong)}{advice}", good=False)
    return Check("checkpoints", f"{masked(path)}: all nodes write there, and see what others wrote")


def _reached(cluster: Cluster) -> Check:
    """Whether a worker reaches a server, and that its replica."""
    weights = {"w": np.zeros(ELEMENTS, np.float32)}
    with ParameterServer(
        cluster.client,
        weights,
        recovery="chain",
        seats=cluster.seats,
        timings=Timings(lease=ANSWER_SECONDS),
        on_loss="ignore",
    ) as ps:
        (future,) = ps.run(push_once, workers=1)
        try:
            seconds = future.result(ANSWER_SECONDS)
        except Exception as error:  # noqa: BLE001 - whatever was raised there is told
            return Check(
                "network",
                f"a worker does not reach a server: {error}. Open the ports between the nodes, or "
                "name the network that they share as cluster.interface",
                good=False,
            )
    return Check(
        "network",
        f"a worker pushed to a server, and that to its replica, in {1e3 * seconds:.1f} ms",
    )


def _ended(places: Mapping[str, Place]) -> Check:
    own = [each for each in places.values() if each.host == socket.gethostname()]
    others = len(places) - len(own)
    try:
        eventually(lambda: not any(map(_lives, own)), "end of all nodes", END_SECONDS)
    except TookTooLong:
        left = ", ".join(str(each.pid) for each in own if _lives(each))
        return Check("end", f"still there after {END_SECONDS:g} s: processes {left}", good=False)
    far = f"; of {others} on other hosts, the connections are closed" if others else ""
    return Check("end", f"{len(own)} processes here have ended{far}")


def _left(places: Mapping[str, Place]) -> Check:
    """Of a deployment that somebody else runs, whose processes are to stay."""
    return Check("end", f"{len(places)} Dask workers were given back, which are there as before")


def _lives(known: Place) -> bool:
    try:
        process = psutil.Process(known.pid)
        same = abs(process.create_time() - known.began) < CLOCK_SECONDS
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# -- what runs on the nodes ------------------------------------------------------------------------


def place() -> Place:
    """Say where this process runs."""
    return Place(socket.gethostname(), os.getpid(), psutil.Process().create_time())


def versions() -> dict[str, str]:
    """Return which versions are here."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def write_into(folder: str) -> str:
    """Write a file of this process into a folder; return why that cannot be done, or ""."""
    try:
        with fsspec.open(f"{folder}/{socket.gethostname()}-{os.getpid()}", "wb") as file:
            file.write(b"dps")
    except Exception as error:  # noqa: BLE001 - whatever the file system raises is told
        return f"cannot be written: {error}"
    return ""


def seen_in(folder: str) -> int:
    """Return how many files there are in a folder."""
    fs, root = fsspec.url_to_fs(folder)
    fs.invalidate_cache()
    try:
        return len(fs.ls(root, detail=False))
    except FileNotFoundError:
        return 0


def push_once(worker: Worker) -> float:
    """Pull and push once; return how many seconds a push with its acknowledgement took."""
    weights = worker.pull()
    began = worker.now()
    worker.push_pull({name: np.zeros_like(array) for name, array in weights.items()})
    return worker.now() - began
