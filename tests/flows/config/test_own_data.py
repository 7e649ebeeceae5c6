"""Data of one's own in a configuration: where a file is looked for, what a trial is known by."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from sklearn.datasets import dump_svmlight_file, load_iris
from sklearn.preprocessing import StandardScaler

from dps.errors import ConfigurationError
from flows.config.own_data import _loaded
from flows.config.trials import Trial, load_trials
from flows.workloads import DatasetSource, Workload
from flows.workloads.base import DatasetShape
from flows.workloads.mlp import MLP, ParityRegression, SoftmaxRegression
from tests.contracts.datasets import DatasetContract

IRIS = load_iris()
ROWS = [[*x, IRIS.target_names[y]] for x, y in zip(IRIS.data, IRIS.target, strict=True)]


def write_csv(path: Path, rows: list[list[Any]] = ROWS) -> Path:
    lines = ["sl,sw,pl,pw,species", *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines))
    return path


def trials(folder: Path, dataset: dict[str, Any], **sections: Any) -> tuple[Trial, ...]:
    base = {
        "experiment": "own",
        "workload": "softmax",
        "training": {"updates": 10},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "dataset": dataset,
    }
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({**base, **sections}))
    return load_trials(str(path))[1]


def csv_section(**changed: Any) -> dict[str, Any]:
    return {"kind": "csv", "path": "iris.csv", "target": "species", **changed}


class TestOwnData(DatasetContract):
    @pytest.fixture(params=["csv standardised", "npz", "svmlight"])
    def dataset(self, request: pytest.FixtureRequest, tmp_path: Path) -> DatasetSource:
        write_csv(tmp_path / "iris.csv")
        np.savez(tmp_path / "iris.npz", x=IRIS.data, y=IRIS.target)
        dump_svmlight_file(IRIS.data, IRIS.target, str(tmp_path / "a.svm"), zero_based=False)
        section = {
            "csv standardised": csv_section(standardise=True),
            "npz": {"kind": "npz", "path": "iris.npz"},
            "svmlight": {"kind": "svmlight", "path": "a.svm", "dense": True},
        }[request.param]
        source: DatasetSource = trials(tmp_path, section)[0].config.dataset
        return source


def test_a_trial_is_known_by_what_is_in_the_file_not_by_where_it_is(tmp_path: Path) -> None:
    write_csv(tmp_path / "iris.csv")
    (first,) = trials(tmp_path, csv_section())
    shutil.copytree(tmp_path, tmp_path / "moved")
    shutil.copy(tmp_path / "iris.csv", tmp_path / "renamed.csv")
    digests = {
        trials(tmp_path / "moved", csv_section())[0].digest,
        trials(tmp_path, csv_section(path="renamed.csv"))[0].digest,
    }
    assert digests == {first.digest}
    write_csv(tmp_path / "iris.csv", ROWS[1:])
    (changed,) = trials(tmp_path, csv_section())
    assert changed.digest != first.digest
    settled = trials(tmp_path, csv_section(split={"seed": 1}))[0].digest
    assert settled not in (first.digest, changed.digest)


def test_a_folder_is_known_by_the_files_in_it(tmp_path: Path) -> None:
    frame = pd.DataFrame(IRIS.data, columns=[*"abcd"]).assign(species=IRIS.target)
    frame.to_parquet(tmp_path / "iris", partition_cols=["species"])
    section = {"kind": "parquet", "path": "iris", "target": "species"}
    (first,) = trials(tmp_path, section)
    assert len(first.config.dataset.load().y_train) == 120
    shutil.copytree(tmp_path / "iris", tmp_path / "moved")
    assert trials(tmp_path, {**section, "path": "moved"})[0].digest == first.digest
    shutil.rmtree(tmp_path / "moved" / "species=2")
    assert trials(tmp_path, {**section, "path": "moved"})[0].digest != first.digest


def test_missing_cells_are_filled_by_the_training_part_and_texts_become_features(
    tmp_path: Path,
) -> None:
    rows: list[list[Any]] = [[n, "ab"[n % 2], "1970-01-02", n, n % 2] for n in range(80)]
    rows[7][0] = ""
    write_csv(tmp_path / "iris.csv", rows)
    section = csv_section(missing="mean", one_hot=["sw"], dates=["pl"])
    (trial,) = trials(tmp_path, section)
    data = trial.config.dataset.load()
    x = np.concatenate([data.x_train, data.x_test])
    assert x.shape == (80, 5)
    (filled,) = x[x[:, 4] == 7]
    known = data.x_train[data.x_train[:, 4] != 7, 0]
    assert filled.tolist() == pytest.approx([known.mean(), 0, 1, 1, 7])
    with pytest.raises(ConfigurationError, match="line 9: column 'sl' is missing"):
        trials(tmp_path, {**section, "missing": "refuse"})
    (fewer,) = trials(tmp_path, {**section, "missing": "drop"})
    assert fewer.config.dataset.load("train").y_train.shape == (63,)


def test_a_planned_trial_refuses_a_file_that_has_changed(tmp_path: Path) -> None:
    write_csv(tmp_path / "iris.csv")
    (trial,) = trials(tmp_path, csv_section())
    write_csv(tmp_path / "iris.csv", ROWS[1:])
    _loaded.cache_clear()  # as in another process
    with pytest.raises(ConfigurationError, match=r"iris\.csv has changed since"):
        trial.config.dataset.load()


@pytest.mark.parametrize("test", [0.02, 0.9])
def test_of_a_rare_class_one_row_at_least_is_scored_and_one_trained_on(
    tmp_path: Path, test: float
) -> None:
    sizes = {"a": 500, "b": 498, "c": 2, "d": 3}
    rows = [[n, 0, 0, 0, name] for name, size in sizes.items() for n in range(size)]
    write_csv(tmp_path / "iris.csv", rows)
    data = trials(tmp_path, csv_section(split={"test": test}))[0].config.dataset.load()
    scored, trained = np.bincount(data.y_test), np.bincount(data.y_train)
    assert scored[2:].min() >= 1
    assert trained[2:].min() >= 1
    assert (scored + trained).tolist() == [*sizes.values()]
    assert scored.sum() == pytest.approx(test * len(rows), abs=3)


def test_features_are_scaled_as_scikit_learn_does_by_the_training_part(tmp_path: Path) -> None:
    rows = [[*row[:3], 0.1, row[4]] for row in ROWS]  # a column that is constant, up to rounding
    write_csv(tmp_path / "iris.csv", rows)
    plain = trials(tmp_path, csv_section())[0].config.dataset.load()
    scaled = trials(tmp_path, csv_section(standardise=True))[0].config.dataset.load()
    known = StandardScaler().fit(plain.x_train.astype(np.float64))
    np.testing.assert_allclose(scaled.x_train, known.transform(plain.x_train), atol=1e-5)
    np.testing.assert_allclose(scaled.x_test, known.transform(plain.x_test), atol=1e-5)
    assert abs(scaled.x_train.mean(axis=0)).max() < 1e-6
    assert abs(scaled.x_test.mean(axis=0)).max() > 1e-3


def test_each_class_has_its_share_of_what_is_drawn(tmp_path: Path) -> None:
    write_csv(tmp_path / "iris.csv", ROWS[:90] + ROWS[100:120])  # 50, 40 and 20
    data = trials(tmp_path, csv_section(split={"test": 0.3}))[0].config.dataset.load()
    assert np.bincount(data.y_train).tolist() == [35, 28, 14]
    assert np.bincount(data.y_test).tolist() == [15, 12, 6]
    other = trials(tmp_path, csv_section(split={"test": 0.3, "seed": 1}))[0].config.dataset.load()
    assert not np.array_equal(other.x_test, data.x_test)


@pytest.mark.parametrize("scaled", [False, True], ids=["as it is", "standardised"])
def test_the_spread_of_targets_is_that_of_what_is_scored_in_their_own_unit(
    tmp_path: Path, scaled: bool
) -> None:
    write_csv(tmp_path / "iris.csv", [[*row[:4], n**2] for n, row in enumerate(ROWS)])
    numbers = csv_section(task="regression")
    (first,) = trials(tmp_path, numbers, workload="mlp")
    numbers["standardise_target"] = scaled
    (trial,) = trials(tmp_path, numbers, workload="mlp")
    plain = first.config.dataset.load()
    assert trial.config.dataset.target_deviation == pytest.approx(plain.y_test.std(), rel=1e-5)
    assert abs(plain.y_train.std() / plain.y_test.std() - 1) > 1e-3


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"path": "none.csv"}, r"line \d+: .*none\.csv cannot be read: No such file"),
        ({"target": "specie"}, "no column 'specie'; did you mean 'species'. There are: "),
        ({"features": ["sl", "species"]}, "is the target and cannot be a feature"),
        ({"target": "sl", "features": ["sw"]}, "the target is 5.1 in row 1"),
        (
            {"split": {"test": 0.99}},
            "has 3 rows to train on; expected a batch of at most this number",
        ),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    write_csv(tmp_path / "iris.csv")
    with pytest.raises(ConfigurationError, match=problem):
        trials(tmp_path, csv_section(**changed))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (ROWS[:50], "all 50 rows have the class 'setosa'; expected at least two"),
        (ROWS[:51], "too few rows of a class: 'versicolor' has 1"),
        (ROWS[40:60], "has 16 rows to train on; expected a batch of at most this number"),
        ([*ROWS, [1, 2, "x", 4, "setosa"]], "line 152: column 'pl' is 'x', expected a number"),
        ([*ROWS, [1, 2, 1e300, 4, "setosa"]], "a value is beyond 3.40282e"),
    ],
    ids=["one class", "one row", "batch", "text", "huge"],
)
def test_rows_that_cannot_be_learnt_from_are_refused(
    tmp_path: Path, rows: list[list[Any]], problem: str
) -> None:
    write_csv(tmp_path / "iris.csv", rows)
    with pytest.raises(ConfigurationError, match=problem):
        trials(tmp_path, csv_section())


# -- sparse data -----------------------------------------------------------------------------------


def svmlight(folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = np.where(rng.random((300, 40)) < 0.1, rng.normal(size=(300, 40)), 0)
    x[0, 39] = 1.0
    dump_svmlight_file(
        x, np.where(x.sum(axis=1) > 0, 1, -1), str(folder / "a.svm"), zero_based=False
    )
    return {"kind": "svmlight", "path": "a.svm"}


@pytest.mark.parametrize("kind", ["softmax", "mlp", "logistic"])
def test_sparse_rows_give_the_gradients_of_dense_ones(tmp_path: Path, kind: str) -> None:
    section = svmlight(tmp_path)
    sparse = trials(tmp_path, section, workload=kind)[0].config.dataset
    dense = trials(tmp_path, {**section, "dense": True}, workload=kind)[0].config.dataset
    assert sparse.shape == DatasetShape(40, 2, sparse=True)
    assert dense.shape == DatasetShape(40, 2)
    made: dict[str, Workload] = {
        "softmax": SoftmaxRegression(dense.shape),
        "mlp": MLP(dense.shape, hidden=(5,)),
        "logistic": ParityRegression(dense.shape),
    }
    workload, rows = made[kind], np.arange(7, 90)
    rare, full = sparse.load(), dense.load()
    params = {
        name: value + np.float32(0.1)
        for name, value in workload.initial(np.random.default_rng(1)).items()
    }
    first = workload.gradient(params, rare.x_train[rows], rare.y_train[rows])
    second = workload.gradient(params, full.x_train[rows], full.y_train[rows])
    assert first[0] == pytest.approx(second[0], rel=1e-6)
    for name, gradient in second[1].items():
        assert isinstance(first[1][name], np.ndarray)
        assert first[1][name].dtype == gradient.dtype
        np.testing.assert_allclose(first[1][name], gradient, atol=1e-6)
    scores = [workload.evaluate(params, data.x_test, data.y_test) for data in (rare, full)]
    assert scores[0] == pytest.approx(scores[1])


def test_what_needs_dense_rows_says_so(tmp_path: Path) -> None:
    section = svmlight(tmp_path)
    with pytest.raises(ConfigurationError, match="standardised data are not sparse"):
        trials(tmp_path, {**section, "standardise": True})
    assert trials(tmp_path, {**section, "standardise": True, "dense": True})


def test_logistic_regression_is_for_two_classes(tmp_path: Path) -> None:
    write_csv(tmp_path / "iris.csv")
    with pytest.raises(ConfigurationError, match=r"needs two classes, but iris\.csv has 3"):
        trials(tmp_path, csv_section(), workload="logistic")
