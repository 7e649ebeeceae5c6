"""Workloads of torch modules: gradients are plain torch's, and what cannot work is refused."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dps.errors import ConfigurationError
from flows.workloads import SHAPES, Array, Arrays, DatasetShape, build_workload
from tests.support.needs_torch import needs_torch

pytestmark = needs_torch

SMALL = DatasetShape(features=12, classes=4)
MODULES = "tests.support.modules"


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
    fashion, digits = SHAPES["fashion_mnist"], SHAPES["digits"]
    return [
        pytest.param("cnn", fashion, {}, id="cnn"),
        pytest.param("cnn", fashion, {"relu_logits": True}, id="cnn with ReLU on the logits"),
        pytest.param("cnn", digits, {}, id="cnn on digits"),
        *(
            pytest.param("torch", SMALL, {"module": f"{MODULES}:{name}"}, id=name)
            for name in ("small", "tied", "double")
        ),
    ]


@pytest.mark.parametrize(("kind", "shape", "settings"), cases())
def test_they_are_bit_for_bit_those_of_plain_torch(
    kind: str, shape: DatasetShape, settings: dict[str, Any]
) -> None:
    workload = build_workload(kind, shape, **settings)
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


@pytest.mark.parametrize(("kind", "shape", "settings"), cases())
def test_they_are_the_same_in_every_call_and_leave_torchs_generator_alone(
    kind: str, shape: DatasetShape, settings: dict[str, Any]
) -> None:
    import torch

    workload, other = (build_workload(kind, shape, **settings) for _ in range(2))
    params = workload.initial(np.random.default_rng(0))
    assert_same(params, other.initial(np.random.default_rng(0)))
    for array in params.values():
        array.flags.writeable = False
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    x, y = a_batch(shape)
    _, first = workload.gradient(params, x, y)
    _, second = other.gradient(params, x, y)
    assert_same(first, second)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(("kind", "shape", "settings"), cases())
def test_threads_do_not_disturb_one_another(
    kind: str, shape: DatasetShape, settings: dict[str, Any]
) -> None:
    workload = build_workload(kind, shape, **settings)
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


@pytest.mark.parametrize(("kind", "shape", "settings"), cases())
def test_it_travels(kind: str, shape: DatasetShape, settings: dict[str, Any]) -> None:
    workload = build_workload(kind, shape, **settings)
    params = workload.initial(np.random.default_rng(0))
    x, y = a_batch(shape)
    workload.gradient(params, x, y)
    there = pickle.loads(pickle.dumps(workload))  # noqa: S301
    assert there == workload
    assert_same(there.gradient(params, x, y)[1], workload.gradient(params, x, y)[1])


@pytest.mark.parametrize("relu", [False, True])
def test_it_has_813258_parameters(relu: bool) -> None:
    workload = build_workload("cnn", SHAPES["fashion_mnist"], relu_logits=relu)
    params = workload.initial(np.random.default_rng(0))
    assert sum(array.size for array in params.values()) == 813_258
    assert {str(array.dtype) for array in params.values()} == {"float32"}


@pytest.mark.parametrize("relu", [False, True])
def test_its_scores_are_never_negative_with_a_relu_on_them(relu: bool) -> None:
    import torch

    from flows.workloads.torch_module import ConvNet

    scores = ConvNet(relu)(SHAPES["digits"])(torch.randn(64, 64))
    assert bool((scores < 0).any()) is not relu


@pytest.mark.parametrize("relu", [False, True])
def test_dropout_is_off_when_it_is_scored(relu: bool) -> None:
    workload = build_workload("cnn", SHAPES["digits"], relu_logits=relu)
    params = workload.initial(np.random.default_rng(0))
    x, y = a_batch(SHAPES["digits"])
    assert workload.evaluate(params, x, y) == workload.evaluate(params, x, y)
    alone = [workload.evaluate(params, x[i : i + 1], y[i : i + 1])[0] for i in range(len(y))]
    assert workload.evaluate(params, x, y)[0] == pytest.approx(np.mean(alone), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"module": f"{MODULES}:half"}, "0.weight is float16, expected float32 or float64"),
        ({"module": f"{MODULES}:normalised"}, "1 keeps running statistics"),
        ({"module": f"{MODULES}:no_module"}, "made str, expected an nn.Module"),
        ({"module": f"{MODULES}:NOT_CALLABLE"}, "is int, expected a callable"),
        ({"module": f"{MODULES}:nothing"}, "cannot be imported: AttributeError: .*nothing"),
        ({"module": "no.such.package:factory"}, "cannot be imported: .*No module named 'no'"),
        ({"module": "factory"}, "names nothing, expected 'module:name'"),
        ({"module": "no-package:factory"}, "names nothing, expected 'module:name'"),
        ({"module": f"{MODULES}:small", "loss": "torch:no_loss"}, "no_loss"),
    ],
)
def test_it_is_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build_workload("torch", SMALL, **settings).initial(np.random.default_rng(0))


def test_a_module_that_fails_when_it_is_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_fails.py").write_text("unknown\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"NameError: .*module_that_fails\.py, line 1\)"):
        build_workload("torch", SMALL, module="module_that_fails:factory")


def test_the_network_wants_squares() -> None:
    with pytest.raises(ConfigurationError, match="images of 12 pixels, expected squares"):
        build_workload("cnn", SMALL).initial(np.random.default_rng(0))
