"""Workloads of torch modules: gradients are plain torch's, and what cannot work is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dps.errors import ConfigurationError
from flows.workloads import Array, Arrays, DatasetShape, Digits, FashionMnist
from flows.workloads.with_torch import torch_module
from tests.support.needs_torch import needs_torch

pytestmark = needs_torch

SMALL = DatasetShape(features=12, classes=4)
MODULES = "tests.support.modules"
CONV_NET = "flows.workloads.torch_module:conv_net"


def a_batch(shape: DatasetShape, rows: int = 32, seed: int = 0) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, shape.features)).astype(np.float32)
    return x, rng.integers(0, shape.classes, rows)


def assert_same(first: Arrays, second: Arrays) -> None:
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def torchs_own(workload: Any, params: Arrays, x: Array, y: Array) -> tuple[float, Arrays]:
    """Loss and gradients by backpropagation as a user of torch writes it."""
    import torch

    from flows.workloads.torch_module import batch_seed

    module = workload.module(workload.shape)
    module.load_state_dict({k: torch.tensor(v) for k, v in params.items()}, strict=False)
    module.train()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(batch_seed(x, y))
    loss = workload.loss(
        module(torch.tensor(x).to(next(module.parameters()).dtype)), torch.tensor(y)
    )
    loss.backward()
    torch.set_num_threads(threads)
    zeros = {name: np.zeros_like(array) for name, array in params.items()}
    found = {k: p.grad.numpy() for k, p in module.named_parameters() if p.grad is not None}
    return float(loss), {**zeros, **found}


def cases() -> list[Any]:
    fashion, digits = FashionMnist.shape, Digits.shape
    return [
        pytest.param(fashion, {"module": CONV_NET}, id="conv_net"),
        pytest.param(digits, {"module": CONV_NET}, id="conv_net on digits"),
        *(
            pytest.param(SMALL, {"module": f"{MODULES}:{name}"}, id=name)
            for name in ("small", "tied", "double")
        ),
    ]


@pytest.mark.parametrize(("shape", "settings"), cases())
def test_they_are_bit_for_bit_those_of_plain_torch(
    shape: DatasetShape, settings: dict[str, Any]
) -> None:
    workload = torch_module(shape, **settings)
    params = workload.initial(np.random.default_rng(0))
    for step in range(3):
        x, y = a_batch(shape, seed=step)
        loss, gradients = workload.gradient(params, x, y)
        plain_loss, plain = torchs_own(workload, params, x, y)
        assert loss == plain_loss
        assert_same(gradients, plain)
        params = {
            name: params[name] - params[name].dtype.type(0.1) * gradients[name] for name in params
        }


@pytest.mark.parametrize(("shape", "settings"), cases())
def test_threads_do_not_disturb_one_another(shape: DatasetShape, settings: dict[str, Any]) -> None:
    workload = torch_module(shape, **settings)
    params = workload.initial(np.random.default_rng(0))
    draws = [a_batch(shape, rows=8, seed=seed) for seed in range(4)]
    alone = [workload.gradient(params, x, y)[1] for x, y in draws]
    scores = workload.evaluate(params, *draws[0])
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda draw: workload.gradient(params, *draw)[1], draws))
        assert list(pool.map(lambda _: workload.evaluate(params, *draws[0]), range(2))) == [
            scores,
            scores,
        ]
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)


def test_dropout_is_off_when_it_is_scored() -> None:
    workload = torch_module(Digits.shape, module=CONV_NET)
    params = workload.initial(np.random.default_rng(0))
    x, y = a_batch(Digits.shape)
    assert workload.evaluate(params, x, y) == workload.evaluate(params, x, y)
    alone = [workload.evaluate(params, x[i : i + 1], y[i : i + 1])[0] for i in range(len(y))]
    assert workload.evaluate(params, x, y)[0] == pytest.approx(np.mean(alone), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"module": f"{MODULES}:normalised"}, "1 has running statistics"),
        ({"module": f"{MODULES}:no_module"}, "made str, expected an nn.Module"),
        ({"module": f"{MODULES}:nothing"}, "cannot be imported: AttributeError: .*nothing"),
        ({"module": "factory"}, "is incomplete, expected 'module:name'"),
        ({"module": f"{MODULES}:small", "loss": "torch:no_loss"}, "no_loss"),
    ],
)
def test_it_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        torch_module(SMALL, **settings).initial(np.random.default_rng(0))
