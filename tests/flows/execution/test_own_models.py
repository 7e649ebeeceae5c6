"""Models and data of one's own in Python: found beside the configuration, checked, then trained."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dps.errors import ConfigurationError
from flows.config.own_data import _called, _loaded
from flows.config.trials import Trial, load_trials
from flows.config.workload import workload_of
from flows.execution.preflight import check_models
from flows.workloads import DatasetShape, DatasetSource, Workload
from flows.workloads.own_code import find
from flows.workloads.python_model import PythonModel
from tests.contracts.datasets import DatasetContract
from tests.contracts.workloads import WorkloadContract

MODEL = """
import numpy as np

import beside


def load(rows=200, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, rows)
    return beside.CENTRES[y] + 0.5 * rng.normal(size=(rows, 4)), y


class Model:
    def __init__(self, shape, width=5):
        self.sizes = {"hidden": (shape.features, width), "out": (width, shape.classes)}

    def initial(self, rng):
        return {n: rng.normal(0, 0.5, s).astype(np.float32) for n, s in self.sizes.items()}

    def gradient(self, params, x, y):
        hidden = np.tanh(x.astype(params["hidden"].dtype) @ params["hidden"])
        scores = hidden @ params["out"]
        scores -= scores.max(axis=1, keepdims=True)
        log_sum = np.log(np.exp(scores).sum(axis=1, keepdims=True))
        rows = np.arange(len(y))
        error = np.exp(scores - log_sum)
        error[rows, y] -= 1
        error /= len(y)
        back = error @ params["out"].T * (1 - hidden**2)
        gradients = {"hidden": x.astype(back.dtype).T @ back, "out": hidden.T @ error}
        return (log_sum[:, 0] - scores[rows, y]).mean(dtype=np.float64), gradients

    def predict(self, params, x):
        return np.tanh(x.astype(params["hidden"].dtype) @ params["hidden"]) @ params["out"]
"""
BESIDE = "import numpy as np\n\nCENTRES = np.random.default_rng(0).normal(0, 2, size=(3, 4))\n"
HIDDEN = '"hidden": x.astype(back.dtype).T @ back'


def write(folder: Path, *changes: tuple[str, str]) -> Path:
    """Write the model into a folder, with texts in it replaced."""
    text = MODEL
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "mine.py").write_text(text)
    (folder / "beside.py").write_text(BESIDE)
    return folder


def trials(folder: Path, **sections: Any) -> tuple[Trial, ...]:
    base = {
        "experiment": "own",
        "workload": {"kind": "python", "module": "mine:Model"},
        "dataset": {"kind": "python", "function": "mine:load"},
        "training": {"updates": 10},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    }
    path = folder / "own.yaml"
    path.write_text(yaml.safe_dump({**base, **sections}))
    return load_trials(str(path))[1]


class TestOwnModel(WorkloadContract):
    @pytest.fixture
    def workload(self, tmp_path: Path) -> Workload:
        code = find("mine:Model", write(tmp_path))
        return PythonModel(DatasetShape(4, 3), code, '{"width": 9}')


class TestOwnFunction(DatasetContract):
    @pytest.fixture(params=[{}, {"standardise": True}], ids=["as it is", "standardised"])
    def dataset(self, request: pytest.FixtureRequest, tmp_path: Path) -> DatasetSource:
        section = {"kind": "python", "function": "mine:load", **request.param}
        source: DatasetSource = trials(write(tmp_path), dataset=section)[0].config.dataset
        return source


def test_a_model_is_checked_with_each_of_its_data_sets(tmp_path: Path) -> None:
    changes = (
        ("load(rows=200, seed=0)", "load(rows=200, seed=0, scale=1.0)"),
        ("return beside.CENTRES[y]", "return scale * beside.CENTRES[y]"),
        ("hidden = np.tanh(x", "assert np.abs(x).max() < 100\n        hidden = np.tanh(x"),
    )
    both = trials(write(tmp_path, *changes), axes={"dataset.settings.scale": [1.0, 1000.0]})
    assert check_models(both[:1])
    with pytest.raises(ConfigurationError, match=r"cannot compute a gradient.*AssertionError"):
        check_models(both)


def test_a_model_is_checked_with_rows_from_all_over_the_file(tmp_path: Path) -> None:
    """They may be in the order of the classes."""
    changes = (
        ("y = rng.integers(0, 3, rows)", "y = np.sort(rng.integers(0, 3, rows))"),
        ("hidden = np.tanh(x", "assert y.max() < 2\n        hidden = np.tanh(x"),
    )
    with pytest.raises(ConfigurationError, match=r"cannot compute a gradient.*AssertionError"):
        check_models(trials(write(tmp_path, *changes)))


@pytest.mark.parametrize("raised", ["", 'assert x.dtype == np.float32, "narrow"'])
def test_a_model_is_checked_in_float64_unless_it_refuses_that(tmp_path: Path, raised: str) -> None:
    changed = ("hidden = np.tanh(x", f"{raised}\n        hidden = np.tanh(x")
    (line,) = check_models(trials(write(tmp_path, changed), seeds=[0, 1]))
    compared = "not compared with the loss" if raised else "and differences of the loss agree"
    assert f"Model: mine:Model: 2 arrays, 35 parameters; gradient {compared}" in line


@pytest.mark.parametrize(
    ("calls", "fault", "problem"),
    [
        (0, "{}['key']", r"cannot compute a gradient for x .*KeyError: 'key' \(.*mine\.py, line"),
        (3, "return np.nan, gradients", "the loss for x .* is nan, expected a finite number"),
    ],
    ids=["at once", "where losses are compared"],
)
def test_a_model_that_fails_or_has_no_finite_loss_is_refused(
    tmp_path: Path, calls: int, fault: str, problem: str
) -> None:
    before = "        return (log_sum"
    fails = (
        f"        CALLS.append(1)\n        if len(CALLS) > {calls}:\n            {fault}\n{before}"
    )
    changes = (("class Model:", "CALLS = []\n\n\nclass Model:"), (before, fails))
    with pytest.raises(ConfigurationError, match=problem):
        check_models(trials(write(tmp_path, *changes)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ((HIDDEN, f"{HIDDEN} * 1.001"), "gradient of 'hidden' is .* along a random direction"),
        ((HIDDEN, HIDDEN.replace("hidden", "Hidden", 1)), "are named 'Hidden', 'out', expected"),
        ((HIDDEN, '"hidden": np.zeros((5, 4), np.float32)'), r"is float32\[5, 4\], expected float"),
        ((HIDDEN, f"{HIDDEN} * np.nan"), "gradient of 'hidden' holds NaN"),
        (("error /= len(y)", "params['out'] *= 2"), "read-only"),
        (("error /= len(y)", "error /= np.random.rand()"), "returns different results"),
        (
            ("rng.normal(0, 0.5, s)", "np.random.normal(0, 0.5, s)"),
            "different values for the same seed",
        ),
    ],
)
def test_what_is_wrong_with_a_model_is_said(
    tmp_path: Path, change: tuple[str, str], problem: str
) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        check_models(trials(write(tmp_path, change)))


@pytest.mark.parametrize(
    ("predicts", "problem"),
    [
        ("scores.argmax(axis=1)", r"predicts int64\[32\] for a batch, .*scores \[32, 3\]"),
        ("scores * np.inf", "expected finite scores"),
    ],
)
def test_predictions_must_be_scores(tmp_path: Path, predicts: str, problem: str) -> None:
    before = 'return np.tanh(x.astype(params["hidden"].dtype) @ params["hidden"]) @ params["out"]'
    after = f"{before.replace('return', 'scores =')}\n        return {predicts}"
    with pytest.raises(ConfigurationError, match=problem):
        check_models(trials(write(tmp_path, (before, after))))


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"module": "mine"}, "is incomplete, expected 'module:name'"),
        ({"module": "mine:Models"}, r"mine\.py has no 'Models'; did you mean 'Model'\?"),
        ({"module": "yours:Model"}, "no module 'yours': .* and the installed"),
        ({"module": "mine:Model", "settings": {"depth": 1}}, "cannot be made: TypeError"),
        ({"module": "broken:Model"}, r"SyntaxError: .*broken\.py, line 1"),
    ],
)
def test_a_model_that_is_not_there_is_refused(
    tmp_path: Path, sections: dict[str, Any], problem: str
) -> None:
    write(tmp_path)
    (tmp_path / "broken.py").write_text("def\n")
    with pytest.raises(ConfigurationError, match=problem):
        trials(tmp_path, workload={"kind": "python", **sections})


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("[1, 2]", r"returned list, expected the arrays \(x, y\)"),
        ("(np.full((200, 4), np.nan), y)", r"x\[0, 0\] is missing, expected a number"),
        ("(y[:, None], y * 0)", "all 200 rows have the class 0"),
        (
            "(y[:, None], y, y[:5, None], y[:5].astype(str) + 'x')",
            "one of y_train and y_test has numbers",
        ),
        ("(y[:, None], y, y[:5, None], y[:5] + 7)", "occurs only in the test part"),
        ("(y[:, None], y, np.ones((5, 2)), y[:5])", "x_train has 1 features, x_test 2"),
        ("y + unknown", r"NameError: .*mine\.py, line \d+"),
    ],
)
def test_what_a_function_returns_must_be_examples(
    tmp_path: Path, returned: str, problem: str
) -> None:
    before = "return beside.CENTRES[y] + 0.5 * rng.normal(size=(rows, 4)), y"
    with pytest.raises(ConfigurationError, match=problem):
        trials(write(tmp_path, (before, f"return {returned}")))


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"colour": 1}, "colour: unknown key"),
        ({"faults": [{"kind": "kill", "target": "server-9", "at_updates": 5}]}, "server-9"),
    ],
    ids=["unknown", "fault"],
)
def test_no_code_runs_for_a_configuration_that_is_refused(
    tmp_path: Path, sections: dict[str, Any], problem: str
) -> None:
    ran = tmp_path / "ran"
    write(tmp_path, ("import beside", f"import beside\n\nopen({str(ran)!r}, 'w').close()"))
    with pytest.raises(ConfigurationError, match=problem):
        trials(tmp_path, **sections)
    assert not ran.exists()
    trials(tmp_path)
    assert ran.exists()


def test_four_arrays_are_divided_already(tmp_path: Path) -> None:
    before = "return beside.CENTRES[y] + 0.5 * rng.normal(size=(rows, 4)), y"
    after = "x = rng.normal(size=(rows, 2, 3))\n    return x[:150], y[:150], x[150:], y[150:]"
    (trial,) = trials(write(tmp_path, (before, after)))
    data = trial.config.dataset.load()
    assert (data.x_train.shape, data.x_test.shape) == ((150, 6), (50, 6))


def test_data_that_are_others_each_time_are_refused(tmp_path: Path) -> None:
    (trial,) = trials(write(tmp_path, ("np.random.default_rng(seed)", "np.random.default_rng()")))
    with pytest.raises(ConfigurationError, match="returned other data on a second call"):
        check_models([trial])
    _called.cache_clear()  # as in another process
    _loaded.cache_clear()
    with pytest.raises(ConfigurationError, match="returned other data on a second call"):
        trial.config.dataset.load()


def test_a_trial_is_known_by_its_model_and_data_not_by_their_place(tmp_path: Path) -> None:
    (first,) = trials(write(tmp_path))
    (tmp_path / "moved").mkdir()
    assert trials(write(tmp_path / "moved"))[0].digest == first.digest
    section = {"kind": "python", "function": "mine:load", "settings": {"seed": 1}}
    digests = {
        trials(tmp_path, dataset=section)[0].digest,
        trials(
            tmp_path, workload={"kind": "python", "module": "mine:Model", "settings": {"width": 6}}
        )[0].digest,
        trials(write(tmp_path, ("0.5, s", "0.4, s")))[0].digest,
    }
    assert len({*digests, first.digest}) == 4


def test_a_planned_trial_refuses_a_model_that_has_changed(tmp_path: Path) -> None:
    (trial,) = trials(write(tmp_path))
    write(tmp_path, ("0.5, s", "0.4, s"))
    with pytest.raises(ConfigurationError, match=r"mine\.py has changed since"):
        workload_of(trial.config).initial(np.random.default_rng(0))


def test_what_a_module_imports_from_its_folder_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    imports = "import shared_part\nimport shared_package.part\nimport tabnanny\nimport numpy\n"
    values = "(shared_part.VALUE, shared_package.part.VALUE, tabnanny.VALUE)"
    for name in "ab":
        folder = tmp_path / name
        (folder / "shared_package").mkdir(parents=True)
        (folder / "siblings.py").write_text(f"{imports}\n\ndef load():\n    return {values}\n")
        (folder / "shared_package" / "__init__.py").touch()
        for place in ("shared_part", "shared_package/part", "tabnanny"):
            (folder / f"{place}.py").write_text(f"VALUE = {name!r}\n")
    found = [find("siblings:load", tmp_path / name).load()() for name in "ab"]
    assert found == [("a", "a", "a"), ("b", "b", "b")]
    assert {"shared_part", "shared_package.part", "shared_package"}.isdisjoint(sys.modules)
    assert hasattr(import_module("tabnanny"), "NannyNag")
    assert sys.modules["numpy"] is np


NUMBERS = """
import numpy as np


def load():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3))
    return x, x @ [1.0, 2.0, -1.0] + 5


class Line:
    def __init__(self, shape):
        assert (shape.regression, shape.classes) == (True, 1)
        self.features = shape.features

    def initial(self, rng):
        return {"w": np.zeros(self.features, np.float32), "b": np.zeros(1, np.float32)}

    def gradient(self, params, x, y):
        error = self.predict(params, x) - y.astype(params["w"].dtype)
        return (error**2).mean() / 2, {"w": x.T @ error / len(y), "b": error.mean(keepdims=True)}

    def predict(self, params, x):
        return x @ params["w"] + params["b"]
"""


def test_a_model_may_predict_numbers(tmp_path: Path) -> None:
    (tmp_path / "numbers_of_mine.py").write_text(NUMBERS)
    sections = {
        "dataset": {"kind": "python", "function": "numbers_of_mine:load", "task": "regression"},
        "workload": {"kind": "python", "module": "numbers_of_mine:Line"},
    }
    (trial,) = trials(tmp_path, **sections)
    (line,) = check_models([trial])
    assert line.startswith("Model: numbers_of_mine:Line: 2 arrays, 4 parameters; gradient and diff")
    model, data = workload_of(trial.config), trial.config.dataset.load()
    assert data.y_train.dtype == np.float32
    assert data.shape == DatasetShape(3, 1, regression=True)
    right = {"w": np.array([1, 2, -1], np.float32), "b": np.array([5], np.float32)}
    loss, share = model.evaluate(right, data.x_test, data.y_test)
    assert loss == pytest.approx(0, abs=1e-9)
    assert share == pytest.approx(1)
    with pytest.raises(ValueError, match="no examples"):
        model.evaluate(right, data.x_test[:0], data.y_test[:0])


# -- torch -----------------------------------------------------------------------------------------
