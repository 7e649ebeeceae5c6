"""Data of one's own in a configuration: where a file is looked for, what a trial is known by."""

from __future__ import annotations

import json
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
from flows.config.own_data import OwnDataSection
from flows.config.trials import Trial, load_trials
from flows.records.settings import settings, trial_from
from flows.workloads import DatasetSource, Workload
from flows.workloads.base import DatasetShape
from flows.workloads.logistic import ParityRegression
from flows.workloads.mlp import MLP
from flows.workloads.own_data import loaded
from flows.workloads.softmax import SoftmaxRegression
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


def arrays(**changed: Any) -> dict[str, Any]:
    return {"x": IRIS.data, "y": IRIS.target, **changed}


class TestOwnData(DatasetContract):
    @pytest.fixture(params=["csv", "csv standardised", "two files", "npz", "parquet", "svmlight"])
    def dataset(self, request: pytest.FixtureRequest, tmp_path: Path) -> DatasetSource:
        write_csv(tmp_path / "iris.csv")
        write_csv(tmp_path / "test.csv", ROWS[::7])
        np.savez(tmp_path / "iris.npz", x=IRIS.data, y=IRIS.target)
        dump_svmlight_file(IRIS.data, IRIS.target, str(tmp_path / "a.svm"), zero_based=False)
        section = {
            "csv": csv_section(),
            "csv standardised": csv_section(standardise=True),
            "two files": csv_section(split={"path": "test.csv"}),
            "npz": {"kind": "npz", "path": "iris.npz"},
            "svmlight": {"kind": "svmlight", "path": "a.svm", "dense": True},
            "parquet": {"kind": "parquet", "path": "iris.parquet", "target": "species"},
        }[request.param]
        if request.param == "parquet":
            frame = pd.DataFrame(IRIS.data, columns=[*"abcd"]).assign(species=IRIS.target)
            frame.to_parquet(tmp_path / "iris.parquet")
        source: DatasetSource = trials(tmp_path, section)[0].config.dataset
        return source


def test_paths_are_relative_to_the_configuration_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    write_csv(tmp_path / "data" / "iris.csv")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    here = csv_section(path="data/iris.csv")
    (trial,) = trials(tmp_path, here)
    assert trial.config.dataset.path == str(tmp_path / "data" / "iris.csv")
    varied = trials(tmp_path, here, axes={"dataset.path": {"a": "data/iris.csv"}})
    assert varied[0].config.dataset == trial.config.dataset


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


def test_of_two_files_both_are_part_of_the_trial(tmp_path: Path) -> None:
    write_csv(tmp_path / "iris.csv")
    write_csv(tmp_path / "test.csv", ROWS[::5])
    section = csv_section(split={"path": "test.csv"})
    (first,) = trials(tmp_path, section)
    assert first.config.dataset.load().y_test.shape == (30,)
    write_csv(tmp_path / "test.csv", ROWS[::6])
    assert trials(tmp_path, section)[0].digest != first.digest


def test_a_folder_is_known_by_the_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "iris").mkdir()
    for number, rows in enumerate((ROWS[:70], ROWS[70:])):
        write_csv(tmp_path / "iris" / f"{number}.part", rows)
    section = csv_section(path="iris")
    (first,) = trials(tmp_path, section)
    assert len(first.config.dataset.load().y_train) == 120
    shutil.copytree(tmp_path / "iris", tmp_path / "moved")
    (tmp_path / "moved" / "_metadata").write_text("is not read")
    assert trials(tmp_path, csv_section(path="moved"))[0].digest == first.digest
    write_csv(tmp_path / "moved" / "2.part", ROWS[:9])
    assert trials(tmp_path, csv_section(path="moved"))[0].digest != first.digest


def test_another_file_may_have_its_columns_in_another_order(tmp_path: Path) -> None:
    write_csv(tmp_path / "iris.csv")
    lines = ["species,pw,pl,sw,sl", *(",".join(map(str, row[::-1])) for row in ROWS)]
    (tmp_path / "test.csv").write_text("\n".join(lines))
    data = trials(tmp_path, csv_section(split={"path": "test.csv"}))[0].config.dataset.load()
    np.testing.assert_array_equal(data.x_test, data.x_train)


def test_a_recorded_trial_refuses_a_file_that_has_changed(tmp_path: Path) -> None:
    write_csv(tmp_path / "iris.csv")
    (trial,) = trials(tmp_path, csv_section())
    kept = json.loads(json.dumps(settings(trial, {})))
    again = trial_from(kept, "the record")
    assert again.config.dataset.load().digest == trial.config.dataset.load().digest
    write_csv(tmp_path / "iris.csv", ROWS[1:])
    loaded.cache_clear()  # as in another process
    again = trial_from(kept, "the record")  # what it says can be read
    with pytest.raises(ConfigurationError, match=r"iris\.csv has changed since"):
        again.config.dataset.load()


def test_a_sha256_that_is_written_is_that_of_the_file(tmp_path: Path) -> None:
    write_csv(tmp_path / "iris.csv")
    known = trials(tmp_path, csv_section())[0].config.dataset.sha256
    assert trials(tmp_path, csv_section(sha256=known))
    with pytest.raises(ConfigurationError, match=r"line \d+: .*expected the one that is written"):
        trials(tmp_path, csv_section(sha256="0" * 64))


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


def test_the_seed_draws_the_rows_of_numbers_to_be_predicted(tmp_path: Path) -> None:
    write_csv(tmp_path / "iris.csv", [[*row[:4], number] for number, row in enumerate(ROWS)])

    def scored(**split: Any) -> set[float]:
        section = csv_section(task="regression", split=split)
        (trial,) = trials(tmp_path, section, workload="linear")
        return set(trial.config.dataset.load().y_test.tolist())

    assert len(scored(seed=0)) == 30
    assert scored(seed=0) == scored() != scored(seed=1)


@pytest.mark.parametrize("scaled", [False, True], ids=["as it is", "standardised"])
def test_the_spread_of_targets_is_that_of_what_is_scored_in_their_own_unit(
    tmp_path: Path, scaled: bool
) -> None:
    write_csv(tmp_path / "iris.csv", [[*row[:4], n**2] for n, row in enumerate(ROWS)])
    numbers = csv_section(task="regression")
    (first,) = trials(tmp_path, numbers, workload="linear")
    numbers["standardise_target"] = scaled
    (trial,) = trials(tmp_path, numbers, workload="linear")
    plain = first.config.dataset.load()
    assert trial.config.dataset.target_deviation == pytest.approx(plain.y_test.std(), rel=1e-5)
    assert abs(plain.y_train.std() / plain.y_test.std() - 1) > 1e-3


def test_targets_that_are_standardised_are_told_as_such(tmp_path: Path) -> None:
    write_csv(tmp_path / "iris.csv")
    section = csv_section(target="sl", features=["sw", "pl"], task="regression")
    for standardised in (False, True):
        dataset = {**section, "standardise_target": standardised}
        [trial, *_] = trials(tmp_path, dataset, workload="linear")
        assert isinstance(trial.config.dataset, OwnDataSection)
        told = trial.config.dataset.whole.told()
        assert ("targets from 4.3 to 7.9 with the mean 5.8" in told) != standardised
        assert ("standard deviations, of 0.8" in told) == standardised


def test_the_rows_to_be_scored_have_the_features_of_the_others(tmp_path: Path) -> None:
    np.savez(tmp_path / "iris.npz", x=IRIS.data, y=IRIS.target)
    np.savez(tmp_path / "test.npz", x=IRIS.data[:, :3], y=IRIS.target)
    section = {"kind": "npz", "path": "iris.npz", "split": {"path": "test.npz"}}
    with pytest.raises(ConfigurationError, match="test part has 3 features, the other 4"):
        trials(tmp_path, section)


@pytest.mark.parametrize("test", [0.02, 0.2, 0.9])
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


def test_where_rows_to_score_are_given_one_row_of_a_class_is_enough(tmp_path: Path) -> None:
    write_csv(tmp_path / "iris.csv", ROWS[:51])
    write_csv(tmp_path / "test.csv", ROWS[40:60])
    (trial,) = trials(tmp_path, csv_section(split={"path": "test.csv"}))
    assert np.bincount(trial.config.dataset.load().y_train).tolist() == [50, 1]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"path": "none.csv"}, r"line \d+: .*none\.csv cannot be read: No such file"),
        ({"path": "~no-such-user/a.csv"}, r"~no-such-user/a\.csv cannot be read: No such file"),
        (
            {"target": "kind"},
            r"line \d+: dataset\.target: .*there is no column 'kind'; there are: 'sl'",
        ),
        ({"target": "specie"}, "there is no column 'specie'; did you mean 'species'. There are: "),
        ({"features": ["sl", "species"]}, "is the target, which no feature may tell"),
        ({"features": ["sl", "petals"]}, r"dataset\.features: .*there is no column 'petals'"),
        ({"target": "sl", "features": ["sw"]}, "the target is 5.1 in row 1"),
        (
            {"split": {"test": 0.99}},
            "has 3 rows to train on; expected a batch of at most that many",
        ),
        ({"split": {"path": "iris.csv", "seed": 1}}, "no rows are drawn; leave this out"),
        ({"split": {"path": "other.csv"}}, "the class 'rose' is in the file of the test part only"),
        ({"kind": "svmlight"}, "unknown key"),
        ({"kind": "npz"}, "cannot be read as npz"),
        ({"colour": 1}, "unknown key"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    tmp_path: Path, changed: dict[str, Any], problem: str
) -> None:
    write_csv(tmp_path / "iris.csv")
    write_csv(tmp_path / "other.csv", [[1, 2, 3, 4, "rose"]])
    with pytest.raises(ConfigurationError, match=problem):
        trials(tmp_path, csv_section(**changed))


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (ROWS[:50], "all 50 rows are of the class 'setosa'; expected two classes"),
        (ROWS[:51], "too few rows of a class: 'versicolor' has 1"),
        (ROWS[40:60], "has 16 rows to train on; expected a batch of at most that many"),
        ([*ROWS, [1, 2, "x", 4, "setosa"]], "line 152: column 'pl' is 'x', expected a number"),
        ([*ROWS, [1, 2, "nan", 4, "setosa"]], "line 152: column 'pl' is 'nan'"),
        ([*ROWS, [1, 2, 1e300, 4, "setosa"]], "a value is beyond 3.40282e"),
        ([[*row[:4], 2**53 + n % 2] for n, row in enumerate(ROWS)], "target is 9007199254740992 i"),
        (
            [[*row[:4], -(10**30) * (n % 2)] for n, row in enumerate(ROWS)],
            r"1e\+30 in row 2 of the",
        ),
    ],
    ids=["one class", "one row", "batch", "text", "nan", "huge", "many digits", "huge class"],
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
        "softmax": SoftmaxRegression(dense.shape, l2=0.1),
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
    with pytest.raises(ConfigurationError, match="rica takes no sparse rows; give dense: true"):
        trials(tmp_path, section, workload="rica")
    with pytest.raises(ConfigurationError, match="standardise moves every 0 of sparse data"):
        trials(tmp_path, {**section, "standardise": True})
    assert trials(tmp_path, {**section, "standardise": True, "dense": True})


def test_a_width_that_no_node_can_hold_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.svm").write_text("\n".join(["1 2147483647:1", "0 1:1"] * 40))
    with pytest.raises(ConfigurationError, match="expected 100,000,000 at most"):
        trials(tmp_path, {"kind": "svmlight", "path": "a.svm"})


def test_logistic_regression_is_for_two_classes(tmp_path: Path) -> None:
    write_csv(tmp_path / "iris.csv")
    with pytest.raises(ConfigurationError, match=r"tells two classes apart, and iris\.csv has 3"):
        trials(tmp_path, csv_section(), workload="logistic")
