"""The path of gradients and weights on a device, with the CPU as the device.

It does what the path on the host does: the same bytes are sent, and the same is withheld.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from distributed import Client

import dps
from dps import Momentum, ParameterServer, Worker
from dps.core.blocks import Layout
from dps.core.filters.chain import Outbox, checked
from dps.core.filters.filter import Filter
from dps.core.rules.wrappers import Clipped
from dps.core.updates import Operation, UpdateId
from dps.errors import NonFiniteGradient
from dps.protocol.client.encoder import split
from dps.protocol.compression import dense
from tests.cluster.node.test_torch import arrays, backward, by_dps, module, now_and_then, scaled
from tests.core.test_filters import CHAINS
from tests.support.needs_torch import needs_torch
from tests.support.training import results

pytestmark = [pytest.mark.cluster, *needs_torch]

RATE = 0.1
SHAPES = {"a": (50, 40), "b": (7,), "c": (3, 1000), "d": (1,), "e": (2, 2)}
DTYPES = dict.fromkeys(SHAPES, "float32") | {"b": "float64", "d": "float64"}
KKT: list[Filter] = [dps.KKT(1.0), dps.SignificantlyModified(0.5)]
# Arrays of which each has a gradient, in turn: neighbours come and go.
TURNS = ("abcde", "ace", "abcde", "bd", "c", "abcde")


def layout(shards: int = 1) -> Layout:
    return Layout.of({n: np.zeros(s, DTYPES[n]) for n, s in SHAPES.items()}, shards)


def gradients(names: Sequence[str], seed: int, dtypes: Mapping[str, str] = DTYPES) -> Any:
    random = np.random.default_rng(seed)
    values = {name: random.normal(0, 2, SHAPES[name]) for name in SHAPES}
    return {name: values[name].astype(dtypes[name]) for name in names}


def on_the_device(of: Mapping[str, np.ndarray], layout: Layout) -> Any:
    """Return the memory of a module with these parameters, without a worker, and tensors of it."""
    import torch

    from dps.torch_device import DeviceGradients, DeviceMemory

    class Nobody:
        def __init__(self) -> None:
            self.layout = layout

        def filter_by(self, make: Any) -> None:
            pass

    trained = {name: torch.zeros(SHAPES[name], dtype=getattr(torch, DTYPES[name])) for name in of}
    nobody: Any = Nobody()
    memory = DeviceMemory(layout.flat(of), trained, nobody)
    return DeviceGradients({name: torch.tensor(array) for name, array in of.items()}, memory)


def outboxes(filters: Sequence[Filter], old: Outbox | None = None) -> tuple[Outbox, Outbox]:
    """Return one that filters on the host, and one that filters on the device."""
    import torch

    from dps.torch_device import Accelerator, DeviceOutbox

    rule = dps.Proximal(RATE, dps.L1(1.0))
    chains, device = checked({"*": filters}, SHAPES, rule), Accelerator(torch.device("cpu"))
    return Outbox(layout(), 0, chains), DeviceOutbox(device, layout(), 0, chains, np.empty, old)


@pytest.mark.parametrize("chain", [*CHAINS.values(), KKT], ids=[*CHAINS, "KKT"])
def test_the_same_is_sent_and_withheld_as_by_filters_on_the_host(chain: list[Filter]) -> None:
    host, device = outboxes(chain)
    weights = layout().gather(0, gradients("abcde", 99))[0]
    for seq, names in enumerate(TURNS, 1):
        of = gradients(names, seq)
        number = UpdateId("a", 1, seq)
        buffer, pieces = layout().gather(0, of)
        parts = on_the_device(of, layout()).parts([*of], None)
        ops = [
            Operation("gradient", number, pieces=pieces, gradient=buffer),
            Operation("gradient", number, pieces=parts[0][1], gradient=parts[0][0]),
        ]
        both = [box.prepared(op, weights) for box, op in zip((host, device), ops, strict=True)]
        for box, one in zip((host, device), both, strict=True):
            box.commit(one)
        left, right = (one.operation for one in both)
        assert left.codec == right.codec
        assert left.gradient is not None
        assert right.gradient is not None
        assert left.gradient.tobytes() == right.gradient.tobytes()
        assert both[0].counts == both[1].counts
        assert_same(host.withheld(), device.withheld())
        assert device.residual_norm == pytest.approx(host.residual_norm, rel=1e-6)
    if host.withheld():
        last = Operation("gradient", UpdateId("a", 1, 9))
        left, right = (box.remainder(last).operation for box in (host, device))
        assert left.codec == right.codec
        assert left.gradient is not None
        assert right.gradient is not None
        assert left.gradient.tobytes() == right.gradient.tobytes()
        device.commit(device.remainder(last))
        assert not device.withheld()


def assert_same(left: Mapping[str, np.ndarray], right: Mapping[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


def test_int8_is_unbiased_and_off_by_less_than_a_step() -> None:
    _, device = outboxes([dps.Quantise("int8")])
    of = gradients("abcde", 1)
    buffer, _ = layout().gather(0, of)
    whole = layout().scatter({0: buffer})
    sums = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    draws = 200
    for seq in range(1, draws + 1):
        op = Operation("gradient", UpdateId("a", 1, seq), gradient=buffer.copy())
        found = dense(layout().shards[0], device.prepared(op, None).operation)
        assert found.gradient is not None
        decoded = layout().scatter({0: found.gradient})
        for name in SHAPES:
            step = np.abs(whole[name]).max() / 127
            assert np.abs(decoded[name] - whole[name]).max() <= step * 1.001
            sums[name] += decoded[name] - whole[name]
    for name in SHAPES:
        # The mean of many draws is within five standard errors, a step's half at most each.
        limit = 5 * 0.5 * np.abs(whole[name]).max() / 127 / np.sqrt(draws)
        assert np.abs(sums[name] / draws).max() < limit


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("doubles", [1.0, 1e-300, 1e200])
@pytest.mark.parametrize(
    ("norm", "value"), [(1.0, None), (None, 0.5), (2.0, 1.5), (1e6, None), (1.0, 1e-3), (1.0, 1e99)]
)
def test_gradients_are_clipped_as_on_the_host(
    shards: int, doubles: float, norm: float | None, value: float | None
) -> None:
    rule = Clipped(dps.SGD(RATE), norm=norm, value=value)
    of, placed = gradients("abde", 3), layout(shards)
    of = {name: a * doubles if a.dtype == np.float64 else a for name, a in of.items()}
    expected = split(placed, rule, of)
    parts = on_the_device(of, placed).parts([*of], rule)
    assert parts.keys() == expected.dense.keys()
    for shard, (part, pieces) in parts.items():
        buffer, same = expected.dense[shard]
        assert pieces == same
        found = part.tensor.numpy()
        for dtype, (begin, end) in extents(placed, shard, pieces).items():
            close = 1e-6 if dtype == "float32" else 1e-12
            np.testing.assert_allclose(
                found[begin:end].view(dtype), buffer[begin:end].view(dtype), rtol=close
            )


def extents(placed: Layout, shard: int, pieces: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for piece, where in placed.shards[shard].packed(pieces):
        begin, _ = found.get(piece.block.dtype, (where.start, 0))
        found[piece.block.dtype] = begin, where.stop
    return found


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_refused_before_anything_is_kept(bad: float) -> None:
    _, device = outboxes([dps.Quantise("bf16")])
    of = gradients("abcde", 1)
    of["c"][1, 3] = bad
    rule = Clipped(dps.SGD(RATE), norm=1.0, value=0.5)
    ((part, _),) = on_the_device(of, layout()).parts([*of], rule).values()
    with pytest.raises(NonFiniteGradient, match="'c' holds NaN"):
        device.prepared(Operation("gradient", UpdateId("a", 1, 1), gradient=part), None)
    assert not device.withheld()


def test_what_was_withheld_on_the_host_is_taken_over() -> None:
    host, _ = outboxes([dps.Quantise("bf16")])
    buffer, _ = layout().gather(0, gradients("abcde", 1))
    host.commit(host.prepared(Operation("gradient", UpdateId("a", 1, 1), gradient=buffer), None))
    _, device = outboxes([dps.Quantise("bf16")], old=host)
    assert_same(host.withheld(), device.withheld())
    assert device.residual_norm == pytest.approx(host.residual_norm, rel=1e-6)
    assert device.counts == host.counts


def on_device(train: Callable[[Worker], Any], worker: Worker) -> Any:
    """Train with the memory of a CUDA device, on the CPU."""
    from dps.torch import MEMORIES

    before, MEMORIES["cpu"] = MEMORIES["cpu"], MEMORIES["cuda"]
    try:
        return train(worker)
    finally:
        MEMORIES["cpu"] = before


CHOICES: dict[str, tuple[Callable[[Worker], Any], dict[str, Any]]] = {
    "plain": (partial(by_dps, module, {}), {}),
    "float64": (partial(by_dps, partial(module, dtype="float64"), {}), {}),
    "bfloat16": (partial(by_dps, partial(module, dtype="bfloat16"), {}), {}),
    "momentum, now and then": (now_and_then, {"optimizer": Momentum(RATE)}),
    "clipped": (partial(by_dps, module, {}), {"optimizer": Clipped(dps.SGD(RATE), norm=0.5)}),
    "a scaler": (scaled, {}),
    "a frozen layer": (
        partial(by_dps, module, {}),
        {"optimizer": dps.PerArray((("3.bias", dps.Frozen()), ("*", dps.SGD(RATE))))},
    ),
    "bf16": (partial(by_dps, module, {}), {"filters": {"*": [dps.Quantise("bf16")]}}),
    "top-k, lossless": (
        partial(by_dps, module, {}),
        {"filters": {"0.weight": [dps.TopK(0.2), dps.Lossless()]}},
    ),
}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("case", CHOICES)
def test_a_module_is_trained_as_on_the_host(plain: Client, case: str, shards: int) -> None:
    train, choices = CHOICES[case]
    dtype = case if case in ("float64", "bfloat16") else "float32"
    start = dps.torch.parameters(module(dtype=dtype))
    found = []
    for each in (train, partial(on_device, train)):
        with ParameterServer(
            plain, start, shards=shards, **{"optimizer": dps.SGD(RATE), **choices}
        ) as ps:
            (result,) = results(ps.run(each))
            found.append((result if isinstance(result, dict) else result[0], ps.pull()))
    (host, on_host), (device, on_server) = found
    close = 1e-6 if case == "clipped" else 0
    for name in host:
        np.testing.assert_allclose(device[name], host[name], atol=close, err_msg=name)
    for name in on_host:
        np.testing.assert_allclose(on_server[name], on_host[name], atol=close, err_msg=name)


def ahead(worker: Worker) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train with two updates under way; return the weights at the end, there and on the server."""
    made = module()
    with dps.torch.attach(worker, made, ahead=2) as replica:
        for step in range(20):
            backward(made, step)
            replica.step()
        replica.drain()
        on_server = worker.pull()
    return arrays(made), on_server


def test_a_module_may_be_ahead_on_a_device(plain: Client) -> None:
    start = dps.torch.parameters(module())
    filters: Any = {"*": [dps.Quantise("bf16")]}
    with ParameterServer(plain, start, shards=2, optimizer=dps.SGD(RATE), filters=filters) as ps:
        ((found, on_server),) = results(ps.run(partial(on_device, ahead)))
        assert [reply.version for reply in ps.audit() if reply] == [20 + 1] * 2
    for name, array in on_server.items():
        np.testing.assert_array_equal(found[name], array)


def with_arrays_afterwards(worker: Worker) -> None:
    """Push arrays once the module has been trained on a device, whose filters stay in use."""
    made = module()
    with dps.torch.attach(worker, made) as replica:
        backward(made, 0)
        replica.step()
    worker.push({"3.bias": np.ones(3, np.float32)})


@pytest.mark.parametrize("filters", [None, {"*": [dps.Quantise("bf16")]}])
def test_arrays_may_be_pushed_beside_a_module(plain: Client, filters: Any) -> None:
    start = dps.torch.parameters(module())
    with ParameterServer(plain, start, shards=2, optimizer=dps.SGD(RATE), filters=filters) as ps:
        results(ps.run(partial(on_device, with_arrays_afterwards)))
        moved = ps.pull()["3.bias"] - start["3.bias"]
    assert (moved < -RATE / 2).all()
