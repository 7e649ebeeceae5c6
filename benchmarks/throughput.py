"""`make bench-throughput`: gradients per second against workers and shards.

Each worker pushes gradients and receives the new weights, one after the other, without computation.
Calls that end while all workers push are counted. The transports take turns in each cell, and in
several rounds over all cells.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.peers.parameter_server import TABLE
from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD
from dps.errors import DpsError
from dps.protocol.transport import TransportChoice
from dps.recovery.chain import Chain
from dps.recovery.durability import NoDurability
from dps.recovery.strategy import Recovery

NBYTES = 4 << 20
SECONDS = 1.5
PATIENCE = 120.0
ROUNDS = 3
LEARNING_RATE = 0.1
FALLBACK: TransportChoice = "dask"  # the transport that others are compared with

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Cell:
    """A setting: shards, each with replicas on separate servers, and workers.

    `target` is what a transport on one host must reach, as a multiple of the fallback's rate.
    """

    workers: int
    shards: int
    replicas: int = 1
    target: float | None = None

    @property
    def servers(self) -> int:
        """Nodes that hold replicas."""
        return self.shards * self.replicas

    @property
    def recovery(self) -> Recovery:
        """Nothing, or a chain."""
        return Recovery(Chain(self.replicas) if self.replicas > 1 else NoDurability())


@dataclass(frozen=True, slots=True)
class Flags:
    """Files by which the workers on one machine begin and stop together."""

    folder: Path

    @property
    def stop(self) -> Path:
        """Is there when they are to stop."""
        return self.folder / "stop"

    def begin(self) -> None:
        """Record that this process pushes."""
        (self.folder / f"begun-{os.getpid()}").touch()

    def await_begun(self, workers: int) -> None:
        """Wait until `workers` processes push."""
        until = time.monotonic() + PATIENCE
        while len(list(self.folder.glob("begun-*"))) < workers:
            if time.monotonic() > until:
                raise DpsError(f"not all {workers} workers pushed within {PATIENCE:g} s")
            time.sleep(0.01)


CELLS = (
    *(Cell(workers, 1, target=2.5 if workers == 4 else None) for workers in (1, 2, 4, 8)),
    *(Cell(workers, shards) for shards in (2, 4) for workers in (1, 2, 4, 8)),
    Cell(4, 1, replicas=2, target=2.0),
)


@dataclass(frozen=True, slots=True)
class Rates:
    """Gradients per second of a cell: transport → that of each round."""

    cell: Cell
    rates: dict[TransportChoice, list[float]]

    def ratio(self, transport: TransportChoice) -> float:
        """The rate of a transport as a multiple of the fallback's: the median of the rounds'."""
        pairs = zip(self.rates[transport], self.rates[FALLBACK], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


def throughput(
    transports: Sequence[TransportChoice],
    rounds: int,
    notify: Notify,
    cells: Sequence[Cell] = CELLS,
    nbytes: int = NBYTES,
    seconds: float = SECONDS,
) -> list[Rates]:
    """Count in each cell with each transport, in turn, on the nodes of one cluster."""
    found = [Rates(cell, {transport: [] for transport in transports}) for cell in cells]
    with LocalCluster(
        _nodes(cells),
        ("dps.cluster.driver.parameter_server", __name__),
        security="off",
        notify=notify,
    ) as cluster:
        for number in range(1, rounds + 1):
            for each in found:
                for transport in transports:
                    rate = _rate(cluster, each.cell, transport, nbytes, seconds)
                    each.rates[transport].append(rate)
                notify(f"round {number} of {rounds}: {_name(each.cell)}")
    return found


def rate_of(ends: Sequence[Sequence[float]]) -> float:
    """Calls per second that end from when the last worker has begun to when the first one stops.

    Raises `DpsError` if there was no time at which all of them pushed.

    Parameters
    ----------
    ends
        For each worker, when each of its calls ended, in seconds of one clock; the first call is
        counted as its beginning only.
    """
    began, stopped = max(times[0] for times in ends), min(times[-1] for times in ends)
    if stopped <= began:
        raise DpsError(f"at no time did all {len(ends)} workers push")
    calls = sum(bisect_right(times, stopped) - bisect_right(times, began) for times in ends)
    return calls / (stopped - began)


def table(found: Sequence[Rates], rounds: int) -> str:
    """The rates, and those of each transport as multiples of the fallback's."""
    transports = list(found[0].rates)
    compared = [each for each in transports if each != FALLBACK and FALLBACK in transports]
    ratios = [f"{each} ÷ {FALLBACK}" for each in compared]
    lines = [
        f"gradients per second, {NBYTES >> 20} MB of float32 each, pushed and the weights pulled, "
        f"medians of {rounds} rounds in turn",
        "",
        f"{'recovery':<10}{'shards':>7}{'workers':>8}"
        + "".join(f"{title:>15}" for title in transports)
        + "".join(f"{title:>22}" for title in ratios),
    ]
    for each in found:
        cell = each.cell
        recovery = f"chain({cell.replicas})" if cell.replicas > 1 else "none"
        rates = "".join(f"{statistics.median(each.rates[t]):>15.1f}" for t in transports)
        multiples = "".join(f"{each.ratio(t):>22.2f}" for t in compared)
        line = f"{recovery:<10}{cell.shards:>7}{cell.workers:>8}{rates}{multiples}"
        lines.append(line + _verdict(each, compared))
    return "\n".join(lines)


# -- parts -------------------------------------------------------------------------------------


def _nodes(cells: Sequence[Cell]) -> list[NodeSpec]:
    servers, workers = max(cell.servers for cell in cells), max(cell.workers for cell in cells)
    return [
        *(NodeSpec(f"server-{n}", "server") for n in range(servers)),
        *(NodeSpec(f"worker-{n}", "worker") for n in range(workers)),
    ]


def _rate(
    cluster: LocalCluster, cell: Cell, transport: TransportChoice, nbytes: int, seconds: float
) -> float:
    params = {
        f"{TABLE}-{n}": np.zeros(nbytes // 4 // cell.shards, np.float32) for n in range(cell.shards)
    }
    with (
        tempfile.TemporaryDirectory(prefix="dps-bench-") as folder,
        ParameterServer(
            cluster.client,
            params,
            shards=cell.shards,
            servers=cell.servers,
            optimizer=SGD(LEARNING_RATE),
            recovery=cell.recovery,
            transport=transport,
        ) as ps,
    ):
        flags = Flags(Path(folder))
        futures = ps.run(partial(_push, flags), workers=cell.workers)
        try:
            flags.await_begun(cell.workers)
            time.sleep(seconds)
        finally:
            flags.stop.touch()
        return rate_of([future.result() for future in futures])


def _push(flags: Flags, worker: Worker) -> list[float]:
    """Push until told to stop; return when each call ended, by the clock of the machine."""
    gradient = {name: np.ones_like(array) for name, array in worker.pull().items()}
    worker.push_pull(gradient)  # connections are made, and memory is mapped
    ends = [time.monotonic()]
    flags.begin()
    while not flags.stop.exists():
        worker.push_pull(gradient)
        ends.append(time.monotonic())
    return ends


def _name(cell: Cell) -> str:
    return f"{cell.workers} workers, {cell.shards} shards with {cell.replicas} replicas each"


def _verdict(found: Rates, compared: Sequence[TransportChoice]) -> str:
    target = found.cell.target
    of_one_host = [each for each in compared if each in ("auto", "shared_memory")]
    if target is None or not of_one_host:
        return ""
    ratio = found.ratio(of_one_host[0])
    return f"  {of_one_host[0]} ≥ {target:g} × {FALLBACK}: {'met' if ratio >= target else 'missed'}"
