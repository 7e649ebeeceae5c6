"""Factorisation: its gradients, its reference, its ratings; on a cluster, also after SIGKILL."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dps import ParameterServer
from dps.cluster.backends.local import LocalCluster
from dps.cluster.backends.processes import is_gone
from examples import factors
from examples.__main__ import told
from examples.factor_model import Factors, alternate, objective
from examples.outcome import PATIENT, Task
from examples.ratings import RatingSource, prepare
from tests.support.training import nodes
from tests.support.waiting import eventually

SECONDS = 30.0
PRELOAD = ("dps.cluster.driver.parameter_server", "examples.factors")
NOISE = 0.5


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 ratings of 200 users and 40 items with far-off keys: three factors, biases, noise."""
    rng = np.random.default_rng(0)
    p, q = rng.standard_normal((200, 4)), rng.standard_normal((40, 4))
    user, item = np.divmod(rng.choice(200 * 40, 4000, replace=False), 40)
    rating = 3 + (p[user, 1:] * q[item, 1:]).sum(1) + p[user, 0] + q[item, 0]
    path = tmp_path_factory.mktemp("ratings") / "planted.csv"
    users, items = rng.integers(0, 2**63 - 1, 200), rng.integers(0, 2**63 - 1, 40)
    noisy = rating + NOISE * rng.standard_normal(4000)
    table = {"user": users[user], "item": items[item], "rating": noisy}
    pd.DataFrame(table).to_csv(path, index=False)
    return path


def beginning(path: Path, length: int = 3) -> Factors:
    data, (users, items) = prepare(RatingSource(path)), factors.tables(0, length)
    rows = users.initial_rows(data.users), items.initial_rows(data.items)
    return Factors(data, *(some.astype(np.float64) for some in rows))


def row_gradients(found: Factors) -> tuple[np.ndarray, np.ndarray]:
    """What the tables are pushed when all ratings are in one batch: sums over equal keys."""
    learn = found.of.learn
    user, item = found.of.positions(learn)
    _, by_users, by_items = objective(found.users[user], found.items[item], learn.values)
    sums = np.zeros_like(found.users), np.zeros_like(found.items)
    np.add.at(sums[0], user, by_users)
    np.add.at(sums[1], item, by_items)
    return sums


# -- what is to be least ---------------------------------------------------------------------------


def test_the_gradients_of_rows_equal_central_finite_differences(planted: Path) -> None:
    found = beginning(planted)
    step = 1e-5
    for rows, gradient in zip((found.users, found.items), row_gradients(found), strict=True):
        for at in np.random.default_rng(1).integers(0, rows.size, 12):
            before, values = rows.flat[at], []
            for sign in (1, -1):
                rows.flat[at] = before + sign * step
                values.append(found.objective() * len(found.of.learn))
            rows.flat[at] = before
            difference = (values[0] - values[1]) / (2 * step)
            assert gradient.flat[at] == pytest.approx(difference, rel=1e-5, abs=1e-6)


# -- the reference ---------------------------------------------------------------------------------


def test_the_reference_comes_to_rest_where_the_gradient_is_zero(planted: Path) -> None:
    found, objectives = beginning(planted), []
    for _ in range(4):
        found = alternate(found, 1)
        objectives.append(found.objective())
    assert objectives == sorted(objectives, reverse=True)
    found = alternate(found, 60)
    for gradient in row_gradients(found):
        assert np.abs(gradient).max() < 1e-3 * len(found.of.learn) / len(gradient)


# -- ratings ---------------------------------------------------------------------------------------


def test_every_process_gets_the_same_ratings(planted: Path) -> None:
    first, second = (prepare(RatingSource(planted)) for _ in range(2))
    np.testing.assert_array_equal(first.held_out.values, second.held_out.values)
    other = prepare(RatingSource(planted, seed=1))
    assert not np.array_equal(first.held_out.users, other.held_out.users)
    assert len(first.learn) == 3600
    assert first.learn.values.mean() == pytest.approx(0)
    assert first.learn.values.std() == pytest.approx(1)


# -- on a cluster ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Two servers with a replica each, and two workers."""
    with LocalCluster(nodes(replicas=1), PRELOAD) as started:
        yield started


@pytest.mark.slow
@pytest.mark.cluster
def test_factors_of_a_users_file_meet_their_target(
    cluster: LocalCluster, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factors, "STEPS", 200)
    outcome = factors.solve(cluster.client, Task(data=planted))
    assert outcome.met, told("factors", outcome, 0)
    assert outcome.reached < 2 * NOISE
    assert "3,600 ratings of 200 users and 40 items" in outcome.notes[0]
    assert outcome.notes[1].startswith("240 rows exist")


@pytest.mark.slow
@pytest.mark.cluster
def test_every_bit_is_the_same_though_a_server_is_killed(
    cluster: LocalCluster, planted: Path
) -> None:
    """One worker alone does the same each time: a step that is lost or taken twice would show."""
    train = partial(factors.train, RatingSource(planted), 100, 500)
    found = []
    for recovery in ("none", "chain"):
        with ParameterServer(
            cluster.client,
            {},
            tables=factors.tables(0, 3),
            shards=2,
            optimizer=factors.RULE,
            recovery=recovery,
            timings=PATIENT,
        ) as ps:
            futures = ps.run(train, workers=1)
            if recovery == "chain":
                eventually(lambda ps=ps: all(r and r.version > 20 for r in ps.audit()), SECONDS)
                head = ps.table().views[0].chain[0].address
                name = next(node.name for node in ps.nodes if node.address == head)
                assert is_gone(cluster.kill(name), SECONDS)
                assert not futures[0].done()
            cluster.client.gather(futures)
            found.append([ps.pull_range(name) for name in ("users", "items")])
    for (keys, rows), (keys_after, rows_after) in zip(*found, strict=True):
        assert keys.tolist() == keys_after.tolist()
        assert rows.tobytes() == rows_after.tobytes()
