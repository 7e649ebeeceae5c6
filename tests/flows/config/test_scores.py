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
from flows.config.trials import Trial, load_trials
from flows.config.workload import workload_of
from flows.execution.training import Scorer
from flows.execution.trial import run_trial
from flows.metrics.prices import load_prices
from flows.metrics.score import SCORES
from flows.records.record import EVENTS_FILE
from flows.report.html import write_report
from flows.report.study import Study
from flows.report.terminal import print_study
from flows.statistics.finished import Finished, read_finished


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


LINE = {"kind": "mlp", "hidden": []}
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


def stepped(model: Any, data: Any) -> dict[str, Any]:
    """The weights after a hundred steps of gradient descent."""
    params: dict[str, Any] = model.initial(np.random.default_rng(0))
    for _ in range(100):
        _, gradients = model.gradient(params, data.x_train, data.y_train)
        params = {name: params[name] - 0.1 * gradients[name] for name in params}
    return params


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
    (trial,) = trials(tmp_path, workload=LINE, dataset=REGRESSION)
    model: Any = workload_of(trial.config)
    data = trial.config.dataset.load()
    assert abs(data.y_train.mean()) < 1e-6
    assert data.y_train.std() == pytest.approx(1, abs=1e-6)
    params = stepped(model, data)
    known = r2_score(data.y_test, model.predict(params, data.x_test))
    assert Scorer(trial.config)(params)[1] == pytest.approx(known, abs=1e-6)
    assert known > 0.2


@pytest.mark.parametrize("scaled", [True, False])
def test_rmse_as_the_score_is_that_of_scikit_learn_in_the_units_of_the_file(
    tmp_path: Path, scaled: bool
) -> None:
    as_in_file = {**REGRESSION, **UNSCALED}
    (plain,) = trials(tmp_path, workload=LINE, dataset=as_in_file)
    wanted = REGRESSION if scaled else as_in_file
    scored = {"metric": "rmse", "target": 60}
    (trial,) = trials(tmp_path, workload=LINE, dataset=wanted, evaluation=scored)
    model: Any = workload_of(trial.config)
    data, targets = trial.config.dataset.load(), plain.config.dataset.load()
    params = stepped(model, data)
    predicted = model.predict(params, data.x_test).astype(np.float64)
    if scaled:
        predicted = predicted * targets.y_train.std() + targets.y_train.mean()
    known = root_mean_squared_error(targets.y_test, predicted)
    assert Scorer(trial.config)(params)[1] == pytest.approx(known, rel=1e-5)
    assert 40 < known < 70


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sections", "name", "key"),
    [
        ({"evaluation": AUC}, "AUC", "auc"),
        (
            {"workload": LINE, "dataset": REGRESSION, "evaluation": RMSE},
            "RMSE",
            "rmse",
        ),
    ],
    ids=["auc", "rmse"],
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

    page = write_report(tmp_path / "scored", tmp_path / "report.html").read_text()
    assert SCORES[key].note in unescape(page)
    named = re.sub(r"<code>.*?</code>|<[^>]*>|accuracy_\w+", "", page)
    assert "accuracy" not in named.lower()
    for phrase in (f"final {name}", f"test {name}"):  # in tables, and on the axes of figures
        assert phrase in page
    console = Console(record=True, width=500, file=io.StringIO())
    print_study(Study(tuple(outcomes)), None, console)
    assert SCORES[key].note in " ".join(console.export_text().split())


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"evaluation": {"metric": "r2"}}, "r2 is for numbers; it needs data with task"),
        ({"dataset": REGRESSION}, "softmax cannot predict numbers; use mlp, torch, python"),
        ({"dataset": "digits", "evaluation": {"metric": "auc"}}, "the data have 10; use accuracy"),
        (
            {"evaluation": {"target": 60}},
            "target.*expected at most 1, got 60: the default score is a share",
        ),
        ({"axes": {"evaluation.metric": ["auc", "accuracy"]}}, "trials with different scores"),
        (
            {"dataset": {"kind": "npz", "path": "cancer.npz", "standardise_target": True}},
            "classes cannot be standardised; leave it out",
        ),
    ],
)
def test_a_score_that_does_not_fit_is_refused(
    tmp_path: Path, sections: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        trials(tmp_path, **sections)
