"""The effects of faults other than kills and pauses, and the proof of each.

They act and observe from outside of the training: by signals and limits of the system, or by
functions that run in the process of the node over Dask's own connections, which no fault cuts.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import posixpath
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import fsspec
import psutil

from dps.cluster.liveness import presence_of
from dps.cluster.names import Node
from dps.cluster.platform import Platform, Running, platform_of
from dps.cluster.transport.calls import BOTH, ClusterTransport, Condition, Meter, links_of
from dps.errors import DeadlineExceeded, StoreUnavailable
from dps.events import CheckpointFailed
from dps.faults import Corrupt, Cut, Delay, DiskFull, Fault, Slow
from dps.protocol.messages import GetTable
from dps.protocol.transport import Endpoint
from dps.recovery.checkpoint_files import CheckpointFiles
from dps.recovery.files import contents

if TYPE_CHECKING:
    import distributed

    from dps.cluster.backends.base import Cluster
    from dps.cluster.driver.parameter_server import ParameterServer

PROOF_SECONDS = 5.0
CONTROL_SECONDS = 10.0
PROBE_SECONDS = 2.0
PROBE_OF_CLOSED = 0.25
LOOK_SECONDS = 0.1
EVENTS_SECONDS = 2.0  # until events of a node reach the driver
FLIPPED = 16
TRIES = 5
TURN = 0.05
SHORTEST_RUN = 0.002
LONGEST_STOP = 0.2  # share of the silence after which a process is given up
PROOF_TURNS = 5
LONGEST_PROOF = 2.0


class Seen(NamedTuple):
    """An observation from outside, in words, and whether it proves the effect.

    >>> Seen("its priority was 0 and is 10", effective=True).effective
    True
    """

    evidence: str
    effective: bool


class Effect(Protocol):
    """One fault on one node. `begin` is called once, then `end` once, perhaps by another thread.

    Both raise `LookupError`, `OSError` or `DpsError` if the node or process is gone, or does not
    answer.

    Attributes
    ----------
    proven
        Whether the effect is proven if the process ends before `end` is called.
    """

    proven: bool

    def begin(self) -> Seen:
        """Carry it out and observe its effect."""
        ...

    def end(self) -> Seen:
        """Revert it, and return the effect observed until then."""
        ...


@dataclass(frozen=True)
class Hit:
    """A node that a fault hits.

    Attributes
    ----------
    number
        The number of the fault in its plan.
    node
        The name of the node; "shard-0" for a fault that hits a shard.
    cluster, ps
        The cluster of the node, and the parameter server on it.
    failures
        The failed checkpoints so far.
    """

    number: int
    node: str
    cluster: Cluster
    ps: ParameterServer
    failures: Sequence[CheckpointFailed]

    @property
    def pid(self) -> int:
        """The id of the node's process."""
        return self.cluster.pids[self.node]

    @property
    def platform(self) -> Platform:
        """Threads, flags and clocks of the driver."""
        return platform_of(self.cluster.client)

    @cached_property
    def member(self) -> Node:
        """The node as the parameter server knows it; raises `LookupError` if it is gone."""
        for node in self.ps.nodes:
            if node.name == self.node and not self.cluster.gone(self.node, 0.0):
                return node
        raise LookupError("no such process")

    def shards(self) -> set[int]:
        """Return the shards that the node serves now."""
        address, views = self.member.address, self.ps.table().views
        return {view.shard for view in views if address in {m.address for m in view.chain}}

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function on the event loop of the node's process, and return its result.

        An argument named `dask_worker` gets the process's Dask worker.
        """
        client, address = self.cluster.client, self.member.address

        async def in_time() -> Any:
            async with asyncio.timeout(CONTROL_SECONDS):
                replies = await client.run(function, *arguments, workers=[address])
            return replies[address]

        return client.sync(in_time)

    def probe(self, deadline: float) -> float | None:
        """Return the round-trip time to the coordinator in seconds; None if there is no reply."""
        took: float | None = self.run(_probe, self.ps.group.coordinator, deadline)
        return took


def effect_of(fault: Fault, hit: Hit) -> Effect:
    """Return the effect of a fault, except of a kill or a pause."""
    if type(fault).effect is not Fault.effect:
        return fault.effect(hit)  # a kind from another package
    match fault:
        case Slow():
            return _Slowdown(hit, fault.factor, fault.seconds)
        case Cut():
            ways = BOTH if fault.direction == "both" else (fault.direction,)
            return _Interference(hit, Condition(ways), fault.seconds)
        case Delay():
            return _Interference(hit, Condition(BOTH, fault.delay_seconds), fault.seconds)
        case DiskFull():
            return _FullDisk(hit)
        case Corrupt(target=int(shard)):
            return _Damage(hit, shard)
    return fault.effect(hit)  # which raises `LookupError`


# -- links -------------------------------------------------------------------------------------


@dataclass
class _Interference:
    """Holds back or delays the messages of a node; a probe proves it."""

    _hit: Hit
    _condition: Condition
    _seconds: float
    proven = True

    def begin(self) -> Seen:
        hit = self._hit
        before = hit.probe(PROBE_SECONDS)
        hit.run(_impose, hit.number, self._condition, self._seconds)
        if (seconds := self._condition.seconds) is not None:
            late = len(self._condition.ways) * seconds
            deadline = PROBE_SECONDS + late
            during = hit.probe(deadline)
            effective = during is not None and during >= late
        else:
            deadline = min(max(PROBE_OF_CLOSED, 2 * (before or 0)), self._seconds / 2)
            during = hit.probe(deadline)
            held = hit.run(_affected, hit.number) > 0
            # The probe was not just slow: the same deadline was enough before.
            effective = before is not None and before < deadline and during is None and held
        return Seen(
            "a probe from the node to the coordinator and back took "
            f"{_took(before, PROBE_SECONDS)} before, {_took(during, deadline)} during",
            effective,
        )

    def end(self) -> Seen:
        affected = self._hit.run(_lift, self._hit.number)
        after = self._hit.probe(PROBE_SECONDS)
        done = "held back" if self._condition.seconds is None else "delayed"
        evidence = (
            f"{affected} messages were {done}; a probe took {_took(after, PROBE_SECONDS)} after"
        )
        return Seen(evidence, after is not None and affected > 0)


def _took(seconds: float | None, deadline: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds is not None else f"more than {1e3 * deadline:g} ms"


# These functions run on the nodes.


async def _impose(
    number: int, condition: Condition, seconds: float, dask_worker: distributed.Worker
) -> None:
    links = links_of(dask_worker)
    links.impose(number, condition, seconds)
    if links.cut_off:  # otherwise its monitor would still vouch for it
        presence_of(dask_worker).silence(seconds)


async def _lift(number: int, dask_worker: distributed.Worker) -> int:
    links = links_of(dask_worker)
    links.lift(number)
    if not links.cut_off:
        presence_of(dask_worker).silence(0.0)
    return links.affected(number)


async def _affected(number: int, dask_worker: distributed.Worker) -> int:
    return links_of(dask_worker).affected(number)


async def _probe(
    coordinator: Endpoint, deadline: float, dask_worker: distributed.Worker
) -> float | None:
    transport = ClusterTransport(dask_worker.rpc, Meter(), links_of(dask_worker))
    clock = platform_of(dask_worker).clock
    began = clock.monotonic()
    try:
        await transport.call(coordinator, GetTable(-1, deadline), deadline)
    except DeadlineExceeded:
        return None
    return clock.monotonic() - began


async def hide(seconds: float, dask_worker: distributed.Worker) -> None:
    """Keep the monitor of the host from reporting this node for a while; runs on the node."""
    presence_of(dask_worker).silence(seconds)


# -- speed -------------------------------------------------------------------------------------


class _Slowdown:
    """Stops and resumes a process in turns, so that it runs for 1 / `factor` of the time."""

    proven = True  # `begin` has seen it stopped

    def __init__(self, hit: Hit, factor: float, seconds: float) -> None:
        timings = hit.ps.group.timings
        self._nodes = hit.cluster
        self._node, self._pid = hit.node, hit.pid
        self._factor, self._seconds = factor, seconds
        self._longest_stop = LONGEST_STOP * min(timings.lease, timings.stopped)
        self._platform = hit.platform
        self._now = hit.platform.clock.monotonic
        self._over = self._platform.flag()
        self._stopped = 0.0
        self._turns = 0
        self._running: Running

    def begin(self) -> Seen:
        """Take turns in a thread from now on, and observe the share of time that it is stopped."""
        if self._nodes.gone(self._node, 0.0):
            raise ProcessLookupError("no such process")
        self._began = self._looked = self._now()
        self._running = self._platform.start(self._take_turns, f"dps-slow-{self._node}")
        until = self._began + min(LONGEST_PROOF, self._seconds / 2)
        while not (self._turns >= PROOF_TURNS and self._seen().effective):
            if self._over.wait(TURN / 2) or self._now() > until:
                break
        return self._seen()

    def end(self) -> Seen:
        self._over.set()
        self._running.join()
        evidence, effective = self._seen()
        if self._nodes.gone(self._node, 0.0):
            return Seen(f"{evidence}; it had ended", True)
        if not self._nodes.running(self._node, PROOF_SECONDS):
            return Seen(f"{evidence}; it did not continue within {PROOF_SECONDS:g} s", False)
        return Seen(evidence, effective)

    def _take_turns(self) -> None:
        # A turn is far shorter than a lease, and than the stop after which a monitor kills. The
        # length of a stop follows from the time that the process ran, also on a busy machine.
        owed, run = 0.0, max(SHORTEST_RUN, TURN / self._factor)
        running_since = self._now()
        try:
            while not self._over.wait(run) and running_since < self._began + self._seconds:
                self._nodes.pause(self._node)
                owed += (self._now() - running_since) * (self._factor - 1)
                owed -= self._stay_stopped(min(owed, self._longest_stop))
                running_since = self._now()
        except ProcessLookupError:  # it has been killed
            return

    def _stay_stopped(self, seconds: float) -> float:
        began = self._now()
        try:
            # On a busy machine it stops only when it is next given a core.
            seen = self._nodes.stopped(self._node, self._longest_stop)
            stopped_since = self._now()
            self._over.wait(max(0.0, began + seconds - self._now()))
            seen = seen and self._nodes.stopped(self._node, 0.0)
        finally:
            self._nodes.resume(self._node)
        self._looked = self._now()
        if seen:
            self._stopped += self._looked - stopped_since
            self._turns += 1
        return self._looked - began

    def _seen(self) -> Seen:
        elapsed = max(self._looked - self._began, SHORTEST_RUN)  # until the end of the last turn
        share = self._stopped / elapsed
        slower = 1 / max(1 - share, 1e-3)
        evidence = (
            f"process {self._pid} was stopped for {share:.0%} of {elapsed:.2f} s, in "
            f"{self._turns} turns ({slower:.2f} times slower)"
        )
        wanted = 1 + (self._factor - 1) / 2
        if slower < wanted:
            evidence += f"; expected at least {wanted:g} times, for factor {self._factor:g}"
        return Seen(evidence, slower >= wanted)


# -- files -------------------------------------------------------------------------------------


class _FullDisk:
    """Makes every write of a process to a file fail, by a limit of file sizes of 0.

    Sockets are not affected, and existing files keep their contents.
    """

    proven = False  # only a failed checkpoint proves it, and `end` looks for one

    def __init__(self, hit: Hit) -> None:
        self._hit = hit

    def begin(self) -> Seen:
        self._began = self._hit.platform.clock.now()
        self._served = self._hit.shards()
        try:
            process = self._process = psutil.Process(self._hit.pid)
            self._before, hard = process.rlimit(psutil.RLIMIT_FSIZE)
            process.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
            limit, _ = process.rlimit(psutil.RLIMIT_FSIZE)
        except psutil.NoSuchProcess:
            raise ProcessLookupError("no such process") from None
        evidence = f"the limit of file sizes of process {process.pid} is {limit} bytes"
        return Seen(evidence, limit == 0)

    def end(self) -> Seen:
        """Reset the limit; without a write it had no effect."""
        try:
            _, hard = self._process.rlimit(psutil.RLIMIT_FSIZE)
            self._process.rlimit(psutil.RLIMIT_FSIZE, (self._before, hard))
            state = "the limit is lifted"
        except psutil.NoSuchProcess:
            state = "the process had ended"
        failed = self._failed(self._served | self._hit.shards())
        if not failed:
            return Seen(f"no write was tried; {state}", False)
        return Seen(f"{len(failed)} checkpoints failed ({failed[0].reason}); {state}", True)

    def _failed(self, shards: Set[int]) -> list[CheckpointFailed]:
        """Return the failed checkpoints of shards; wait a while for the first."""
        over = self._hit.platform.flag()
        for _ in range(math.ceil(EVENTS_SECONDS / LOOK_SECONDS)):
            since = (each for each in self._hit.failures if each.t >= self._began)
            if failed := [each for each in since if each.shard in shards]:
                return failed
            over.wait(LOOK_SECONDS)
        return []


@dataclass
class _Damage:
    """Flips bytes in the newest complete checkpoint of a shard; they stay flipped."""

    _hit: Hit
    _shard: int
    proven = True

    def begin(self) -> Seen:
        group = self._hit.ps.group
        if group.recovery.path is None:
            raise LookupError("there are no checkpoints")
        together = range(len(group.layout.shards)) if group.restores_together else ()
        return damage(f"{group.recovery.path}/{group.name}", self._shard, together)

    def end(self) -> Seen:
        return Seen("the checkpoint stays damaged", True)


def damage(folder: str, shard: int, together: Iterable[int] = ()) -> Seen:
    """Flip bytes in the newest complete checkpoint of a shard, and read the file again.

    The folder has the checkpoints of one parameter server. If shards are restored `together`, a
    checkpoint is complete when all of them have written one of the same cut. Raises `LookupError`
    if no checkpoint is complete.
    """
    files = CheckpointFiles(folder, shard, keep=1)
    others = [CheckpointFiles(folder, other, keep=1) for other in together if other != shard]
    fs, _ = fsspec.url_to_fs(folder)
    for _ in range(TRIES):
        written = [{each.cut for each in other.published()} for other in others]
        complete = [f for f in files.published() if all(f.cut in cuts for cuts in written)]
        if not complete:
            raise LookupError(f"shard {shard} has no complete checkpoint in {folder}")
        with suppress(FileNotFoundError, StoreUnavailable):  # a newer one has replaced it
            return _flip(fs, files.data_of(complete[0]))
    raise LookupError(f"the checkpoints of shard {shard} are replaced too quickly")


def _flip(fs: Any, path: str) -> Seen:
    data = contents(fs, path)
    begin = max(0, len(data) // 2 - FLIPPED // 2)
    flipped = bytes(byte ^ 0xFF for byte in data[begin : begin + FLIPPED])
    fs.pipe_file(path, data[:begin] + flipped + data[begin + len(flipped) :])
    before, after = (hashlib.sha256(d).hexdigest()[:16] for d in (data, fs.cat_file(path)))
    what = f"{posixpath.basename(path)}: {len(flipped)} bytes flipped at {begin}"
    return Seen(f"{what}; its SHA-256 was {before}… and is {after}…", before != after)
