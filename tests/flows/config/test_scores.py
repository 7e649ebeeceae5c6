"""What models are scored by: which score fits which data, and what all that is told calls it."""

from __future__ import annotations

import io
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from rich.console import Console
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.metrics import r2_score, roc_auc_score, root_mean_squared_error

from dps.errors import ConfigurationError
from dps.events import Evaluated
from flows.analysis.finished import Finished, print_comparison, read_finished
from flows.analysis.groups import summarize
from flows.analysis.prices import load_prices
from flows.analysis.series import series
from flows.config.base import ComparisonSection
from flows.config.trials import Trial, digest, load_trials
from flows.config.workload import workload_of
from flows.execution.trial import Scorer, run_trial
from flows.metrics import BY_KEY, COLUMNS
from flows.metrics.score import SCORES
from flows.records.record import EVENTS_FILE
from flows.report.compare import figures_of_two
from flows.report.html import write_report
from flows.report.latex import latex_tables
from flows.report.tables import definitions, figure_table
from flows.tracking.tracker import _points


def trials(folder: Path, **sections: Any) -> tuple[Trial, ...]:
    base = {
        "experiment": "scored",
        "workload": "softmax",
        "dataset": {"kind": "npz", "path": "cancer.npz", "standardise": True},
        "training": {"updates": 60, "compute_seconds": 0.01},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
        "cluster": "virtual",
    }
    x, y = load_breast_cancer(return_X_y=True)
    np.savez(folder / "cancer.npz", x=x, y=y)
    x, y = load_diabetes(return_X_y=True)
    np.savez(folder / "diabetes.npz", x=x, y=y)
    path = folder / "scored.yaml"
    path.write_text(yaml.safe_dump({**base, **sections}))
    return load_trials(str(path))[1]


REGRESSION = {
    "kind": "npz",
    "path": "diabetes.npz",
    "task": "regression",
    "standardise": True,
    "standardise_target": True,
}
UNSCALED = {"standardise_target": False}
AUC = {"metric": "auc", "every_seconds": 0.05, "target": 0.9}
RMSE = {"metric": "rmse", "every_seconds": 0.05, "target": 65}


def ran(folder: Path, trial: Trial) -> Finished:
    (folder / trial.name).mkdir(parents=True)
    run_trial(trial, folder / trial.name, lambda event: None)
    return read_finished(folder / trial.name / EVENTS_FILE, load_prices())


def test_auc_is_that_of_scikit_learn_for_the_model_of_a_trial(tmp_path: Path) -> None:
    for workload in ("softmax", "mlp", "logistic"):
        (trial,) = trials(tmp_path, workload=workload, evaluation=AUC)
        model: Any = workload_of(trial.config)
        data = trial.config.dataset.load()
        params = model.initial(np.random.default_rng(0))
        _, gradients = model.gradient(params, data.x_train, data.y_train)
        params = {name: params[name] - gradients[name] for name in params}
        found = model.predict(params, data.x_test)
        loss, score = Scorer(trial.config)(params)
        assert score == pytest.approx(roc_auc_score(data.y_test, found[:, 1] - found[:, 0]))
        assert loss == pytest.approx(model.evaluate(params, data.x_test, data.y_test)[0])
        assert score > 0.9


def test_r_squared_is_that_of_scikit_learn_for_the_model_of_a_trial(tmp_path: Path) -> None:
    (trial,) = trials(tmp_path, workload="linear", dataset=REGRESSION)
    model: Any = workload_of(trial.config)
    data = trial.config.dataset.load()
    assert abs(data.y_train.mean()) < 1e-6
    assert data.y_train.std() == pytest.approx(1, abs=1e-6)
    params = model.initial(np.random.default_rng(0))
    for _ in range(100):
        _, gradients = model.gradient(params, data.x_train, data.y_train)
        params = {name: params[name] - 0.1 * gradients[name] for name in params}
    known = r2_score(data.y_test, model.predict(params, data.x_test))
    assert Scorer(trial.config)(params)[1] == pytest.approx(known, abs=1e-6)
    assert known > 0.2


@pytest.mark.parametrize("scaled", [True, False])
def test_rmse_as_the_score_is_that_of_scikit_learn_in_the_units_of_the_file(
    tmp_path: Path, scaled: bool
) -> None:
    as_in_file = {**REGRESSION, **UNSCALED}
    (plain,) = trials(tmp_path, workload="linear", dataset=as_in_file)
    wanted = REGRESSION if scaled else as_in_file
    scored = {"metric": "rmse", "target": 60}
    (trial,) = trials(tmp_path, workload="linear", dataset=wanted, evaluation=scored)
    model: Any = workload_of(trial.config)
    data, targets = trial.config.dataset.load(), plain.config.dataset.load()
    params = model.initial(np.random.default_rng(0))
    for _ in range(100):
        _, gradients = model.gradient(params, data.x_train, data.y_train)
        params = {name: params[name] - 0.1 * gradients[name] for name in params}
    predicted = model.predict(params, data.x_test).astype(np.float64)
    if scaled:
        predicted = predicted * targets.y_train.std() + targets.y_train.mean()
    known = root_mean_squared_error(targets.y_test, predicted)
    assert Scorer(trial.config)(params)[1] == pytest.approx(known, rel=1e-5)
    assert 40 < known < 70


@pytest.mark.parametrize("workload", ["softmax", "mlp"])
def test_the_loss_as_the_score_is_that_of_the_workload(tmp_path: Path, workload: str) -> None:
    (trial,) = trials(tmp_path, workload=workload, evaluation={"metric": "loss", "target": 2})
    loss, score = Scorer(trial.config)(workload_of(trial.config).initial(np.random.default_rng(0)))
    assert score == loss == pytest.approx(np.log(2), rel=0.2)


COUNTED = """
from pathlib import Path

import numpy as np


class Linear:
    def __init__(self, shape):
        self.shape = shape

    def initial(self, rng):
        return {"w": np.zeros((self.shape.features, self.shape.classes), np.float32)}

    def gradient(self, params, x, y):
        wanted = y[:, None] if self.shape.regression else np.eye(self.shape.classes)[y]
        error = x @ params["w"] - wanted.astype(params["w"].dtype)
        return float(np.mean(error**2)) / 2, {"w": x.T @ error / len(y)}

    def predict(self, params, x):
        with open(Path(__file__).with_name("predicted"), "a") as file:
            print(len(x), file=file)
        return x @ params["w"]
"""


@pytest.mark.parametrize("metric", ["accuracy", "auc", "r2", "rmse", "loss"])
def test_an_evaluation_has_the_model_predict_each_example_once(tmp_path: Path, metric: str) -> None:
    (tmp_path / "counted.py").write_text(COUNTED)
    (trial,) = trials(
        tmp_path,
        workload={"kind": "python", "module": "counted:Linear"},
        evaluation={"metric": metric, "every_seconds": 0.05},
        optimizer={"kind": "sgd", "learning_rate": 0.01},
        **({"dataset": REGRESSION} if metric in ("r2", "rmse") else {}),
    )
    evaluated = ran(tmp_path / "ran", trial).record.of(Evaluated)
    assert len(evaluated) > 3
    rows = sum(map(int, (tmp_path / "predicted").read_text().split()))
    assert rows == len(evaluated) * len(trial.config.dataset.load("test").y_test)


@pytest.mark.slow
@pytest.mark.parametrize("scaled", [True, False])
def test_rmse_is_in_the_units_of_the_file(tmp_path: Path, scaled: bool) -> None:
    (plain,) = trials(tmp_path, workload="linear", dataset={**REGRESSION, **UNSCALED})
    sections = {
        "dataset": REGRESSION if scaled else {**REGRESSION, **UNSCALED},
        "training": {"updates": 200, "compute_seconds": 0.01},
        "evaluation": {"every_seconds": 0.05},
    }
    (trial,) = trials(tmp_path, workload="linear", **sections)
    done = ran(tmp_path / "scored", trial)
    # The loss is half the mean squared error, in the units that are trained on.
    squares = [2 * event.loss for event in done.record.of(Evaluated)[-3:]]
    unit = plain.config.dataset.load().y_train.std() if scaled else 1.0
    found = done.outcome.row()["rmse_final"]
    assert found == pytest.approx(unit * np.sqrt(np.mean(squares)), rel=1e-4)
    assert 40 < found < 70


def test_a_trial_is_not_known_by_its_rmse(tmp_path: Path) -> None:
    (numbers,) = trials(tmp_path, workload="linear", dataset=REGRESSION)
    known = numbers.config.dataset.model_copy(update={"target_deviation": 1.0})
    assert digest(numbers.config.model_copy(update={"dataset": known})) == numbers.digest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "name", "key"),
    [
        ({"evaluation": AUC}, "AUC", "auc"),
        ({"workload": "linear", "dataset": REGRESSION}, "R²", "r2"),
        ({"workload": "linear", "dataset": REGRESSION, "evaluation": RMSE}, "RMSE", "rmse"),
        ({"evaluation": {**AUC, "metric": "loss"}}, "loss", "loss"),
    ],
    ids=["auc", "r2", "rmse", "loss"],
)
def test_all_that_is_told_of_a_trial_has_the_name_of_its_score(
    tmp_path: Path, sections: dict[str, Any], name: str, key: str
) -> None:
    faults = {"none": [], "kill": [{"kind": "kill", "target": "server-0", "at_updates": 20}]}
    varied = trials(tmp_path, axes={"faults": faults}, recovery="chain", **sections)
    done = [ran(tmp_path / "scored", trial) for trial in varied]
    outcomes = [each.outcome for each in done]
    assert {outcome.status for outcome in outcomes} == {"valid"}
    assert {outcome.score.name for outcome in outcomes} == {name}
    scores = [event.accuracy for event in done[0].record.of(Evaluated)]
    points = [point.value for point in series(done[0].record) if point.name == f"eval/{key}"]
    assert points == scores
    assert not any(point.name == "eval/accuracy" for point in series(done[0].record))

    page = write_report(tmp_path / "scored", tmp_path / "report.html").read_text()
    said = SCORES[key].told
    assert said.lower().startswith(f"{name.lower()} is the ")
    assert said in unescape(page)
    named = re.sub(r"<code>.*?</code>|<[^>]*>|accuracy_\w+", "", page)
    assert "accuracy" not in named.lower()
    assert f"final {name}" in page
    assert f"test {name}" in page  # on the axes of figures
    less = SCORES[key].better == "lower"
    assert f"{name}{' (less is better)' if less else ''} differed" in page
    assert f"{'above' if less else 'below'} 0, it was worse than without the fault" in page
    assert f"Left and {'down' if less else 'up'} is better" in page
    for phrase in ("test accuracy", "inal accuracy", "effect on accuracy", "Accuracy minus"):
        assert phrase not in page
    console = Console(record=True, width=500, file=io.StringIO())
    print_comparison(outcomes, console)
    assert said in " ".join(console.export_text().split())
    quiet, struck = sorted((outcome.row() for outcome in outcomes), key=lambda row: row["faults"])
    of_faults = [column.key for column in COLUMNS if column.of_faults]
    assert [key for key in of_faults if quiet[key] is not None] == []
    gained = {
        column.key
        for column in COLUMNS
        if column.metric and quiet[column.key] is None and struck[column.key] is not None
    }
    assert {"rto_seconds", "accuracy_drop"} <= gained <= {*of_faults}


@pytest.mark.slow
@pytest.mark.parametrize("key", ["rmse", "loss"])
def test_a_figure_that_is_the_score_again_is_not_shown_beside_it(tmp_path: Path, key: str) -> None:
    data = {"workload": "linear", "dataset": REGRESSION} if key == "rmse" else {}
    scored = {**RMSE, "metric": key}
    done = [
        ran(tmp_path / "scored", trial)
        for trial in trials(tmp_path, evaluation=scored, seeds=[0, 1], **data)
    ]
    outcomes = [each.outcome for each in done]
    row, again = outcomes[0].row(), SCORES[key].same_as
    assert {row[name] for name in again} <= {row["accuracy_final"], row["accuracy_best"]}
    assert again >= {f"{key}_final"}
    label = f"final {SCORES[key].name}"
    groups = summarize(outcomes)
    table = figure_table(groups, groups[0].condition)
    labels = [line.column.label for _, lines in table.sections for line in lines]
    assert labels.count(label) == 1
    latex = [row[0] for table in latex_tables(outcomes, ComparisonSection()) for row in table.rows]
    assert sum(label in named for named in latex) == 1
    side_by_side = figures_of_two(("a", "b"), *outcomes)
    assert sum(str(cell).startswith(label) for cell in side_by_side.columns[0].cells) == 1
    assert [each.label for each in definitions(SCORES[key])].count(label) == 1
    tracked = [name for name, *_ in _points(done[0].record, outcomes[0], shift=0.0)]
    assert tracked.count(f"compare/{key}_final") == 1
    assert f"trial/final/{key}" not in tracked


def test_no_figure_speaks_of_accuracy_under_another_score() -> None:
    told = [f"{column.label} {column.definition}" for column in COLUMNS]
    assert sum("ccuracy" in text for text in told) > 10
    for key in SCORES.keys() - {"accuracy"}:
        for column in COLUMNS:
            found = SCORES[key].of(column)
            assert "ccuracy" not in f"{found.label} {found.definition}"
    assert [SCORES["accuracy"].of(column) for column in COLUMNS] == list(COLUMNS)


def test_of_a_score_of_which_less_is_better_all_of_its_figures_are() -> None:
    rmse, r2 = SCORES["rmse"], SCORES["r2"]
    flipped = {"higher": "lower", "lower": "higher", None: None}
    for column in COLUMNS:
        found = rmse.of(column)
        assert found.better == (flipped[column.better] if column.of_score else column.better)
        assert found.unit == ("" if column.of_score else column.unit)
        assert (r2.of(column).better, r2.of(column).unit) == (column.better, column.unit)
    assert rmse.of(BY_KEY["effect_time_mean"]).better == "lower"
    of_score = {column.key for column in COLUMNS if column.of_score}
    assert of_score >= {"accuracy_final", "accuracy_drop", "effect_money_end", "effect_time_area"}
    assert of_score.isdisjoint({"loss_final", "target_seconds", "idle_share", "objective_excess"})


def test_the_interval_of_no_score_goes_below_0_and_that_of_a_difference_does() -> None:
    for score in SCORES.values():
        cut = {c.key: score.of(c).cut(-0.1) for c in COLUMNS if c.of_score}
        assert {cut[key] for key in ("accuracy_final", "accuracy_before", "accuracy_best")} == {0.0}
        assert {cut[key] for key in ("accuracy_drop", "effect_time_mean")} == {-0.1}


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"evaluation": {"metric": "r2"}}, "r2 is for numbers; it needs data with task"),
        ({"workload": "linear"}, "linear predicts numbers; it needs data with task: regression"),
        ({"dataset": REGRESSION}, "softmax predicts no numbers; use linear, mlp, torch, python"),
        (
            {"dataset": REGRESSION, "workload": "mlp", "evaluation": {"metric": "auc"}},
            "auc is for classes; regression is scored by r2, rmse or loss",
        ),
        ({"dataset": "digits", "evaluation": {"metric": "auc"}}, "the data have 10; use accuracy"),
        (
            {"workload": "rica", "evaluation": {"metric": "auc"}},
            "rica gives no scores of classes",
        ),
        ({"evaluation": {"metric": "rmse"}}, "rmse is for numbers; it needs data with task"),
        ({"evaluation": {"metric": "mse"}}, "unknown metric 'mse'; .*rmse"),
        (
            {"evaluation": {"target": 60}},
            "target.*expected at most 1, got 60: the score is a share",
        ),
        ({"axes": {"evaluation.metric": ["auc", "accuracy"]}}, "trials with different scores"),
        (
            {"axes": {"evaluation": {"a": {"metric": "auc"}, "b": {"every_seconds": 1.0}}}},
            "trials with different scores",
        ),
        (
            {"dataset": {"kind": "npz", "path": "diabetes.npz"}},
            "Are numbers to be predicted. Give task: regression|too few rows",
        ),
        (
            {"dataset": {"kind": "npz", "path": "cancer.npz", "standardise_target": True}},
            "classes have no scale; leave it out",
        ),
    ],
)
def test_a_score_that_does_not_fit_is_refused(
    tmp_path: Path, sections: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        trials(tmp_path, **sections)


def test_a_trial_of_another_score_is_another(tmp_path: Path) -> None:
    (plain,) = trials(tmp_path)
    (scored,) = trials(tmp_path, evaluation={"metric": "auc"})
    assert scored.digest != plain.digest
