"""Update rules, schedules, clipping and rules by names end where torch's optimizers end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from dps import (
    SGD,
    AdaGrad,
    Adam,
    AdamW,
    Clipped,
    Cosine,
    Frozen,
    Momentum,
    PerArray,
    Schedule,
    Scheduled,
    SparseSpec,
    StepDecay,
    UpdateRule,
    WarmUp,
    WeightDecay,
)
from dps.core.blocks import Layout
from dps.core.rules.rule import learning_rate_at
from dps.core.shard import ShardState, StateMachine, initial_state
from dps.core.updates import Operation, UpdateId
from dps.protocol.client.encoder import split
from tests.support.needs_torch import needs_torch

pytestmark = needs_torch

Array = np.ndarray
Arrays = dict[str, Array]
Module = Any

STEPS = 25
SHARDS = 3
DTYPES = ("float32", "float64")
# Of float32: what rounding in another order comes to in so many steps.
RELATIVE = {"float32": 1e-6, "float64": 1e-12}
SHAPES = {"embed.weight": (9, 4), "out.weight": (4, 5), "out.bias": (5,)}

# An update rule, the class of torch and its settings.
OPTIMIZERS: list[tuple[UpdateRule, str, dict[str, Any]]] = [
    (SGD(0.1), "SGD", {"lr": 0.1}),
    (WeightDecay(SGD(0.1), 0.05), "SGD", {"lr": 0.1, "weight_decay": 0.05}),
    (Momentum(0.1, 0.8), "SGD", {"lr": 0.1, "momentum": 0.8}),
    (Momentum(0.1, 0.8, True), "SGD", {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    (
        WeightDecay(Momentum(0.1), 0.05),
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05},
    ),
    (AdaGrad(0.1), "Adagrad", {"lr": 0.1}),
    (WeightDecay(AdaGrad(0.1), 0.05), "Adagrad", {"lr": 0.1, "weight_decay": 0.05}),
    (Adam(0.01), "Adam", {"lr": 0.01}),
    (WeightDecay(Adam(0.01), 0.05), "Adam", {"lr": 0.01, "weight_decay": 0.05}),
    (AdamW(0.01), "AdamW", {"lr": 0.01}),
    (
        AdamW(0.02, 0.8, 0.95, 1e-6, 0.3),
        "AdamW",
        {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3},
    ),
]


def warm_up_of_torch(optimizer: Any) -> Any:
    from torch.optim import lr_scheduler as torch_schedules

    first = torch_schedules.LinearLR(optimizer, start_factor=0.25, total_iters=6)
    then = torch_schedules.CosineAnnealingLR(optimizer, STEPS - 6, eta_min=0.0)
    return torch_schedules.SequentialLR(optimizer, [first, then], [6])


def of_torch(name: str, *arguments: Any) -> Callable[[Any], Any]:
    def made(optimizer: Any) -> Any:
        from torch.optim import lr_scheduler as torch_schedules

        return getattr(torch_schedules, name)(optimizer, *arguments)

    return made


# A schedule, and what makes that of torch for an optimizer whose learning rate is 0.1.
SCHEDULES: list[tuple[Schedule, Callable[[Any], Any]]] = [
    (StepDecay(4, 0.5), of_torch("StepLR", 4, 0.5)),
    (StepDecay(7), of_torch("StepLR", 7)),
    (Cosine(STEPS), of_torch("CosineAnnealingLR", STEPS)),
    (Cosine(STEPS, least=0.2), of_torch("CosineAnnealingLR", STEPS, 0.1 * 0.2)),
    (WarmUp(10, start=0.1), of_torch("LinearLR", 0.1, 1.0, 10)),
    (WarmUp(6, Cosine(STEPS - 6), start=0.25), warm_up_of_torch),
]
NAMES = [str(schedule) for schedule, _ in SCHEDULES]


def start(dtype: str) -> Arrays:
    random = np.random.default_rng(3)
    return {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def gradients(dtype: str) -> list[Arrays]:
    random = np.random.default_rng(4)
    return [
        {name: random.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
        for _ in range(STEPS)
    ]


def served(rule: UpdateRule, params: Arrays, pushes: Sequence[Arrays]) -> Arrays:
    """What shards make of pushes, each prepared as a worker does it."""
    layout = Layout.of(params, SHARDS)
    states = [initial_state(layout.gather(s, params)[0].copy(), rule) for s in range(SHARDS)]
    for seq, push in enumerate(pushes, 1):
        parts = split(layout, rule, push)
        for shard, (buffer, pieces) in parts.dense.items():
            number = UpdateId("a", 1, seq)
            op = Operation("gradient", number, seq - 1, pieces=pieces, gradient=buffer)
            states[shard] = StateMachine(layout.shards[shard], rule).apply(states[shard], op).state
    return layout.scatter({shard: state.values for shard, state in enumerate(states)})


def tensors(params: Arrays) -> dict[str, Module]:
    import torch

    return {n: torch.nn.Parameter(torch.tensor(array)) for n, array in params.items()}


def torch_trained(
    given: dict[str, Module],
    optimizer: Any,
    pushes: Sequence[Arrays],
    scheduler: Any = None,
    clip: Callable[[list[Module]], Any] = lambda _: None,
) -> Arrays:
    import torch

    for push in pushes:
        for name, tensor in given.items():
            tensor.grad = torch.tensor(push[name]) if tensor.requires_grad else None
        clip(list(given.values()))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {name: tensor.detach().numpy() for name, tensor in given.items()}


def assert_same(found: Arrays, expected: Arrays, dtype: str) -> None:
    for name in expected:
        assert found[name].dtype == dtype
        np.testing.assert_allclose(
            found[name], expected[name], rtol=RELATIVE[dtype], atol=RELATIVE[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rule", "name", "settings"), OPTIMIZERS, ids=str)
def test_a_rule_ends_where_the_optimizer_ends(
    rule: UpdateRule, name: str, settings: dict[str, Any], dtype: str
) -> None:
    import torch

    given = tensors(start(dtype))
    optimizer = getattr(torch.optim, name)(given.values(), **settings)
    expected = torch_trained(given, optimizer, gradients(dtype))
    assert_same(served(rule, start(dtype), gradients(dtype)), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("schedule", "made"), SCHEDULES[-2:], ids=NAMES[-2:])
@pytest.mark.parametrize(
    ("rule", "name", "settings"),
    [
        (Momentum(0.1), "SGD", {"lr": 0.1, "momentum": 0.9}),
        (AdamW(0.1, weight_decay=0.2), "AdamW", {"lr": 0.1, "weight_decay": 0.2}),
    ],
    ids=["momentum", "adamw"],
)
def test_a_scheduled_rule_ends_where_the_optimizer_with_a_scheduler_ends(
    rule: UpdateRule,
    name: str,
    settings: dict[str, Any],
    schedule: Schedule,
    made: Callable[[Any], Any],
    dtype: str,
) -> None:
    import torch

    given = tensors(start(dtype))
    optimizer = getattr(torch.optim, name)(given.values(), **settings)
    expected = torch_trained(given, optimizer, gradients(dtype), made(optimizer))
    found = served(Scheduled(rule, schedule), start(dtype), gradients(dtype))
    assert_same(found, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_clipping_by_value_and_then_by_norm_is_that_of_torch(dtype: str) -> None:
    import torch

    given = tensors(start(dtype))
    optimizer = torch.optim.Adam(given.values(), lr=0.01)

    def clip(parameters: list[Module]) -> None:
        torch.nn.utils.clip_grad_value_(parameters, 0.7)
        torch.nn.utils.clip_grad_norm_(parameters, 2.0)

    expected = torch_trained(given, optimizer, gradients(dtype), clip=clip)
    rule = Clipped(Adam(0.01), norm=2.0, value=0.7)
    assert_same(served(rule, start(dtype), gradients(dtype)), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rules_by_names_are_parameter_groups_and_what_is_frozen_is_not_clipped(dtype: str) -> None:
    import torch

    given = tensors(start(dtype))
    given["embed.weight"].requires_grad = False
    optimizer = torch.optim.AdamW(
        [
            {"params": [given["embed.weight"]]},
            {"params": [given["out.bias"]], "lr": 0.05, "weight_decay": 0.0},
            {"params": [given["out.weight"]]},
        ],
        lr=0.01,
        weight_decay=0.1,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def clip(parameters: list[Module]) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.5)

    expected = torch_trained(given, optimizer, gradients(dtype), scheduler, clip)
    groups = PerArray(
        (
            ("embed.*", Frozen()),
            ("*.bias", AdamW(0.05, weight_decay=0.0)),
            ("*", AdamW(0.01, weight_decay=0.1)),
        )
    )
    rule = Clipped(Scheduled(groups, Cosine(STEPS)), norm=1.5)
    found = served(rule, start(dtype), gradients(dtype))
    assert_same(found, expected, dtype)
    assert found["embed.weight"].tobytes() == start(dtype)["embed.weight"].tobytes()


def test_rows_of_a_table_and_arrays_are_clipped_by_one_norm_each_by_its_own_rule() -> None:
    import torch

    keys = np.array([5, 2, 5, 8])
    random = np.random.default_rng(6)
    rows = random.standard_normal((4, 3))
    weights = random.standard_normal(6)
    table = torch.nn.Parameter(torch.zeros(9, 3, dtype=torch.float64))
    dense = torch.nn.Parameter(torch.tensor(weights))
    table.grad = torch.zeros(9, 3, dtype=torch.float64).index_add(
        0, torch.tensor(keys), torch.tensor(rows)
    )
    dense.grad = torch.tensor(weights * 2)
    torch.nn.utils.clip_grad_norm_([table, dense], 1.0)
    torch.optim.Adagrad([table], lr=0.3).step()
    torch.optim.SGD([dense], lr=0.1).step()

    spec = SparseSpec("emb", 3, "float64")
    rule = Clipped(PerArray((("emb", AdaGrad(0.3)), ("w", SGD(0.1)))), norm=1.0)
    params = {"w": weights}
    layout = Layout.of(params, 2, tables=[spec])
    push, pushed_rows = {"w": weights * 2}, {"emb": (keys, rows)}
    parts = split(layout, rule, push, pushed_rows)
    states: list[ShardState] = []
    for shard in range(2):
        state = initial_state(layout.gather(shard, params)[0].copy(), rule)
        buffer, pieces = parts.dense[shard]
        number = UpdateId("a", 1, 1)
        part = parts.rows.get(shard, ())
        op = Operation("gradient", number, 0, pieces=pieces, gradient=buffer, rows=part)
        states.append(StateMachine(layout.shards[shard], rule).apply(state, op).state)
    found = layout.scatter({shard: state.values for shard, state in enumerate(states)})
    np.testing.assert_allclose(found["w"], dense.detach().numpy(), rtol=1e-12)
    for key in (2, 5, 8):
        # Where a row is not, it reads as zeros.
        tables = (state.tables["emb"] for state in states if "emb" in state.tables)
        row = sum(each.rows(spec, np.array([key])).values[0] for each in tables)
        np.testing.assert_allclose(row, table.detach().numpy()[key], rtol=1e-12)


@pytest.mark.parametrize(("schedule", "make"), SCHEDULES, ids=NAMES)
def test_the_rate_in_force_is_that_of_torch(schedule: Schedule, make: Callable[[Any], Any]) -> None:
    import torch

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = make(optimizer)
    rule = Scheduled(SGD(0.1), schedule)
    for version in range(STEPS):
        expected = scheduler.get_last_lr()[0]
        assert learning_rate_at(rule, version) == pytest.approx(expected, abs=1e-12)
        optimizer.step()
        scheduler.step()
