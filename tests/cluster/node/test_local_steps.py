"""Local steps: workers push the decrease of their weights, as in Local SGD and DiLoCo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from distributed import Client

import dps
from dps import BSP, SGD, Accumulated, Momentum, ParameterServer, Worker
from dps.errors import ConfigurationError, NonFiniteGradient
from tests.cluster.node.test_torch import RATE, STEPS, arrays, backward, module
from tests.support.needs_torch import needs_torch
from tests.support.training import results, versions

pytestmark = [pytest.mark.cluster, *needs_torch]

OUTER = {"learning_rate": 0.7, "momentum": 0.9, "nesterov": True}
EXACT = 0.125  # a learning rate that rounds no product: torch rounds once, the server twice
H = 3  # local steps of an update, so that some are left at the end
WORKERS = 2


def inner(parameters: list[Any]) -> Any:
    import torch

    return torch.optim.AdamW(parameters, lr=0.01)


def sgd(rate: float, parameters: list[Any]) -> Any:
    import torch

    return torch.optim.SGD(parameters, rate)


def above_one() -> Any:
    """A module whose weights change by less than half in a step: their differences are exact."""
    import torch

    made = module()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(1.25 + parameter.abs().clamp(max=0.25))
    return made


def by_dps(
    make: Callable[[], Any], choices: Mapping[str, Any], worker: Worker
) -> dict[str, np.ndarray]:
    made = make()
    with dps.torch.attach(worker, made, **choices) as replica:
        for step in range(STEPS):
            backward(made, step, seed=worker.index)
            replica.step()
            assert all(parameter.grad is None for parameter in made.parameters())
    return arrays(made)


def by_torch(workers: int) -> dict[str, np.ndarray]:
    """DiLoCo as its authors write it, with torch alone (algorithm 1)."""
    import torch

    outer = module()
    rule = torch.optim.SGD(
        outer.parameters(), lr=OUTER["learning_rate"], momentum=OUTER["momentum"], nesterov=True
    )
    replicas = [module() for _ in range(workers)]
    optimizers = [inner(list(replica.parameters())) for replica in replicas]
    for step in range(STEPS):
        for index, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            backward(replica, step, seed=index)
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % H == 0 or step + 1 == STEPS:
            for name, parameter in outer.named_parameters():
                now = [dict(replica.named_parameters())[name].detach() for replica in replicas]
                parameter.grad = torch.stack([parameter.detach() - each for each in now]).mean(0)
            rule.step()
            for replica in replicas:
                replica.load_state_dict(outer.state_dict())
    return arrays(outer)


@pytest.mark.parametrize("shards", [1, 3])
def test_one_local_step_is_the_plain_rule_bit_for_bit(plain: Client, shards: int) -> None:
    start = dps.torch.parameters(above_one())
    local = {"inner": partial(sgd, EXACT), "local_steps": 1}
    found = []
    for rule, choices in ((SGD(EXACT), {}), (SGD(1.0), local)):
        with ParameterServer(plain, start, shards=shards, optimizer=rule) as ps:
            results(ps.run(partial(by_dps, above_one, choices), workers=1))
            found.append(ps.pull())
    for name, array in found[0].items():
        np.testing.assert_array_equal(found[1][name], array)
        assert (array != start[name]).any()


@pytest.mark.parametrize("workers", [1, WORKERS])
def test_workers_that_are_averaged_are_trained_as_by_diloco(plain: Client, workers: int) -> None:
    start, rule = dps.torch.parameters(module()), Accumulated(Momentum(**OUTER), workers)
    train = partial(by_dps, module, {"inner": inner, "local_steps": H})
    with ParameterServer(plain, start, shards=2, optimizer=rule, consistency=BSP()) as ps:
        results(ps.run(train, workers=workers))
        found, updates = ps.pull(), [reply.version for reply in ps.audit() if reply is not None]
    assert updates == [workers * 3] * 2  # those after 3, 6 and 8 steps
    expected = by_torch(workers)
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("filtered", [False, True])
def test_what_filters_withhold_of_local_steps_is_sent_at_the_end(
    plain: Client, filtered: bool
) -> None:
    start = dps.torch.parameters(module())
    choices: dict[str, Any] = {"filters": {"*": [dps.Quantise("bf16")]}} if filtered else {}
    train = partial(by_dps, module, {"inner": inner, "local_steps": H})
    with ParameterServer(plain, start, optimizer=SGD(1.0), **choices) as ps:
        results(ps.run(train, workers=1))
        found = ps.pull()
    made = module()
    optimizer = inner(list(made.parameters()))
    for step in range(STEPS):
        backward(made, step)
        optimizer.step()
        optimizer.zero_grad()
    for name, array in found.items():
        close = 1e-2 if filtered else 1e-5  # the worker computed on rounded weights
        np.testing.assert_allclose(array, arrays(made)[name], atol=close, err_msg=name)


def test_local_steps_that_cannot_be_sent_are_undone(plain: Client) -> None:
    def train(worker: Worker) -> tuple[list[dict[str, np.ndarray]], int]:
        import torch

        made, found = module(), []
        with dps.torch.attach(worker, made, inner=partial(sgd, RATE), local_steps=2) as replica:
            found.append(arrays(made))
            backward(made, 0)
            made[3].bias.grad[0] = float("nan")
            replica.step()
            assert torch.isnan(replica.state_dict()["3.bias"][0])
            assert worker.pushed == 0
            backward(made, 1)
            with pytest.raises(NonFiniteGradient):
                replica.step()
            found.append(arrays(made))
            for step in range(2):
                backward(made, step)
                replica.step()
        found.append(arrays(made))
        return found, worker.pushed

    with ParameterServer(plain, dps.torch.parameters(module()), optimizer=SGD(1.0)) as ps:
        (((start, undone, last), pushed),) = results(ps.run(train, workers=1))
        pulled = ps.pull()
        assert versions(ps) == [1]
    assert pushed == 2  # one of which was refused
    for name, array in pulled.items():
        np.testing.assert_array_equal(undone[name], start[name])
        np.testing.assert_array_equal(last[name], array)
        assert (array != start[name]).any()


def test_what_the_server_does_not_train_takes_no_local_steps(plain: Client) -> None:
    rule = {"0.*": dps.Frozen(), "*": SGD(1.0)}
    start = dps.torch.parameters(module())
    with ParameterServer(plain, start, optimizer=rule) as ps:
        train = partial(by_dps, module, {"inner": inner, "local_steps": STEPS + 1})
        (found,) = results(ps.run(train, workers=1))
    np.testing.assert_array_equal(found["0.weight"], start["0.weight"])
    assert (found["3.weight"] != start["3.weight"]).any()


def test_a_scheduler_of_torch_changes_the_inner_learning_rate(plain: Client) -> None:
    def train(worker: Worker) -> list[float]:
        import torch

        made, rates = module(), []
        with dps.torch.attach(worker, made, inner=partial(sgd, RATE), local_steps=2) as replica:
            scheduler = torch.optim.lr_scheduler.StepLR(replica.inner, step_size=1, gamma=0.5)
            for step in range(3):
                backward(made, step)
                replica.step()
                scheduler.step()
                rates.append(replica.inner.param_groups[0]["lr"])
        return rates

    with ParameterServer(plain, dps.torch.parameters(module()), optimizer=SGD(1.0)) as ps:
        assert results(ps.run(train, workers=1)) == [[RATE / 2, RATE / 4, RATE / 8]]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"local_steps": 2}, r"local_steps=2 needs inner=…, an optimizer of torch"),
        ({"inner": list}, r"inner=.*, expected a function from parameters"),
        ({"inner": inner, "ahead": 1}, r"ahead=1: .* expected 0 with inner"),
    ],
)
def test_wrong_arguments_are_refused(plain: Client, choices: dict[str, Any], message: str) -> None:
    with ParameterServer(plain, dps.torch.parameters(module()), optimizer=SGD(1.0)) as ps:
        (future,) = ps.run(partial(by_dps, module, choices), workers=1)
        with pytest.raises(ConfigurationError, match=message):
            future.result()
