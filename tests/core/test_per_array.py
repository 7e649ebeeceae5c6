"""Rules by names: each array and table is stepped as if it were alone, or stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from dps.core import shard as shard_module
from dps.core.blocks import Layout
from dps.core.rules.proximal import GroupL1, Proximal
from dps.core.rules.rule import SGD, AdaGrad, Adam, AdamW, Momentum, UpdateRule, by_rows, rule_for
from dps.core.rules.wrappers import (
    Clipped,
    Cosine,
    DelayCompensated,
    Frozen,
    PerArray,
    Scheduled,
    StalenessAware,
    StepDecay,
    WeightDecay,
    as_rule,
    check_names,
    frozen,
)
from dps.core.shard import ShardState, StateMachine, initial_state
from dps.core.tables.table import SparseSpec
from dps.core.updates import Operation, UpdateId
from dps.errors import ConfigurationError
from dps.protocol.client.encoder import split

Array = np.ndarray
Arrays = dict[str, Array]

RANDOM = np.random.default_rng(5)
PARAMS: Arrays = {
    "a.weight": RANDOM.standard_normal((30, 4)).astype(np.float32),
    "a.bias": RANDOM.standard_normal(4),
    "b.weight": RANDOM.standard_normal((6, 5)).astype(np.float32),
    "b.bias": RANDOM.standard_normal(5).astype(np.float32),
}
# Some push everything, others leave arrays out.
PUSHES: list[Arrays] = [
    {n: RANDOM.standard_normal(p.shape).astype(p.dtype) for n, p in PARAMS.items() if n != left_out}
    for left_out in ("", "a.bias", "", "b.weight", "a.weight", "")
]
RULES: dict[str, UpdateRule] = {
    "a.weight": Proximal(0.1, GroupL1(0.2)),
    "*.bias": Momentum(0.1),
    "*": Scheduled(AdamW(0.1), StepDecay(2, 0.5)),
}


def trained(
    rule: UpdateRule, params: Mapping[str, Array], shards: int, keep: frozenset[str]
) -> Arrays:
    """What comes of the pushes of those arrays; a version for each push, also of nothing."""
    layout = Layout.of(params, shards, whole_rows=by_rows(rule))
    states = [initial_state(layout.gather(s, params)[0].copy(), rule) for s in range(shards)]
    for seq, push in enumerate(PUSHES, 1):
        own = {name: gradient for name, gradient in push.items() if name in keep}
        parts = split(layout, rule, own)
        for shard, (buffer, pieces) in parts.dense.items():
            op = Operation("gradient", UpdateId("a", 1, seq), pieces=pieces, gradient=buffer)
            states[shard] = StateMachine(layout.shards[shard], rule).apply(states[shard], op).state
    return layout.scatter({shard: state.values for shard, state in enumerate(states)})


@pytest.mark.parametrize("chunk", [16, 1 << 20])
@pytest.mark.parametrize("around", [lambda rule: rule, StalenessAware, lambda r: Clipped(r, 1e9)])
def test_each_array_is_stepped_as_if_it_were_alone(
    monkeypatch: pytest.MonkeyPatch, chunk: int, around: Callable[[UpdateRule], UpdateRule]
) -> None:
    monkeypatch.setattr(shard_module, "CHUNK_BYTES", chunk)
    everything = frozenset(PARAMS)
    rule = around(as_rule(RULES))
    found = trained(rule, PARAMS, 1, everything)
    for name in PARAMS:
        # The step counts and versions are those of the shard: the others are pushed, too.
        alone = trained(around(rule_for(as_rule(RULES), name)), PARAMS, 1, everything)
        assert found[name].tobytes() == alone[name].tobytes()
        assert found[name].tobytes() != PARAMS[name].tobytes()


def test_what_is_frozen_stays_and_is_not_sent() -> None:
    rule = as_rule({"a.*": Frozen(), "*": WeightDecay(SGD(0.1), 0.5)})
    layout = Layout.of(PARAMS, 1)
    parts = split(layout, rule, PUSHES[0])
    assert parts.dense[0][0].nbytes == PARAMS["b.weight"].nbytes + PARAMS["b.bias"].nbytes
    found = trained(rule, PARAMS, 2, frozenset(PARAMS))
    for name in PARAMS:
        assert (found[name].tobytes() == PARAMS[name].tobytes()) == name.startswith("a.")
    whole = Operation("gradient", UpdateId("a", 1, 1), gradient=layout.gather(0, PUSHES[0])[0])
    state = initial_state(layout.gather(0, PARAMS)[0].copy(), rule)
    after = layout.scatter(
        {0: StateMachine(layout.shards[0], rule).apply(state, whole).state.values}
    )
    assert after["a.weight"].tobytes() == PARAMS["a.weight"].tobytes()
    assert frozen(Scheduled(Frozen(), Cosine(3)), ["x"]) == {"x"}
    within = Scheduled(as_rule({"x": WeightDecay(Frozen(), 0.1), "*": SGD(0.1)}), Cosine(3))
    assert frozen(within, ["x", "y"]) == {"x"}


TABLES = [SparseSpec("emb.in", 3), SparseSpec("emb.out", 2, "float64")]
ROWS: dict[str, tuple[Array, Array]] = {
    "emb.in": (np.array([4, 9]), np.ones((2, 3), np.float32)),
    "emb.out": (np.array([7, 7]), np.ones((2, 2))),
}


@pytest.mark.parametrize(
    ("rules", "sent"),
    [
        ({"emb.in": Frozen(), "*": SGD(0.1)}, {"emb.out", "a.bias"}),
        ({"emb.*": Frozen(), "*": SGD(0.1)}, {"a.bias"}),
        ({"emb.in": SGD(0.1), "*": Frozen()}, {"emb.in"}),
        ({"a.*": Frozen(), "*": Scheduled(SGD(0.1), Cosine(3))}, {"emb.in", "emb.out"}),
        (Frozen(), set[str]()),
    ],
    ids=["a table", "tables", "all but a table", "an array", "all"],
)
def test_rows_of_what_is_frozen_are_not_sent(rules: object, sent: set[str]) -> None:
    layout = Layout.of({"a.bias": PARAMS["a.bias"]}, 2, tables=TABLES)
    gradients = {"a.bias": PUSHES[0]["a.bias"]}
    parts = split(layout, as_rule(rules), gradients, ROWS)
    found: dict[str, float] = {}
    for each in (each for tables in parts.rows.values() for each in tables):
        found[each.table] = found.get(each.table, 0.0) + float(each.gradient.sum())
    assert found == {name: ROWS[name][1].sum() for name in ROWS if name in sent}
    assert bool(parts.dense) == ("a.bias" in sent)


def test_a_table_has_the_state_of_its_own_rule_alone() -> None:
    spec = SparseSpec("emb", 3)
    rule = as_rule({"emb": AdaGrad(0.1), "*": Adam(0.1)})
    params = {"w": np.zeros(4)}
    layout = Layout.of(params, 1, tables=[spec])
    rows = {"emb": (np.array([4, 9]), np.ones((2, 3), np.float32))}
    parts = split(layout, rule, {"w": np.ones(4)}, rows)
    state = initial_state(np.zeros(4).view(np.uint8), rule)
    number = UpdateId("a", 1, 1)
    op = Operation("gradient", number, gradient=parts.dense[0][0], rows=parts.rows[0])
    after: ShardState = StateMachine(layout.shards[0], rule).apply(state, op).state
    found = after.tables["emb"].rows(spec, np.array([4, 9]), ("squares",))
    assert found.slots["squares"].tolist() == [[1, 1, 1], [1, 1, 1]]
    np.testing.assert_allclose(found.values, -0.1, rtol=1e-6)
    assert set(after.slots) == {"squares", "mean", "square"}
    assert not after.slots["squares"].any()


def test_only_gradients_of_the_rules_that_ask_are_corrected() -> None:
    rule = as_rule({"a.weight": DelayCompensated(SGD(0.1), 2.0), "*": SGD(0.1)})
    layout = Layout.of(PARAMS, 1)
    gradient, pieces = layout.gather(0, PUSHES[0])
    base, _ = layout.gather(0, {n: p + p.dtype.type(0.5) for n, p in PARAMS.items()})
    number = UpdateId("a", 1, 1)
    op = Operation("gradient", number, pieces=pieces, gradient=gradient, base=base)
    state = initial_state(layout.gather(0, PARAMS)[0].copy(), rule)
    found = layout.scatter({0: StateMachine(layout.shards[0], rule).apply(state, op).state.values})
    for name, g in PUSHES[0].items():
        g = g - g * g if name == "a.weight" else g
        np.testing.assert_allclose(found[name], PARAMS[name] - 0.1 * g, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("w", 1.0), ("w1", 2.0), ("x.w", 3.0), ("x[0].w", 4.0), ("x.w2", 5.0), ("other", 5.0)],
)
def test_a_full_name_goes_first_then_the_first_that_fits_then_the_rest(
    name: str, expected: float
) -> None:
    entries = {"*": 5.0, "w*": 2.0, "x[0].*": 4.0, "*.w": 3.0, "w": 1.0}
    rule = as_rule({entry: SGD(rate) for entry, rate in entries.items()})
    assert rule_for(rule, name) == SGD(expected)


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        ({}, "optimizer: expected a rule for at least one array"),
        ({"a": SGD(1)}, "no rule for 'b'; add one, or add '\\*' for all other arrays"),
        (
            {"*": SGD(1), "c": SGD(1)},
            r"optimizer\['c'\]: no such array or table; expected one of a, b",
        ),
        ({"a": SGD, "*": SGD(1)}, r"optimizer\['a'\]=<class .*expected an update rule such as"),
        ({"": SGD(1)}, "optimizer: name='', expected the name of an array"),
        ({"*": Clipped(SGD(1), 1.0)}, r"clipping applies to the whole gradient; put Clipped"),
        ({"*": PerArray((("*", SGD(1)),))}, r"optimizer\['\*'\]: PerArray cannot be nested"),
        (
            Scheduled(PerArray((("*", Scheduled(SGD(1), Cosine(9))),)), Cosine(9)),
            "Scheduled: rule=Scheduled.*expected another update rule",
        ),
        (0.1, r"optimizer=0.1, expected an update rule such as SGD\(0.1\) or Adam\(\), or a map"),
    ],
)
def test_what_cannot_be_is_refused(optimizer: object, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        check_names(as_rule(optimizer), ["a", "b"])
