"""What was saved on some shards is the same model on others, with all of its optimizer state."""

from __future__ import annotations

import numpy as np
import pytest

from dps import ASP, Adam, Checkpoint, GroupL1, Momentum, PerArray, Proximal, Recovery, SparseSpec
from dps.core.blocks import Layout
from dps.core.rules.rule import UpdateRule, by_rows
from dps.core.shard import Progress, ShardState, StateMachine, initial_state
from dps.core.tables.key_routing import dealt
from dps.core.tables.table import table_of
from dps.core.updates import Operation, UpdateId
from dps.errors import ConfigurationError
from dps.recovery.manifest import Run, Saved, resharded

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(40, 5)), "v": RNG.normal(size=33).astype(np.float32)}
SPEC = SparseSpec("t", 3, "float64")
KEYS = np.arange(0, 3000, 7)


def stepped(
    layout: Layout, rule: UpdateRule, states: list[ShardState], seq: int
) -> list[ShardState]:
    """The states after one more update of everything, the same one whatever the shards are."""
    rng = np.random.default_rng(seq)
    gradients = {n: rng.normal(size=a.shape).astype(a.dtype) for n, a in PARAMS.items()}
    rows = dealt(layout, {"t": (KEYS, rng.normal(size=(len(KEYS), 3)))})
    found = []
    for shard, state in enumerate(states):
        gradient, pieces = layout.gather(shard, gradients)
        update = UpdateId("worker-0", 1, seq)
        of_tables = rows.get(shard, ())
        op = Operation("gradient", update, gradient=gradient, pieces=pieces, rows=of_tables)
        found.append(StateMachine(layout.shards[shard], rule).apply(state, op).state)
    return found


def trained(rule: UpdateRule, shards: int, updates: range, start: Saved | None = None) -> Saved:
    layout = (
        start.run.layout
        if start
        else Layout.of(PARAMS, shards, whole_rows=by_rows(rule), tables=[SPEC])
    )
    states = (
        list(start.states)
        if start
        else [initial_state(layout.gather(s, PARAMS)[0], rule) for s in range(shards)]
    )
    for seq in updates:
        states = stepped(layout, rule, states, seq)
    recovery = Recovery(Checkpoint(path="/nowhere"))
    run = Run("saved", 0, 0.0, layout, rule, ASP(), recovery, "{}", {}, None, {})
    return Saved(run, tuple(states))


# The table's optimizer state is another one than that of the arrays.
BY_NAME = PerArray((("t", Momentum(0.1)), ("*", Adam(0.01))))


def model(saved: Saved) -> dict[str, np.ndarray]:
    """Weights and rows, from all shards."""
    layout = saved.run.layout
    found = dict(layout.scatter({s: state.values for s, state in enumerate(saved.states)}))
    for state in saved.states:
        level = table_of(state.tables, "t").compacted()
        assert level is not None
        found |= {f"{key}": row for key, row in zip(level.keys, level.values, strict=True)}
    return found


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [(Adam(0.01), 3, 1), (Proximal(0.1, GroupL1(0.01)), 1, 4), (BY_NAME, 2, 3)],
    ids=str,
)
def test_a_training_goes_on_as_if_it_had_been_on_so_many_shards(
    rule: UpdateRule, before: int, after: int
) -> None:
    moved = resharded(trained(rule, before, range(1, 5)), after)
    assert len(moved.states) == after
    went_on = model(trained(rule, after, range(5, 8), moved))
    expected = model(trained(rule, after, range(1, 8)))
    assert went_on.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(went_on[name], array)


def test_numbers_are_those_of_the_shard_with_fewest_updates() -> None:
    saved = trained(Adam(0.01), 2, range(1, 5))
    behind = trained(Adam(0.01), 2, range(1, 3)).states[1]
    moved = resharded(Saved(saved.run, (saved.states[0], behind)), 3)
    for state in moved.states:
        assert (state.version, state.steps) == (2, 2)
        assert state.workers == {"worker-0": Progress(1, 2, 2, 2, True)}


def test_more_shards_than_elements_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="shards=1000"):
        resharded(trained(Adam(0.01), 1, range(1, 2)), 1000)
