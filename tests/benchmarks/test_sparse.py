"""The benchmark of sparse tables: what it compares does the same, and the table has the ratios."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.sparse import (
    KEYS,
    WIDTH,
    Dictionary,
    Row,
    Turn,
    drawn,
    summed_up,
    table,
    timed_turn,
    universe,
)

ROWS = KEYS + 1000


def test_every_system_is_asked_for_the_same_keys() -> None:
    (keys, gradient), (again, same) = (next(drawn(ROWS, 3, 1)) for _ in range(2))
    assert np.array_equal(keys, again)
    assert np.array_equal(gradient, same)
    assert gradient.shape == (KEYS, WIDTH)
    assert len(set(keys.tolist()) & set(universe(ROWS).tolist())) == KEYS
    (other, _), (another, _) = drawn(ROWS, 4, 2)
    assert not np.array_equal(other, another)


def test_the_dictionary_applies_what_is_pushed() -> None:
    held = Dictionary([1, 2, 3])
    held.push(np.array([3, 1]), np.ones((2, WIDTH), np.float32))
    rows = held.pull(np.array([1, 2, 3]))
    assert rows[:, 0].tolist() == np.array([0.9, 1, 0.9], np.float32).tolist()


def test_a_turn_times_every_pull_and_push() -> None:
    calls: list[str] = []
    turn = timed_turn(
        lambda keys: calls.append("pull"), lambda keys, rows: calls.append("push"), ROWS, 1, 2
    )
    assert calls == ["pull", "push"] * 2
    assert len(turn.pulls) == len(turn.pushes) == 2
    assert min(turn.pulls + turn.pushes) > 0


def test_a_burst_of_work_in_one_push_counts() -> None:
    """A log-structured table merges in few pushes: a median over pushes would not see any."""
    burst = Turn([0.1] * 5, [0.1, 0.1, 0.1, 0.1, 4.6])
    row = summed_up("dps", [burst, burst, Turn([0.2] * 5, [9.0] * 5)])
    assert row.pull == pytest.approx(KEYS / 0.1)
    assert row.push == pytest.approx(KEYS / 1.0)
    assert row.push_p99 == 9.0


def test_the_table_has_the_ratios() -> None:
    rows = [
        Row("dps, 4 shards", 2e6, 1e6, 0.5),
        Row("dictionary, same process", 5e5, 4e5, 0.25),
    ]
    text = table(rows, 3)
    assert "3 rounds" in text
    ours, theirs = text.splitlines()[4:6]
    assert ours.split() == ["dps,", "4", "shards", "2.00", "1.00", "500.0", "1.00×", "1.00×"]
    assert theirs.split()[-5:] == ["0.50", "0.40", "250.0", "4.00×", "2.50×"]
    assert "Ray is not installed" in text
