"""Modules of torch on a parameter server: trained as by torch's optimizers, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
from distributed import Client

import dps
from dps import SGD, Momentum, ParameterServer, Worker
from dps.errors import ConfigurationError, GroupClosed
from tests.cluster.node.test_pipeline import staleness
from tests.support.needs_torch import needs_torch
from tests.support.training import Events, results

pytestmark = [pytest.mark.cluster, *needs_torch]

RATE = 0.1
STEPS = 8


def module(seed: int = 0, dtype: str = "float32", norm: bool = False) -> Any:
    """A small network, of two dtypes if it is of float64, with a tied and a frozen parameter."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    made = nn.Sequential(
        nn.Linear(6, 6), nn.BatchNorm1d(6) if norm else nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)
    ).to(getattr(torch, dtype))
    made[2].weight = made[0].weight
    made[0].bias.requires_grad_(False)
    return made


def batch(step: int, dtype: Any, seed: int = 0) -> tuple[Any, Any]:
    import torch

    random = np.random.default_rng([seed, step])
    x = torch.tensor(random.normal(size=(16, 6))).to(dtype)
    return x, torch.tensor(random.integers(3, size=16))


def backward(made: Any, step: int, seed: int = 0) -> float:
    import torch

    x, y = batch(step, made[0].weight.dtype, seed)
    loss = torch.nn.functional.cross_entropy(made(x).float(), y)
    loss.backward()
    return float(loss.item())


def arrays(made: Any) -> dict[str, np.ndarray]:
    return {n: p.detach().float().numpy().copy() for n, p in made.state_dict().items()}


def by_torch(made: Any) -> dict[str, np.ndarray]:
    import torch

    optimizer = torch.optim.SGD(made.parameters(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(made, step)
        optimizer.step()
    return arrays(made)


def by_dps(make: Callable[[], Any], choices: Mapping[str, Any], worker: Worker) -> dict[str, Any]:
    made = make()
    with dps.torch.attach(worker, made, **choices) as replica:
        for step in range(STEPS):
            backward(made, step)
            replica.step()
            assert all(parameter.grad is None for parameter in made.parameters())
    return arrays(made)


@pytest.mark.parametrize(("shards", "dtype"), [(1, "float32"), (3, "float64"), (3, "bfloat16")])
def test_a_replica_is_trained_as_by_torchs_own_optimizer(
    plain: Client, shards: int, dtype: str
) -> None:
    make = partial(module, dtype=dtype)
    start = dps.torch.parameters(make())
    assert "0.bias" not in start
    assert set(map(str, (a.dtype for a in start.values()))) == {
        dtype.replace("bfloat16", "float32")
    }
    with ParameterServer(plain, start, shards=shards, optimizer=SGD(RATE)) as ps:
        (found,) = results(ps.run(partial(by_dps, make, {})))
        pulled = ps.pull()
    expected = by_torch(make())
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        # A server keeps float32 where torch's optimizer rounds bfloat16 at each step.
        close = 0.05 if dtype == "bfloat16" else 1e-6
        np.testing.assert_allclose(found[name], array, atol=close, err_msg=name)
        if name in pulled:
            np.testing.assert_allclose(found[name], pulled[name], atol=close / 10)
    moved = np.abs(found["0.weight"] - arrays(make())["0.weight"]).max()
    assert moved > 0.01


def test_a_replica_may_be_ahead_and_is_drained_at_the_end(plain: Client) -> None:
    events = Events()
    start = dps.torch.parameters(module())
    with ParameterServer(plain, start, optimizer=SGD(RATE), on_event=events) as ps:
        (found,) = results(ps.run(partial(by_dps, module, {"ahead": 2})))
        for name, array in ps.pull().items():
            np.testing.assert_array_equal(found[name], array)
        assert len(staleness(events, STEPS)) == STEPS
        assert max(staleness(events, STEPS)) <= 2
    with (
        ParameterServer(plain, start, consistency=dps.BSP()) as ps,
        pytest.raises(ConfigurationError, match=r"ahead=2, but under BSP"),
    ):
        results(ps.run(partial(by_dps, module, {"ahead": 2})))


def now_and_then(worker: Worker) -> dict[str, np.ndarray]:
    """The last layer is trained for two steps, frozen for three and trained again."""
    made = module()
    with dps.torch.attach(worker, made) as replica:
        for step in range(STEPS):
            made[3].requires_grad_(not 2 <= step < 5)
            backward(made, step)
            replica.step()
    return arrays(made)


def test_a_parameter_without_a_gradient_keeps_its_optimizer_state_as_in_torch(
    plain: Client,
) -> None:
    import torch

    start = dps.torch.parameters(module())
    with ParameterServer(plain, start, shards=3, optimizer=Momentum(RATE)) as ps:
        (found,) = results(ps.run(now_and_then))
    made = module()
    optimizer = torch.optim.SGD(made.parameters(), RATE, momentum=0.9)
    for step in range(STEPS):
        made[3].requires_grad_(not 2 <= step < 5)
        optimizer.zero_grad()
        backward(made, step)
        optimizer.step()
    for name, array in arrays(made).items():
        np.testing.assert_allclose(found[name], array, atol=1e-5, err_msg=name)


def scaled(worker: Worker) -> tuple[dict[str, np.ndarray], list[float]]:
    """Train with a scaler of gradients, which has to skip the third step."""
    import torch

    made, scales = module(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with dps.torch.attach(worker, made) as replica:
        for step in range(STEPS):
            x, y = batch(step, torch.float32)
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(made(x), y)
            scaler.scale(loss).backward()
            if step == 2:
                made[3].bias.grad[0] = float("inf")
            scaler.step(replica)
            scaler.update()
            replica.zero_grad()
            scales.append(scaler.get_scale())
    return arrays(made), scales


def test_mixed_precision_with_a_scaler_of_gradients(plain: Client) -> None:
    start = dps.torch.parameters(module())
    with ParameterServer(plain, start, optimizer=SGD(RATE)) as ps:
        ((found, scales),) = results(ps.run(scaled))
        assert [reply.version for reply in ps.audit() if reply] == [STEPS - 1]
    assert scales == [1024.0, 1024.0] + [512.0] * (STEPS - 2)
    moved = np.abs(found["3.weight"] - start["3.weight"]).max()
    assert 0.01 < moved < 1.0


def normalised(buffers: str, worker: Worker) -> dict[str, Any]:
    made = module(norm=True)
    with dps.torch.attach(worker, made, buffers=buffers, average_every=2) as replica:
        for step in range(STEPS):
            backward(made, step, seed=worker.index)
            replica.step()
        state = replica.state_dict()
    assert state.keys() == made.state_dict().keys()
    return arrays(made)


@pytest.mark.parametrize("buffers", ["kept", "averaged"])
def test_buffers_are_averaged_or_kept(plain: Client, buffers: Any) -> None:
    start = dps.torch.parameters(module(norm=True), buffers)
    assert ("1.running_mean" in start) == (buffers == "averaged")
    with ParameterServer(
        plain, start, shards=2, optimizer=SGD(RATE), functions=dps.torch.FUNCTIONS
    ) as ps:
        first, second = results(ps.run(partial(normalised, buffers), workers=2))
        on_server = ps.pull()
    name = "1.running_var"
    assert not np.array_equal(first[name], np.ones(6))
    if buffers == "kept":
        assert name not in on_server
        assert not np.array_equal(first[name], second[name])
    else:
        # Who is done last has what the server has; the other had it before.
        assert min(np.abs(on_server[name] - one[name]).max() for one in (first, second)) == 0
        assert np.abs(first[name] - second[name]).max() < 0.2


def alone(worker: Worker) -> tuple[dict[str, Any], dict[str, Any]]:
    """Average with nobody else: that leaves all as it is."""
    made = module(norm=True)
    with dps.torch.attach(worker, made, buffers="averaged", average_every=3) as replica:
        for step in range(STEPS):
            backward(made, step)
            replica.step()
    return arrays(made), by_torch(module(norm=True))


def test_buffers_that_the_server_has_are_not_kept_from_it(plain: Client) -> None:
    start = dps.torch.parameters(module(norm=True), "averaged")

    with (
        ParameterServer(plain, start, functions=dps.torch.FUNCTIONS) as ps,
        pytest.raises(ConfigurationError, match=r"the module's buffer '1\.running_mean'"),
    ):
        results(ps.run(partial(attach, partial(module, norm=True), {})))


def test_who_forgets_the_functions_is_told_which_they_are(plain: Client) -> None:
    start = dps.torch.parameters(module(norm=True), "averaged")
    with (
        ParameterServer(plain, start) as ps,
        pytest.raises(ConfigurationError, match=r"\(functions=dps\.torch\.FUNCTIONS\)"),
    ):
        results(ps.run(alone))


def step_and_save(worker: Worker) -> dict[str, np.ndarray]:
    made = module()
    replica = dps.torch.attach(worker, made, ahead=1)
    backward(made, 0)
    replica.step()
    return {name: tensor.numpy() for name, tensor in replica.state_dict().items()}


def test_states_are_saved_after_all_that_is_under_way(plain: Client) -> None:
    start = dps.torch.parameters(module())
    with ParameterServer(plain, start, shards=2, optimizer=SGD(RATE)) as ps:
        (saved,) = results(ps.run(step_and_save))
        weights = ps.pull()
    for name, array in weights.items():
        np.testing.assert_array_equal(saved[name], array)
    fresh = module(seed=1)
    fresh.load_state_dict(dps.torch.state_dict(module(), weights))
    for name, array in weights.items():
        np.testing.assert_array_equal(arrays(fresh)[name], array)
    assert not np.array_equal(weights["0.weight"], start["0.weight"])
    with pytest.raises(ConfigurationError, match="'x' is not a key of the module's"):
        dps.torch.state_dict(module(), {"x": np.zeros(1)})


def use_when_closed(worker: Worker) -> list[np.ndarray]:
    """Return the weights at the end of the block, and what state_dict says after attempts to go on.

    Meanwhile the module is somebody else's.
    """
    made = module(norm=True)
    with dps.torch.attach(worker, made, buffers="averaged") as replica:
        backward(made, 0)
        replica.step()
    last, gradient = arrays(made)["0.weight"], made[0].weight
    backward(made, 1)
    with pytest.raises(GroupClosed, match="attach again"):
        replica.step()
    assert gradient.grad is not None
    gradient.detach().fill_(7.0)
    replica.close()
    with (
        pytest.raises(ZeroDivisionError),
        dps.torch.attach(worker, module(norm=True), buffers="averaged") as failed,
    ):
        raise ZeroDivisionError
    with pytest.raises(GroupClosed):
        failed.step()
    return [last, replica.state_dict()["0.weight"].numpy()]


def test_a_closed_replica_sends_nothing_and_leaves_the_module_alone(plain: Client) -> None:
    start = dps.torch.parameters(module(norm=True), "averaged")
    choices: dict[str, Any] = {"optimizer": SGD(RATE), "functions": dps.torch.FUNCTIONS}
    with ParameterServer(plain, start, **choices) as ps:
        ((last, found),) = results(ps.run(use_when_closed))
        np.testing.assert_array_equal(ps.pull()["0.weight"], last)
    assert (found == 7.0).all()


def attach(make: Callable[[], Any], choices: Mapping[str, Any], worker: Worker) -> None:
    dps.torch.attach(worker, make(), **choices)


def elsewhere() -> Any:
    import torch

    with torch.device("meta"):
        return module()


def test_a_module_that_does_not_fit_is_refused(plain: Client) -> None:
    with ParameterServer(plain, dps.torch.parameters(module())) as ps:
        for make, text in (
            (partial(module, dtype="float64"), r"'0.weight', float64\[6, 6\], but .* float32\[6"),
            (partial(module, norm=True), r"'1.weight', float32\[6\], but .* nothing of this name"),
            (elsewhere, "on the devices meta, expected the CPU"),
        ):
            with pytest.raises(ConfigurationError, match=text):
                results(ps.run(partial(attach, make, {})))


def test_buffers_that_are_neither_kept_nor_averaged_are_refused(plain: Client) -> None:
    text = "^buffers='avg', expected 'kept' or 'averaged'$"
    with pytest.raises(ConfigurationError, match=text):
        dps.torch.parameters(module(), "avg")  # type: ignore[arg-type]
    with (
        ParameterServer(plain, dps.torch.parameters(module())) as ps,
        pytest.raises(ConfigurationError, match=text),
    ):
        results(ps.run(partial(attach, module, {"buffers": "avg"})))


def unfreeze(made: Any) -> None:
    made[0].bias.requires_grad_(True)


def replace_a_layer(made: Any) -> None:
    import torch

    made[3] = torch.nn.Linear(6, 3)


def add_a_layer(made: Any) -> None:
    import torch

    made.append(torch.nn.Linear(3, 3))


def remove_a_layer(made: Any) -> None:
    del made[3]


def cast(made: Any) -> None:
    made.double()


CHANGES: dict[Callable[[Any], None], str] = {
    unfreeze: r"'0\.bias' requires gradients, and did not when it was",
    replace_a_layer: r"'3\.weight' is another tensor than when it was attached",
    add_a_layer: r"'4\.weight' requires gradients, and did not when",
    remove_a_layer: r"'3\.weight' is missing, and existed when",
    cast: r"'0\.weight' has other memory, such as after to\(\) or half\(\), than when",
}


def change(how: Callable[[Any], None], worker: Worker) -> None:
    made = module()
    with dps.torch.attach(worker, made) as replica:
        for step in range(2):
            backward(made, step)
            replica.step()
        how(made)
        replica.step()


def test_a_module_that_changes_after_attach_is_refused(plain: Client) -> None:
    with ParameterServer(plain, dps.torch.parameters(module())) as ps:
        for how, told in CHANGES.items():
            with pytest.raises(ConfigurationError, match=f"{told}.*attach a module after the last"):
                results(ps.run(partial(change, how)))


def test_parameters_that_the_server_cannot_hold_are_refused() -> None:
    import torch

    for made, text in (
        (torch.nn.Linear(2, 2, dtype=torch.complex64), "'weight' is torch.complex64 and"),
        (torch.nn.LazyLinear(2), "'weight' is not initialised yet: run the module once"),
        (torch.nn.Linear(2, 2, device="meta"), "'weight' is on the device meta, without values"),
        (
            torch.nn.ParameterList([torch.eye(2).to_sparse()]),
            "'0' is .*torch.sparse_coo, expected a dense",
        ),
        (None, "^module=None, expected a torch.nn.Module$"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            dps.torch.parameters(made)
    for weights, text in (
        ({"bias": np.zeros(1)}, r"weights\['bias'\] is float64\[1\], expected floats\[2\]"),
        ({"bias": np.zeros(2, complex)}, r"weights\['bias'\] is complex128"),
        ({"bias": [0.0, [1.0]]}, r"^weights\['bias'\]=.*, expected an array of floats\[2\]"),
        ({"bias": torch.zeros(2, device="meta")}, r"^weights\['bias'\] is Tensor, which numpy"),
        ([np.zeros(2)], "^weights=.*, expected name → array"),
    ):
        with pytest.raises(ConfigurationError, match=text):
            dps.torch.state_dict(torch.nn.Linear(2, 2), weights)


def with_nothing(worker: Worker) -> list[int]:
    """Train a module that has a parameter without elements."""
    import torch

    made = torch.nn.Linear(2, 1)
    made.register_parameter("empty", torch.nn.Parameter(torch.zeros(0, 3)))
    with dps.torch.attach(worker, made) as replica:
        made(torch.ones(1, 2)).sum().backward()
        replica.step()
    return list(made.empty.shape)


def test_a_parameter_without_elements_is_left_out(plain: Client) -> None:
    with ParameterServer(
        plain, {"weight": np.zeros((1, 2), "f4"), "bias": np.zeros(1, "f4")}
    ) as ps:
        assert results(ps.run(with_nothing)) == [[0, 3]]


def attach_in_vain(choices: Mapping[str, Any], worker: Worker) -> tuple[str, bool]:
    """Return what was said of wrong arguments, and whether the module kept its memory."""
    made = module()
    before = [parameter.data_ptr() for parameter in made.parameters()]
    with pytest.raises(ConfigurationError) as caught:
        dps.torch.attach(worker, made, **choices)
    return str(caught.value), before == [parameter.data_ptr() for parameter in made.parameters()]


WRONG = [
    ("ahead", 1.5, "0 or more whole updates"),
    ("average_every", 0, "1 or more whole updates"),
    ("local_steps", 0, "1 or more whole steps"),
    ("inner", "adamw", "a function from parameters to an optimizer, such as torch.optim.AdamW"),
]


def test_a_wrong_argument_is_refused_before_the_module_is_changed(plain: Client) -> None:
    with ParameterServer(plain, dps.torch.parameters(module())) as ps:
        for name, value, expected in WRONG:
            (told,) = results(ps.run(partial(attach_in_vain, {name: value})))
            assert told == (f"{name}={value!r}, expected {expected}", True)
