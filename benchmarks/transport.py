"""`make bench`: push and pull between two processes, with dps and with other transports.

All systems do the same: a gradient goes to the other process and is applied to the weights there,
and the new weights return. Each has separate processes. They take turns in short rounds, so that
other work on the machine slows all of them. The ratios are reported.
"""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.peers.dask_actor import dask_actor
from benchmarks.peers.floor import floor
from benchmarks.peers.parameter_server import parameter_server
from benchmarks.peers.peer import LEARNING_RATE, Peer, Timed, Turn
from benchmarks.peers.raw_tcp import raw_tcp
from benchmarks.peers.ray_actor import ray_actor
from benchmarks.peers.torch_rpc import torch_rpc
from dps.errors import DpsError
from dps.protocol.transport import TransportChoice

ROUNDS = 8
# What is measured if nothing is asked for: `auto` is one of them.
TRANSPORTS: tuple[TransportChoice, ...] = ("shared_memory", "stream", "dask")
MEBIBYTE = 1 << 20

RAW, FLOOR, ACTOR, RAY, TORCH = "raw TCP", "floor", "Dask actor", "Ray actor", "torch RPC"
PEERS: Mapping[str, Peer] = {
    RAW: raw_tcp,
    FLOOR: floor,
    ACTOR: dask_actor,
    RAY: ray_actor,
    TORCH: torch_rpc,
}
# What a peer needs beyond dps's own requirements, and the extra that has it.
NEEDS = {RAY: ("ray", "bench"), TORCH: ("torch", "torch")}

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Size:
    """A size of the parameters, and how often it is sent in a round."""

    name: str
    nbytes: int
    calls: int


KILOBYTE, MIDDLE, LARGE = SIZES = (
    Size("1 KB", 1024, 100),
    Size("4 MB", 4 * MEBIBYTE, 20),
    Size("64 MB", 64 * MEBIBYTE, 4),
)


@dataclass(frozen=True, slots=True)
class Target:
    """The maximum time of a transport of dps, as a multiple of another system's."""

    transports: tuple[TransportChoice, ...]
    size: Size
    other: str
    limit: float


# Here, both ends are on one host.
SAME_HOST: tuple[TransportChoice, ...] = ("auto", "shared_memory")
STREAM: tuple[TransportChoice, ...] = ("stream",)
TARGETS = (
    Target(SAME_HOST, KILOBYTE, ACTOR, 0.30),
    Target(SAME_HOST, KILOBYTE, TORCH, 1.0),
    Target(SAME_HOST, MIDDLE, ACTOR, 0.35),
    Target(SAME_HOST, MIDDLE, TORCH, 0.6),
    Target(SAME_HOST, MIDDLE, FLOOR, 3.0),
    Target(SAME_HOST, LARGE, ACTOR, 0.45),
    Target(SAME_HOST, LARGE, RAY, 1.0),
    Target(SAME_HOST, LARGE, FLOOR, 1.5),
    Target(STREAM, KILOBYTE, RAW, 5.0),
    Target(STREAM, MIDDLE, RAW, 1.5),
    Target(STREAM, LARGE, RAW, 1.2),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """The seconds of a call with parameters of one size: system → the median of each round."""

    size: Size
    seconds: Mapping[str, Sequence[float]]

    def milliseconds(self, system: str) -> float:
        """The median of the rounds."""
        return 1e3 * statistics.median(self.seconds[system])

    def ratio(self, system: str, other: str) -> float:
        """The time of a system as a multiple of another's: the median of their rounds' ratios.

        Other work during a round slows both, so this is steadier than the ratio of the medians.
        """
        pairs = zip(self.seconds[system], self.seconds[other], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)


def measure(size: Size, systems: Mapping[str, Peer], rounds: int, notify: Notify) -> Measured:
    """Time the systems in turn, each round beginning with another one.

    The first round is not counted: connections are made in it, and memory is mapped. A peer that
    cannot be set up is reported and left out.

    Raises `DpsError` if the weights of a system differ from the sum of its gradients.
    """
    with _opened(systems, size.nbytes, notify) as opened:
        found: dict[str, list[float]] = {name: [] for name, _ in opened}
        for number in range(rounds + 1):
            first = number % len(opened)
            for name, timed in opened[first:] + opened[:first]:
                turn = timed(size.calls)
                _check(name, turn)
                found[name].append(statistics.median(turn.seconds))
            notify(f"{size.name}: round {number} of {rounds}")
    return Measured(size, {name: seconds[1:] for name, seconds in found.items()})


@contextlib.contextmanager
def _opened(
    systems: Mapping[str, Peer], nbytes: int, notify: Notify
) -> Iterator[list[tuple[str, Timed]]]:
    opened = []
    with contextlib.ExitStack() as stack:
        for name, peer in systems.items():
            try:
                opened.append((name, stack.enter_context(peer(nbytes))))
            except DpsError as problem:
                if name not in PEERS:
                    raise
                notify(f"{name} is left out: {problem}")
        yield opened


def _check(name: str, turn: Turn) -> None:
    first, last = turn.weights
    applied = LEARNING_RATE * (len(turn.seconds) - 1)
    if not np.isclose(first - last, applied, rtol=1e-3):
        raise DpsError(
            f"{name}: a weight went from {first:g} to {last:g} in {len(turn.seconds)} calls, "
            f"expected {first - applied:g}"
        )


def systems(transports: Sequence[TransportChoice]) -> dict[str, Peer]:
    """Return the peers that can be measured here, and dps with each of the transports.

    One of them is measured over TLS as well: the first that goes over a network.
    """
    found = {name: peer for name, peer in PEERS.items() if name not in missing()}
    found |= {ours(each): partial(parameter_server, transport=each) for each in transports}
    for each in [each for each in transports if each not in SAME_HOST][:1]:
        found[f"{ours(each)}, TLS"] = partial(parameter_server, transport=each, security=None)
    return found


def ours(transport: TransportChoice) -> str:
    """The name of dps with a transport among the systems."""
    return f"dps, {transport}"


def missing() -> list[str]:
    """The peers that are not installed."""
    return [peer for peer, (module, _) in NEEDS.items() if importlib.util.find_spec(module) is None]


# -- as text -----------------------------------------------------------------------------------


def table(found: Sequence[Measured], rounds: int) -> str:
    """The times, and those of dps as multiples of the others'."""
    others = [name for name in PEERS if any(name in each.seconds for each in found)]
    lines = [
        f"push + pull between two processes, float32, medians of {rounds} rounds in turn; every "
        "system applies the gradient (SGD)",
        "",
        f"{'':<7}{'':<26}{'ms':>9}   as a multiple of",
        " " * 42 + "".join(f"{name:>12}" for name in others),
    ]
    for each in found:
        for name in each.seconds:
            row = f"{each.size.name:<7}{name:<26}{each.milliseconds(name):>9.3f}"
            if name not in PEERS:
                row += "".join(_multiple(each, name, other) for other in others)
            lines.append(row)
        lines.append("")
    return "\n".join([*lines, *map(_absent, missing())]).rstrip()


def _multiple(found: Measured, name: str, other: str) -> str:
    return f"{found.ratio(name, other):>12.2f}" if other in found.seconds else f"{'-':>12}"


def _absent(peer: str) -> str:
    _, extra = NEEDS[peer]
    cure = f"in a clone of dps, pip install -e '.[{extra}]' has it measured as well"
    return f"{peer}: not installed; {cure}"


def verdicts(found: Sequence[Measured], targets: Sequence[Target] = TARGETS) -> str:
    """Return each measured target, and its margin."""
    lines = [f"{'target':<50}{'at most':>8}{'measured':>10}"]
    for target in targets:
        for each in (each for each in found if each.size == target.size):
            for name in [ours(t) for t in target.transports if ours(t) in each.seconds]:
                said = f"{target.size.name:<6} {name} / {target.other}"
                lines.append(f"{said:<50}{target.limit:>8g}{_verdict(each, name, target)}")
    return "\n".join(lines) if len(lines) > 1 else ""


def _verdict(found: Measured, name: str, target: Target) -> str:
    if target.other not in found.seconds:
        return f"{'-':>10}  not measured"
    ratio = found.ratio(name, target.other)
    said = "met" if ratio <= target.limit else "missed"
    return f"{ratio:>10.2f}  {said}, {ratio / target.limit:.2f} of the limit"
