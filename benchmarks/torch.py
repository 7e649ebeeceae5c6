"""`make bench-torch`: torch modules as replicas of a server, compared with the bare loop.

One worker trains on one core, or on a CUDA device where there is one. In its process the bare loop
with torch's own optimizer and the loop on the parameter server take turns in short rounds, so that
other work on the machine slows both. The ratio within a round is reported. Afterwards, some steps
are profiled in the training thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from cProfile import Profile
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec
from dps.cluster.node.worker import Worker
from dps.core.filters.filter import Filter, Quantise
from dps.core.rules.rule import SGD
from dps.recovery.chain import Chain
from dps.recovery.strategy import Recovery
from flows.workloads.with_torch import need_torch

ROUNDS = 7
LEARNING_RATE = 0.01
VOCABULARY = 512
MEGABYTE = 1e6
# The phases of a step, each with the files and names of its functions on the host and on a device,
# where gradients are cut as they are collected. The rest of the time passes with waiting.
PHASES = {
    "computing": (("benchmarks/torch.py", "backward"),),
    "gradients to memory that is sent": (
        ("dps/torch.py", "collected"),
        ("torch_device.py", "parts"),
    ),
    "checking, cutting": (("client/encoder.py", "split"),),
    "weights from the server": (("core/blocks.py", "fill"), ("torch_device.py", "fill")),
    "weights to the module": (("dps/torch.py", "load"), ("torch_device.py", "load")),
}
REST = "filters, transfer, server"

Notify = Callable[[str], None]
Step = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Model:
    """A module, and the settings of its training.

    `width` and `layers` are those of a transformer; the CNN has a shape of its own. With
    `as_device`, gradients and weights on the CPU take the path of those on a CUDA device.
    """

    name: str
    device: str
    calls: int
    batch: int
    width: int = 0
    layers: int = 0
    tokens: int = 0
    as_device: bool = False

    @property
    def place(self) -> str:
        """Where it computes, and how its gradients are handled."""
        return f"{self.device}, as CUDA" if self.as_device else self.device


@dataclass(frozen=True, slots=True)
class Variant:
    """How a replica is kept, and the share of the bare loop's speed that is wanted on the CPU."""

    name: str
    recovery: Recovery = field(default_factory=Recovery)
    ahead: int = 0
    filters: dict[str, list[Filter]] = field(default_factory=dict)
    target: float | None = None


ON_CPU = (
    Model("CNN", "cpu", 30, 64),
    Model("transformer", "cpu", 5, 8, width=256, layers=4, tokens=64),
    Model("transformer", "cpu", 5, 8, width=256, layers=4, tokens=64, as_device=True),
)
ON_CUDA = (
    Model("CNN", "cuda", 100, 64),
    Model("transformer", "cuda", 20, 32, width=768, layers=4, tokens=128),
)
VARIANTS = (
    Variant("none", target=0.85),
    Variant("none, ahead 1", ahead=1),
    Variant("none, ahead 1, bf16", ahead=1, filters={"*": [Quantise("bf16")]}),
    Variant("chain(2)", Recovery(Chain(2)), target=0.75),
    Variant("chain(2), ahead 1", Recovery(Chain(2)), ahead=1),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One model and variant: seconds of a step in the bare loop and on the server, by round.

    `phases` are the seconds that the parts of a step take, a little longer for being profiled.
    """

    model: Model
    variant: Variant
    nbytes: int
    bare: Sequence[float]
    replica: Sequence[float]
    phases: Mapping[str, float]

    @property
    def share(self) -> float:
        """Of the bare loop's speed."""
        return statistics.median(b / r for b, r in zip(self.bare, self.replica, strict=True))


def measure(notify: Notify, rounds: int = ROUNDS) -> list[Row]:
    """Time every variant of every model that can be trained here.

    Raises `ConfigurationError` if torch is not installed.
    """
    need_torch()
    has_cuda = import_module("torch").cuda.is_available()
    rows = []
    for model in (*ON_CPU, *(ON_CUDA if has_cuda else ())):
        for variant in VARIANTS:
            rows.append(timed(model, variant, rounds))
            notify(f"{model.name} on {model.place}, {variant.name}: {rows[-1].share:.2f} of bare")
    return rows


def timed(model: Model, variant: Variant, rounds: int = ROUNDS) -> Row:
    """Time one variant of one model, the first round not counted: it maps memory and connects."""
    import dps.torch

    start = dps.torch.parameters(made(model))
    replicas = range(1, variant.recovery.durability.above.replicas)
    names = ["server-0", *(f"replica-0-{number}" for number in replicas)]
    nodes = [NodeSpec(name, "server") for name in names] + [NodeSpec("worker-0", "worker")]
    preload = ("dps.cluster.driver.parameter_server", "dps.torch", __name__)
    with (
        LocalCluster(nodes, preload) as cluster,
        ParameterServer(
            cluster.client,
            start,
            optimizer=SGD(LEARNING_RATE),
            recovery=variant.recovery,
            filters=variant.filters,
        ) as ps,
    ):
        (future,) = ps.run(partial(_train, model, variant.ahead, rounds + 1), workers=1)
        turns, phases = future.result()
    bare, replica = zip(*turns[1:], strict=True)
    nbytes = sum(array.nbytes for array in start.values())
    return Row(model, variant, nbytes, bare, replica, phases)


def table(rows: Sequence[Row]) -> str:
    """The rows as text, each with its share of the bare loop's speed."""
    rounds = len(rows[0].bare)
    lines = [
        f"one worker on one core, one server, float32, medians of {rounds} rounds in turn with the",
        "bare loop of the same module (SGD) in the same process; connections over TLS",
        "",
        f"{'module':<12} {'on':<12} {'MB':>6} {'strategy':<20} {'bare':>9} {'dps':>9}  of bare",
    ]
    for row in rows:
        bare, replica = (1e3 * statistics.median(t) for t in (row.bare, row.replica))
        target = row.variant.target if row.model.name == "CNN" else None
        verdict = ""
        if target is not None and row.model.device == "cpu":
            verdict = f" ≥ {target:g} {'met' if row.share >= target else 'missed'}"
        lines.append(
            f"{row.model.name:<12} {row.model.place:<12} {row.nbytes / MEGABYTE:>6.1f} "
            f"{row.variant.name:<20} {bare:>6.1f} ms {replica:>6.1f} ms {row.share:>8.2f}{verdict}"
        )
    if not any(row.model.device == "cuda" for row in rows):
        lines += ["", "No CUDA device is there: measured on the CPU alone"]
    lines += ["", "milliseconds of one step, in the thread that trains:"]
    lines += [f"{'module':<12} {'on':<12} {'strategy':<20} " + "  ".join((*PHASES, REST))]
    for row in rows:
        parts = (f"{1e3 * row.phases[name]:>{len(name)}.2f}" for name in (*PHASES, REST))
        where = f"{row.model.name:<12} {row.model.place:<12} {row.variant.name:<20} "
        lines.append(where + "  ".join(parts))
    return "\n".join(lines)


# -- what is trained -------------------------------------------------------------------------------


def made(model: Model) -> Any:
    """Return a fresh module, on its device; the same one each time."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if not model.layers:
        from flows.workloads.base import DatasetShape
        from flows.workloads.torch_module import conv_net

        return conv_net(DatasetShape(784, 10)).to(model.device)
    layer = nn.TransformerEncoderLayer(
        model.width, 8, 4 * model.width, dropout=0.0, batch_first=True
    )
    return nn.Sequential(
        nn.Embedding(VOCABULARY, model.width),
        nn.TransformerEncoder(layer, model.layers, enable_nested_tensor=False),
        nn.Linear(model.width, VOCABULARY),
    ).to(model.device)


def _backward(model: Model, module: Any) -> Step:
    """Return what computes the gradients of a batch."""
    import torch

    random = np.random.default_rng(0)
    if model.layers:
        x = torch.tensor(random.integers(VOCABULARY, size=(model.batch, model.tokens)))
        y = x.roll(-1, dims=1)
    else:
        x = torch.tensor(random.random((model.batch, 784), np.float32))
        y = torch.tensor(random.integers(10, size=model.batch))
    x, y = x.to(model.device), y.to(model.device)

    def backward() -> None:
        scores = module(x)
        torch.nn.functional.cross_entropy(scores.flatten(0, -2), y.flatten()).backward()

    return backward


def _train(
    model: Model, ahead: int, rounds: int, worker: Worker
) -> tuple[list[tuple[float, float]], dict[str, float]]:
    """Take turns; return the seconds of a step in the bare loop and on the server, and phases."""
    import torch

    import dps.torch

    torch.set_num_threads(1)
    if model.as_device:
        dps.torch.MEMORIES["cpu"] = dps.torch.MEMORIES["cuda"]
    alone, attached = made(model), made(model)
    optimizer = torch.optim.SGD(alone.parameters(), LEARNING_RATE)
    replica = dps.torch.attach(worker, attached, ahead=ahead)
    bare_backward, backward = _backward(model, alone), _backward(model, attached)

    def bare_step() -> None:
        optimizer.zero_grad()
        bare_backward()
        optimizer.step()

    def step() -> None:
        backward()
        replica.step()

    def settle() -> None:
        if model.device == "cuda":
            torch.cuda.synchronize()

    def both() -> tuple[float, float]:
        bare = seconds(bare_step, settle, model.calls)
        return bare, seconds(step, replica.drain, model.calls)

    turns = [both() for _ in range(rounds)]
    return turns, phases_of(step, model.calls)


def phases_of(step: Step, calls: int) -> dict[str, float]:
    """Return the seconds that the parts of a step take on average."""
    profile = Profile()
    began = time.perf_counter()
    for _ in range(calls):
        profile.runcall(step)
    whole = time.perf_counter() - began
    profile.create_stats()
    taken = dict.fromkeys(PHASES, 0.0)
    for (file, _, name), (_, _, _, cumulative, _) in profile.stats.items():
        for phase, functions in PHASES.items():
            if any(name == what and file.endswith(where) for where, what in functions):
                # The largest: `Encoder.split` calls the function `split`.
                taken[phase] = max(taken[phase], cumulative)
    taken[REST] = max(0.0, whole - sum(taken.values()))
    return {phase: total / calls for phase, total in taken.items()}


def seconds(step: Step, settle: Step, calls: int) -> float:
    """How long a step takes on average; `settle` is waited for before and after them all."""
    settle()
    began = time.perf_counter()
    for _ in range(calls):
        step()
    settle()
    return (time.perf_counter() - began) / calls
