"""`dps new`: every choice gives a configuration that can be run, and no file is lost."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import dump_svmlight_file, load_breast_cancer, load_diabetes, load_iris
from typer.testing import CliRunner

from dps.errors import ConfigurationError
from flows.cli import app
from flows.cli.data_file import DataFile, data_file
from flows.cli.new import FaultKind, Recovery, written
from flows.config.document import parse_document
from flows.config.experiment import ExperimentConfig
from flows.config.trials import Trial, load_trials
from flows.execution.plan import warnings
from tests.support.commands import dps

IRIS, DIABETES = load_iris(), load_diabetes(scaled=False)
CANCER = load_breast_cancer(as_frame=True).frame


def loaded(folder: Path = Path(), **choices: Any) -> tuple[ExperimentConfig, tuple[Trial, ...]]:
    document = parse_document(written("mine", **choices), "mine.yaml")
    return load_trials(replace(document, folder=folder))


@pytest.mark.parametrize("fault", get_args(FaultKind))
def test_every_fault_can_be_run(fault: str) -> None:
    recovery = get_args(Recovery)
    experiment, trials = loaded(recovery=recovery, fault=fault, seeds=1)
    assert len(trials) == len(recovery) * (1 if fault == "none" else 2)
    assert not warnings(trials)
    assert experiment.claims


# -- a user's file ---------------------------------------------------------------------------------


def churn(rows: int = 60) -> pd.DataFrame:
    n = np.arange(rows)
    return pd.DataFrame(
        {
            "id": n,
            "calls": (n % 7).astype(float),
            "plan: old": np.array(["a", "no", "größe"])[n % 3],
            "since": pd.date_range("2020-01-01", periods=rows).astype(str),
            "name": [f"c{i}" for i in n],
            "empty": [None] * rows,
            "left": np.array(["yes", "no"])[n % 2],
        }
    )


def of(path: Path, target: str | None = "left", task: str | None = None) -> DataFile:
    return data_file(path, target, task, path.parent)


def config_of(data: DataFile, folder: Path) -> Any:
    return loaded(folder, data=data, seeds=1)[1][0].config


@pytest.mark.parametrize("kind", ["tsv", "parquet"])
def test_columns_are_used_as_what_they_are_and_what_is_assumed_is_said(
    tmp_path: Path, kind: str
) -> None:
    frame, path = churn(), tmp_path / f"churn.{kind}"
    frame.loc[5, "calls"] = None
    if kind == "parquet":
        frame.to_parquet(path)
    else:
        frame.to_csv(path, index=False, sep="\t" if kind == "tsv" else ",")
    data = of(path)
    told = data.text()
    assert "48 rows to train on, 12 to score, 5 features, 2 classes" in told
    for left_out in (
        "'id' contains row numbers",
        "'name' has 60 different texts",
        "'empty' is empty",
    ):
        assert f"#   {left_out}\n" in told
    dataset = config_of(data, tmp_path).dataset
    assert dataset.features == ("calls", "plan: old", "since")
    assert (dataset.one_hot, dataset.dates, dataset.missing) == (("plan: old",), ("since",), "mean")
    assert dataset.load().digest == data.data.digest
    assert config_of(data, tmp_path).evaluation.metric == "auc"


@pytest.mark.parametrize(
    ("targets", "task"),
    [
        (["yes", "no"] * 20, "classification"),
        (range(40), "regression"),
        ([*range(20)] * 2, "classification"),
        ([*range(21)] * 2, "regression"),
    ],
)
def test_texts_and_few_whole_numbers_are_taken_for_classes(
    tmp_path: Path, targets: Any, task: str
) -> None:
    pd.DataFrame({"a": np.arange(len(targets)) % 5, "left": targets}).to_csv(tmp_path / "a.csv")
    data = of(tmp_path / "a.csv")
    assert (data.section["task"], data.guessed) == (task, targets[0] != "yes")


def test_numbers_are_predicted_by_a_line_and_scored_in_their_unit(tmp_path: Path) -> None:
    frame = pd.DataFrame(DIABETES.data).assign(left=DIABETES.target)
    frame.to_csv(tmp_path / "a.csv", index=False)
    data = of(tmp_path / "a.csv")
    experiment, (trial, *_) = loaded(tmp_path, data=data, seeds=1)
    config = trial.config
    assert (config.workload.kind, config.workload.hidden) == ("mlp", ())
    assert config.dataset.standardise_target
    assert config.evaluation.metric == "rmse"
    effects = [each for each in experiment.claims if each.metric == "effect_time_mean"]
    assert {each.direction for each in effects} == {"less"}
    assert effects[0].smallest / config.dataset.target_deviation == pytest.approx(0.01, rel=0.5)
    pd.DataFrame({"a": IRIS.data[:, 0], "left": IRIS.target}).to_csv(tmp_path / "b.csv")
    assert of(tmp_path / "b.csv", task="regression").score == "rmse"


def test_least_squares_do_not_diverge_whatever_the_size_of_sparse_numbers(tmp_path: Path) -> None:
    for scale in (1e-3, 1.0, 1e3):
        x = DIABETES.data * scale
        dump_svmlight_file(x, DIABETES.target, str(tmp_path / "a.svm"), zero_based=False)
        data = of(tmp_path / "a.svm", None)
        assert 0 < data.learning_rate < 2 / np.linalg.eigvalsh(x.T @ x / len(x)).max()
        assert not config_of(data, tmp_path).dataset.standardise


def test_arrays_and_the_three_classes_of_iris(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=IRIS.data, y=IRIS.target, other=IRIS.data[:, 0])
    data = of(tmp_path / "a.npz", None)
    assert data.score == "accuracy"
    assert config_of(data, tmp_path).dataset.shape.classes == 3
    assert of(tmp_path / "a.npz", "other").score == "rmse"


@pytest.mark.parametrize("name", ["no", "a: b", '"so"'])
def test_odd_names_are_written_so_that_they_are_read(tmp_path: Path, name: str) -> None:
    churn().rename(columns={"left": name, "calls": f"{name} 2"}).to_csv(tmp_path / f"{name}.csv")
    dataset = config_of(of(tmp_path / f"{name}.csv", name), tmp_path).dataset
    assert (dataset.target, dataset.features[0]) == (name, f"{name} 2")


# -- the command -----------------------------------------------------------------------------------


def test_the_file_is_written_planned_and_relative_to_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    CANCER.to_csv(tmp_path / "data" / "cancer.csv", index=False)
    (tmp_path / "mine").mkdir()
    words = ["--data", "data/cancer.csv", "--target", "target", "--output", "mine/a.yaml", "--json"]
    made = dps(tmp_path, "new", "diagnosis", *words)
    assert made.returncode == 0, made.stderr
    assert "guessed; otherwise, run `dps new` with --task regression" in made.stderr
    dataset = json.loads(made.stdout)["dataset"]
    assert (dataset["path"], dataset["metric"]) == ("../data/cancer.csv", "auc")
    planned = dps(tmp_path, "plan", "mine/a.yaml")
    assert planned.returncode == 0, planned.stderr
    assert "cancer.csv: 455 rows to train on, 114 to score, 30 features" in planned.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cancer", "diabetes"])
def test_what_is_written_learns_when_it_is_run(tmp_path: Path, name: str) -> None:
    diabetes = pd.DataFrame(DIABETES.data).assign(target=DIABETES.target)
    (CANCER if name == "cancer" else diabetes).to_csv(tmp_path / "data.csv", index=False)
    made = dps(tmp_path, "new", name, "--data", "data.csv", "--target", "target", "--seeds", "1")
    assert made.returncode == 0, made.stderr
    done = dps(tmp_path, "run", f"{name}.yaml", "--set", "cluster.kind=virtual", "--json")
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)["trials"]
    assert len(trials) == 6
    for trial in trials:
        if name == "cancer":
            assert trial["accuracy_final"] > 0.97, "area under the curve"
        else:
            assert trial["accuracy_final"] < 60, "RMSE"


def test_nothing_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("precious")
    refused = dps(tmp_path, "new", "mine")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "is not replaced" in refused.stderr
    assert (tmp_path / "mine.yaml").read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["mine", "--recovery", "chian"], "did you mean 'chain'"),
        (["mine", "--data", "nowhere.csv", "--target", "y"], "nowhere.csv cannot be read: No such"),
        (["mine", "--data", "good.csv"], "--target: expected a column of good.csv: "),
        (["mine", "--data", "good.csv", "--target", "lefft"], "did you mean 'left'?"),
        (["mine", "--data", "comma.csv", "--target", "y"], "line 2: column 'a' is '0,5', expected"),
        (["mine", "--data", "pipe.csv", "--target", "y"], "pipe.csv cannot be read: Is a device"),
        (["mine", "--target", "y"], "--target and --task need --data"),
        (["mine", "--data", "a.svm", "--target", "y"], "whose lines begin with the target"),
    ],
)
def test_mistakes_are_reported_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
) -> None:
    churn().to_csv(tmp_path / "good.csv", index=False)
    (tmp_path / "comma.csv").write_text("a;y\n" + "0,5;1\n2,5;0\n" * 20)
    (tmp_path / "a.svm").write_text("1 1:2\n0 1:3\n" * 20)
    os.mkfifo(tmp_path / "pipe.csv")
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, ["new", *words])
    assert isinstance(refused.exception, ConfigurationError), refused.output
    assert any(each in str(refused.exception) for each in problem.split("|"))
    assert sorted(tmp_path.iterdir()) == before


def test_a_mistake_ends_the_command_with_2_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "names.csv").write_text("a,target\n1,x\n2,y\n3,z\n")
    refused = dps(tmp_path, "new", "mine", "--data", "names.csv", "--target", "target")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "dps: names.csv: too few rows of 3 classes: 'x' has 1" in refused.stderr
    assert "Traceback" not in refused.stderr
