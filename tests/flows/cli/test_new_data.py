"""`dps new --data`: a file of one's own becomes a configuration that runs as it is written."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import dask.dataframe
import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import dump_svmlight_file, load_breast_cancer, load_diabetes, load_iris
from typer.testing import CliRunner

from dps.errors import ConfigurationError
from flows.analysis.finished import read_experiment
from flows.analysis.prices import load_prices
from flows.cli import app
from flows.cli.data_file import DataFile, Task, data_file, found_columns, guessed
from flows.cli.new import FAULTS, ROLES, WORKLOADS, Choices, fits, written
from flows.config.experiment import ExperimentConfig
from flows.config.trials import Trial, load_trials
from flows.config.yaml_document import parse_document

CANCER, DIABETES, IRIS = load_breast_cancer(), load_diabetes(scaled=False), load_iris()
DIAGNOSES = CANCER.target_names[CANCER.target]


def table(path: Path, names: Sequence[str], rows: Any, targets: Any, delimiter: str = ",") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        lines = csv.writer(file, delimiter=delimiter)
        lines.writerow([*names, "target"])
        lines.writerows([*row, target] for row, target in zip(rows, targets, strict=True))
    return path


def cancer(path: Path, **other: Any) -> Path:
    return table(path, CANCER.feature_names, CANCER.data, DIAGNOSES, **other)


def diabetes(path: Path) -> Path:
    return table(path, DIABETES.feature_names, DIABETES.data, DIABETES.target)


def of(path: Path, target: str | None = "target", task: Task | None = None) -> DataFile:
    return data_file(found_columns(path), target, task, path.parent)


def configured(data: DataFile, folder: Path, **other: Any) -> tuple[ExperimentConfig, Trial]:
    models = [each for each in WORKLOADS if each == data.models[0]]
    choices = Choices(workload=models[0], dataset=data, cluster="virtual")
    text = written("mine", replace(choices, **other))
    experiment, trials = load_trials(
        replace(parse_document(text.encode(), "mine.yaml"), folder=folder)
    )
    return experiment, trials[0]


def dps(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *words],
        cwd=here,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


# -- what is found in a file -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "task"),
    [
        (["yes", "no"], "classification"),
        ([0.0, 1.0, 1.0, 0.0], "classification"),
        (range(3), "regression"),
        ([0.5, 0.5, 1.0, 1.0], "regression"),
        ([*range(20)] * 2, "classification"),
        ([*range(21)] * 9, "regression"),
        ([*range(9)] * 3 + [9], "regression"),
    ],
    ids=["texts", "0 and 1", "each once", "fractions", "twenty", "twenty-one", "one of them once"],
)
def test_few_whole_numbers_and_texts_are_taken_for_classes(targets: Any, task: Task) -> None:
    values = np.array(targets)
    assert guessed(values if values.dtype.kind == "U" else values.astype(float)) == task


def test_two_classes_are_scored_by_auc_and_more_by_accuracy(tmp_path: Path) -> None:
    two = of(cancer(tmp_path / "cancer.csv"))
    assert (two.task, two.classes, two.score) == ("classification", 2, "auc")
    assert not two.guessed, "texts are classes and nothing else"
    three = of(table(tmp_path / "iris.csv", IRIS.feature_names, IRIS.data, IRIS.target))
    assert (three.task, three.classes, three.score) == ("classification", 3, "accuracy")
    assert three.guessed
    assert "--task regression" in written("mine", Choices(dataset=three))
    assert "logistic" in two.models
    assert "logistic" not in three.models


def test_numbers_are_predicted_and_scored_in_their_unit(tmp_path: Path) -> None:
    data = of(diabetes(tmp_path / "diabetes.csv"))
    assert (data.task, data.score, data.models[0]) == ("regression", "rmse", "linear")
    assert "targets from 25 to 3" in data.told
    experiment, trial = configured(data, tmp_path)
    section = trial.config.dataset.model_dump()
    assert section["standardise"]
    assert section["standardise_target"]
    assert trial.config.evaluation.metric == "rmse"
    effects = [each for each in experiment.claims if each.metric == "effect_time_mean"]
    assert {each.direction for each in effects} == {"less"}
    share = effects[0].smallest / trial.config.dataset.model_dump()["target_deviation"]
    assert share == pytest.approx(0.01, rel=0.5)


def test_least_squares_do_not_diverge_whatever_the_size_of_sparse_numbers(tmp_path: Path) -> None:
    for scale in (1e-3, 1.0, 1e3):
        x = DIABETES.data * scale
        dump_svmlight_file(x, DIABETES.target, str(tmp_path / f"{scale}.svm"), zero_based=False)
        data = of(tmp_path / f"{scale}.svm", None)
        curvature = np.linalg.eigvalsh(x.T @ x / len(x)).max()
        assert 0 < data.learning_rate < 2 / curvature
        _, trial = configured(data, tmp_path)
        assert trial.config.optimizer.model_dump()["learning_rate"] == data.learning_rate


def test_whoever_says_the_task_is_believed(tmp_path: Path) -> None:
    path = table(tmp_path / "iris.csv", IRIS.feature_names, IRIS.data, IRIS.target)
    data = of(path, task="regression")
    assert (data.task, data.guessed, data.score) == ("regression", False, "rmse")
    _, trial = configured(data, tmp_path)
    assert trial.config.dataset.shape.regression
    with pytest.raises(ConfigurationError, match="is 'malignant', expected a number"):
        of(cancer(tmp_path / "cancer.csv"), task="regression")


def test_columns_without_numbers_or_a_name_are_left_out_and_named(tmp_path: Path) -> None:
    rows = [[n, f"c{n}", n % 7, "yes"[: n % 4], n / 3] for n in range(60)]
    path = table(
        tmp_path / "churn.csv", ["", "id", "calls", "plan: old", "paid, €"], rows, [0, 1] * 30
    )
    data = of(path)
    assert set(data.left_out) == {"", "id", "plan: old"}
    assert data.features == ("calls", "paid, €")
    _, trial = configured(data, tmp_path)
    assert trial.config.dataset.shape.features == 2
    assert "# " + "  \"plan: old\" has no numbers, but 'y'" in written(
        "mine", Choices(dataset=data)
    )


def test_a_column_with_a_few_cells_that_are_no_numbers_is_not_left_out(tmp_path: Path) -> None:
    rows = [["?" if n == 5 else n, n] for n in range(60)]
    path = table(tmp_path / "a.csv", ["age", "calls"], rows, [0, 1] * 30)
    with pytest.raises(
        ConfigurationError, match=r"line 7: column 'age' is '\?', expected a number"
    ):
        of(path)


@pytest.mark.parametrize("delimiter", [";", "\t", "|"], ids=["semicolon", "tab", "bar"])
def test_the_delimiter_is_found_and_written(tmp_path: Path, delimiter: str) -> None:
    data = of(cancer(tmp_path / "cancer.csv", delimiter=delimiter))
    _, trial = configured(data, tmp_path)
    assert trial.config.dataset.model_dump()["delimiter"] == delimiter
    assert trial.config.dataset.shape.features == 30


@pytest.mark.parametrize(
    "name", ["no", "2024", "a: b", "#1", "it's", '"so"', "größe", "- a", "x\\n"]
)
def test_odd_names_of_columns_and_files_are_written_so_that_they_are_read(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / f"{name}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["a", "b", name], *([n, "text", n % 2] for n in range(40))])
    data = of(path, target=name)
    _, trial = configured(data, tmp_path)
    assert trial.config.dataset.model_dump()["target"] == name


def test_files_of_every_kind_can_be_learnt_from(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=IRIS.data, y=IRIS.target, other=DIABETES.target[:150])
    dump_svmlight_file(IRIS.data, IRIS.target, str(tmp_path / "a.svm"), zero_based=False)
    dump_svmlight_file(DIABETES.data, DIABETES.target, str(tmp_path / "b.svm"), zero_based=False)
    found = [
        of(tmp_path / "a.npz", None),
        of(tmp_path / "a.npz", "other"),
        of(tmp_path / "a.svm", None),
        of(tmp_path / "b.svm", None),
    ]
    assert [each.score for each in found] == ["accuracy", "rmse", "accuracy", "rmse"]
    assert [each.sparse for each in found] == [False, False, True, True]
    for data in found:
        _, trial = configured(data, tmp_path)
        assert trial.config.dataset.model_dump()["standardise"] == (not data.sparse)


def test_a_parquet_file_can_be_learnt_from(tmp_path: Path) -> None:
    columns = {"name": DIAGNOSES, "mean": CANCER.data[:, 0], "size": CANCER.data[:, 3]}
    pd.DataFrame({**columns, "target": DIAGNOSES}).to_parquet(tmp_path / "a.parquet")
    data = of(tmp_path / "a.parquet")
    assert data.features == ("mean", "size")
    assert data.left_out == {"name": "has no numbers, but 'malignant'"}
    _, trial = configured(data, tmp_path)
    assert trial.config.dataset.shape.features == 2


def noise() -> pd.DataFrame:
    """Nothing can be learnt from it, but from where its rows were before they were shuffled."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=600), "b": rng.normal(size=600)})
    return frame.assign(target=np.arange(600) // 300).sample(frac=1, random_state=0)


def test_the_same_frame_gives_the_same_data_in_every_format(tmp_path: Path) -> None:
    frame = noise()
    frame.to_csv(tmp_path / "index.csv")
    frame.to_csv(tmp_path / "plain.csv", index=False)
    frame.to_parquet(tmp_path / "a.parquet")
    frame.rename_axis("customer").to_parquet(tmp_path / "named.parquet")
    frame.reset_index().to_parquet(tmp_path / "reset.parquet")
    np.savez(tmp_path / "a.npz", x=frame[["a", "b"]], y=frame["target"])
    parts = dask.dataframe.from_pandas(frame, npartitions=11, sort=False)
    parts.to_parquet(tmp_path / "parquet")
    parts.to_csv(tmp_path / "csv")
    digests = set()
    for path in sorted(tmp_path.iterdir()):
        data = of(path, None if path.suffix == ".npz" else "target")
        digests.add(configured(data, tmp_path)[1].config.dataset.load().digest)
    assert len(digests) == 1


def test_numbers_in_another_notation_are_refused_as_target_and_as_feature(tmp_path: Path) -> None:
    cells = [f"{n % 7},5" for n in range(60)]
    path = table(tmp_path / "a.csv", ["a"], [[n] for n in range(60)], cells, delimiter=";")
    with pytest.raises(ConfigurationError, match="line 2: column 'target' is '0,5', expected a nu"):
        of(path)
    path = table(tmp_path / "b.csv", ["a"], [[cell] for cell in cells], [0, 1] * 30, delimiter=";")
    with pytest.raises(ConfigurationError, match="line 2: column 'a' is '0,5', expected a number"):
        of(path)


def test_what_indices_of_svmlight_begin_with_is_told_and_can_be_said(tmp_path: Path) -> None:
    x = np.column_stack([np.zeros(150), IRIS.data])
    dump_svmlight_file(x, IRIS.target, str(tmp_path / "a.svm"), zero_based=True)
    made = dps(tmp_path, "new", "mine", "--data", "a.svm")
    assert "4 sparse features (indices taken to begin with 1)" in made.stdout
    text = (tmp_path / "mine.yaml").read_text()
    assert "zero_based: auto  # indices taken to begin with 1; true: with 0" in text
    (tmp_path / "mine.yaml").write_text(text.replace("zero_based: auto", "zero_based: true"))
    planned = dps(tmp_path, "plan", "mine.yaml")
    assert "5 sparse features (indices begin with 0)" in planned.stdout


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.csv")
    with pytest.raises(
        ConfigurationError, match=r"a\.csv cannot be read: It is a device or a pipe"
    ):
        of(tmp_path / "a.csv")


def test_a_packed_file_can_be_learnt_from(tmp_path: Path) -> None:
    path = cancer(tmp_path / "cancer.csv")
    packed = tmp_path / "cancer.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert replace(of(packed), path="", told="") == replace(of(path), path="", told="")


def test_a_path_is_written_as_it_was_given_if_it_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cancer(tmp_path / "cancer.csv")
    assert of(path).path == str(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert of(Path("~/cancer.csv")).path == str(path)


def test_every_model_and_fault_goes_with_data_of_ones_own(tmp_path: Path) -> None:
    for data in (of(cancer(tmp_path / "a.csv")), of(diabetes(tmp_path / "b.csv"))):
        fitting = [each for each in WORKLOADS if fits(each, data)]
        assert sorted(fitting) == sorted(data.models)
        for workload, fault, role in product(fitting, FAULTS, ROLES):
            other = {"workload": workload, "fault": fault, "role": role, "seeds": 1}
            experiment, trial = configured(data, tmp_path, **other)
            assert trial.config.workload.kind == workload
            assert experiment.claims


def test_a_batch_has_no_more_rows_than_there_are(tmp_path: Path) -> None:
    data = of(table(tmp_path / "few.csv", ["a"], [[n] for n in range(20)], [0, 1] * 10))
    _, trial = configured(data, tmp_path)
    assert trial.config.training.batch_size == data.rows == 16


# -- the command -----------------------------------------------------------------------------------


def test_the_file_is_written_planned_and_relative_to_the_configuration(tmp_path: Path) -> None:
    table(tmp_path / "data" / "cancer.csv", CANCER.feature_names, CANCER.data, CANCER.target)
    (tmp_path / "mine").mkdir()
    words = ["--data", "data/cancer.csv", "--target", "target", "--output", "mine/a.yaml", "--json"]
    made = dps(tmp_path, "new", "diagnosis", *words)
    assert made.returncode == 0, made.stderr
    assert "Taken for classification, by the target" in made.stderr
    assert json.loads(made.stdout)["choices"]["dataset"] == {
        "kind": "csv",
        "path": "../data/cancer.csv",
        "target": "target",
        "task": "classification",
        "features": None,
        "left_out": {},
        "metric": "auc",
    }
    planned = dps(tmp_path, "plan", "mine/a.yaml")
    assert planned.returncode == 0, planned.stderr
    assert (
        "cancer.csv: 455 rows to train on, 114 to score, 30 features, 2 classes" in planned.stdout
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data", "nowhere.csv", "--target", "y"], "nowhere.csv cannot be read: No such file"),
        (["--data", "~no-such-user/a.csv"], "~no-such-user/a.csv cannot be read: No such file"),
        (["--data", "."], "expected a file whose name ends in .csv"),
        (["--data", "a.xlsx"], "expected a file whose name ends in .csv"),
        (["--data", "good.csv"], "--target: which column of good.csv is to be predicted?"),
        (["--data", "good.csv", "--target", "targte"], "did you mean 'target'?"),
        (["--data", "names.csv", "--target", "target"], "is it the column of the classes?"),
        (["--data", "binary.csv", "--target", "y"], "is not in UTF-8; save the file as CSV"),
        (["--data", "ragged.csv", "--target", "target"], "line 3: 1 cells, but line 1 names 2"),
        (["--data", "texts.csv", "--target", "target"], "no column of numbers is left"),
        (["--data", "empty.csv", "--target", "y"], "expected the names of the columns"),
        (["--target", "y"], "--target is of data of your own: give --data FILE as well"),
        (["--task", "regression"], "--task is of data of your own"),
        (["--data", "good.csv", "--dataset", "digits"], "leave out one of them"),
        (["--data", "good.csv", "--target", "target", "--workload", "linear"], "expected mlp or"),
        (
            ["--data", "good.csv", "--target", "target", "--task", "regression"],
            "is 'yes', expected a number",
        ),
        (["--data", "a.svm", "--target", "y"], "whose lines begin with the target"),
        (
            ["--data", "good.csv", "--target", "target", "--output", "none/a.yaml"],
            "none/a.yaml: cannot be written: there is no folder none",
        ),
        (["--workload", "linear"], "give them with --data FILE"),
    ],
    ids=[
        *(
            "missing",
            "nobody's",
            "folder",
            "suffix",
            "no target",
            "misspelt",
            "distinct",
            "binary",
            "ragged",
        ),
        *("texts", "empty", "target alone", "task alone", "both", "model", "task", "svmlight"),
        *("no folder", "linear"),
    ],
)
def test_what_is_wrong_is_told_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    numbers = [[n] for n in range(40)]
    table(tmp_path / "good.csv", ["a"], numbers, ["yes", "no"] * 20)
    table(tmp_path / "names.csv", ["a"], numbers, [f"name {n}" for n in range(40)])
    table(tmp_path / "texts.csv", ["a"], [["text"]] * 40, [0, 1] * 20)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00a,y\n1,2\n")
    (tmp_path / "ragged.csv").write_text("a,target\n1,2\n3\n")
    (tmp_path / "empty.csv").touch()
    (tmp_path / "a.svm").write_text("1 1:2\n0 1:3\n" * 20)
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, ["new", "mine", *words])
    assert isinstance(refused.exception, ConfigurationError), refused.output
    assert told in str(refused.exception)
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_that_cannot_be_learnt_from_ends_the_command_with_2(tmp_path: Path) -> None:
    table(tmp_path / "names.csv", ["a"], [[1], [2], [3]], ["x", "y", "z"])
    refused = dps(tmp_path, "new", "mine", "--data", "names.csv", "--target", "target")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "dps: names.csv: too few rows of 3 classes: 'x' has 1" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "mine.yaml").exists()


@pytest.mark.slow
@pytest.mark.timeout(300)  # four commands, each of which imports all that a trial needs
@pytest.mark.parametrize("name", ["cancer", "diabetes"])
def test_what_is_written_learns_when_it_is_run(tmp_path: Path, name: str) -> None:
    {"cancer": cancer, "diabetes": diabetes}[name](tmp_path / f"{name}.csv")
    made = dps(tmp_path, "new", name, "--data", f"{name}.csv", "--target", "target", "--seeds", "1")
    assert made.returncode == 0, made.stderr
    done = dps(tmp_path, "run", f"{name}.yaml", "--set", "cluster.kind=virtual")
    assert done.returncode == 0, done.stderr
    outcomes = [
        each.outcome
        for each in read_experiment(tmp_path / "results" / name, load_prices(), pytest.fail)
    ]
    assert {each.status for each in outcomes} == {"valid"}
    finals = [each.accuracy.final or 0.0 for each in outcomes]
    if name == "cancer":
        assert min(finals) > 0.97  # logistic regression of scikit-learn: 0.99
    else:
        assert max(finals) < 60  # least squares: 55; the mean alone: 73
