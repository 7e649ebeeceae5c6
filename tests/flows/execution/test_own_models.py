"""Models and data of one's own in Python: found beside the configuration, checked, then trained."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dps.errors import ConfigurationError
from flows.config.trials import Trial, load_trials
from flows.config.workload import workload_of
from flows.execution.preflight import check_models
from flows.records.settings import settings, trial_from
from flows.workloads import DatasetShape, DatasetSource, Workload
from flows.workloads.own_code import find
from flows.workloads.own_data import called
from flows.workloads.python_model import PythonModel
from tests.contracts.datasets import DatasetContract
from tests.contracts.workloads import WorkloadContract
from tests.support.needs_torch import needs_torch

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


def test_a_model_is_checked_against_differences_of_its_loss(tmp_path: Path) -> None:
    (line,) = check_models(trials(write(tmp_path), seeds=[0, 1]))
    assert line.startswith("Model: mine:Model: 2 arrays, 35 parameters; its gradient agrees")
    assert line.endswith("(float64).")


def test_a_model_that_knows_float32_only_is_checked_in_it(tmp_path: Path) -> None:
    narrow = ('"out": hidden.T @ error}', '"out": (hidden.T @ error).astype(np.float32)}')
    (line,) = check_models(trials(write(tmp_path, narrow)))
    assert line.endswith("(float32).")
    wrong = (HIDDEN, HIDDEN.replace("@ back", "@ back * np.float32(1.2)"))
    with pytest.raises(ConfigurationError, match=r"of 'hidden' is not that of the loss.*float32"):
        check_models(trials(write(tmp_path, narrow, wrong)))


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


@pytest.mark.parametrize(
    "raised", ['assert x.dtype == np.float32, "narrow"', '{np.dtype("float32"): 1}[x.dtype]']
)
def test_a_model_that_refuses_float64_in_its_own_way_is_checked_in_float32(
    tmp_path: Path, raised: str
) -> None:
    refuses = ("hidden = np.tanh(x", f"{raised}\n        hidden = np.tanh(x")
    (line,) = check_models(trials(write(tmp_path, refuses)))
    assert line.endswith("(float32).")


@pytest.mark.parametrize("calls", [0, 3], ids=["at once", "where losses are compared"])
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("{}['key']", r"cannot compute a gradient for x .*: KeyError: 'key' \(.*mine\.py, line"),
        ("return np.inf, gradients", "the loss for x .* is inf, expected a finite number"),
        ("return np.nan, gradients", "the loss for x .* is nan, expected a finite number"),
    ],
)
def test_a_model_that_fails_or_has_no_finite_loss_is_refused(
    tmp_path: Path, fault: str, problem: str, calls: int
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
        ((HIDDEN, f"{HIDDEN} * 1.001"), "gradient of 'hidden' is not that of the loss: along"),
        ((" * (1 - hidden**2)", ""), "gradient of 'hidden' is not that of the loss"),
        ((HIDDEN, HIDDEN.replace("hidden", "Hidden", 1)), "are named 'Hidden', 'out', the param"),
        ((HIDDEN, '"hidden": np.zeros((5, 4), np.float32)'), r"is float32\[5, 4\], expected that"),
        ((HIDDEN, HIDDEN.replace("back.dtype).T", "float).T")), r"is float64\[4, 5\], expected"),
        ((HIDDEN, f"{HIDDEN} * np.nan"), "gradient of 'hidden' has NaN"),
        (("error /= len(y)", "error /= rows.fill"), r"TypeError: .*mine\.py, line \d+\)"),
        (("error /= len(y)", "params['out'] *= 2"), "read-only"),
        (("error /= len(y)", "x *= 2"), "read-only"),
        (("error /= len(y)", "error /= np.random.rand()"), "gives another result for the same"),
        (
            ("rng.normal(0, 0.5, s)", "np.random.normal(0, 0.5, s)"),
            "other values for the same seed",
        ),
        (
            ("(0, 0.5, s).astype(np.float32)", "(0, 1, s).astype(int)"),
            r"is int64\[4, 5\], expected",
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
        ("nothing", "cannot predict: NameError"),
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
        ({"module": "mine"}, "names nothing, expected 'module:name'"),
        ({"module": "mine:Other"}, r"mine\.py has no 'Other'"),
        ({"module": "mine:Models"}, r"mine\.py has no 'Models'; did you mean 'Model'\?"),
        ({"module": "yours:Model"}, "there is no module 'yours': neither .* installed"),
        ({"module": "beside:CENTRES"}, "is ndarray, expected a function or a class"),
        ({"module": "copy:copy"}, "has no method 'initial'; it needs"),
        ({"module": "mine:Model", "settings": {"depth": 1}}, "cannot be made: TypeError"),
        ({"module": "mine:Model", "sha256": "0" * 64}, "the module has the SHA-256"),
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
        ("(y, y, y)", "returned 3 values"),
        ("(y, y)", r"mine:load: x is \[200\] and y \[200\], expected one example"),
        ("(np.full((200, 4), np.nan), y)", r"x\[0, 0\] is missing, expected a number"),
        (
            "(__import__('scipy.sparse').sparse.csr_array(np.ones((200, 1)) * np.inf), y)",
            r"x\.data\[0\] is 'inf', expected a number",
        ),
        ("(y[:0, None], y[:0])", r"x is \[0, 1\] and y \[0\], expected one example"),
        ("(np.zeros((0, 2, 2)), y[:0])", r"x is \[0, 2, 2\] and y \[0\], expected one example"),
        ("(y[:, None][:, :0], y)", r"x is \[200, 0\] and y \[200\], expected one example"),
        ("(np.full((200, 4), 'a'), y)", r"x\[0, 0\] is 'a', expected a number"),
        ("(y[:, None], np.where(y, 'a', 'NA'))", r"y\[\d+\] is 'NA', expected a class or a number"),
        ("(y[:, None], np.where(y, 'a', ''))", r"y\[\d+\] is empty, expected a class or a number"),
        ("(y[:, None], np.where(y, '1,5', '2'))", r"y\[\d+\] is '1,5', expected a number"),
        (
            "(y[:, None], y, y[:, None], np.where(y, 'a', None))",
            r"y_test\[\d+\] is missing, expected a class or a number",
        ),
        ("(y[:, None], y * 0)", "all 200 rows are of the class 0"),
        ("(y[:, None], y, np.ones((5, 2)), y[:5])", "test part has 2 features, the other 1"),
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
    ("targets", "classes"),
    [
        ("np.where(y, 'a', 'b').astype(object)", ("a", "b")),
        ("np.where(y, b'a', b'b')", ("a", "b")),
        ("[*np.where(y, 'a', 'b')]", ("a", "b")),
        ("y > 0", ("False", "True")),
        ("np.where(y, 1.0, -1.0)", ("-1", "1")),
    ],
    ids=["objects", "bytes", "a list", "booleans", "floats"],
)
def test_targets_of_a_function_may_be_whatever_a_file_has(
    tmp_path: Path, targets: str, classes: tuple[str, ...]
) -> None:
    before = "return beside.CENTRES[y] + 0.5 * rng.normal(size=(rows, 4)), y"
    (trial, *_) = trials(write(tmp_path, (before, f"return y[:, None], {targets}")))
    assert trial.config.dataset.whole.names == classes


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"colour": 1}, "colour: unknown key"),
        ({"training": {"updates": "ten"}}, "updates.*expected a whole number"),
        ({"axes": {"optimizer.learning_rate": ["fast"]}}, "'fast'"),
        ({"faults": [{"kind": "kill", "target": "server-9", "at_updates": 5}]}, "server-9"),
    ],
    ids=["unknown", "type", "axis", "fault"],
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


def test_code_is_looked_for_beside_a_configuration_whose_labels_are_wrong(tmp_path: Path) -> None:
    axes = {"axes": {"server.shards": [1, 2]}, "exclude": [{"server.shards": "3"}]}
    with pytest.raises(ConfigurationError, match=r"exclude.*3"):
        trials(write(tmp_path), **axes)


def test_four_arrays_are_divided_already(tmp_path: Path) -> None:
    before = "return beside.CENTRES[y] + 0.5 * rng.normal(size=(rows, 4)), y"
    after = "x = rng.normal(size=(rows, 2, 3))\n    return x[:150], y[:150], x[150:], y[150:]"
    (trial,) = trials(write(tmp_path, (before, after)))
    data = trial.config.dataset.load()
    assert (data.x_train.shape, data.x_test.shape) == ((150, 6), (50, 6))


def test_data_that_are_others_each_time_are_refused(tmp_path: Path) -> None:
    (trial,) = trials(write(tmp_path, ("np.random.default_rng(seed)", "np.random.default_rng()")))
    with pytest.raises(ConfigurationError, match="returned other data when it was called again"):
        check_models([trial])
    called.cache_clear()  # as in another process
    with pytest.raises(ConfigurationError, match="returned other data than when the trial was"):
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


def test_a_recorded_trial_refuses_a_model_that_has_changed(tmp_path: Path) -> None:
    (trial,) = trials(write(tmp_path))
    kept = json.loads(json.dumps(settings(trial, {})))
    assert workload_of(trial_from(kept, "the record").config) == workload_of(trial.config)
    write(tmp_path, ("0.5, s", "0.4, s"))
    again = workload_of(trial_from(kept, "the record").config)
    with pytest.raises(ConfigurationError, match=r"mine\.py has changed since"):
        again.initial(np.random.default_rng(0))


def test_modules_of_the_same_name_in_two_folders_are_two(tmp_path: Path) -> None:
    for name, width in (("a", 5), ("b", 7)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, ("width=5", f"width={width}"))
    made = [workload_of(trials(tmp_path / name)[0].config) for name in "ab"]
    shapes = [w.initial(np.random.default_rng(0))["out"].shape for w in made]
    assert shapes == [(5, 3), (7, 3)]


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


def test_models_on_an_axis_are_checked_each(tmp_path: Path) -> None:
    axes = {"workload.settings.width": [2, 3], "training.batch_size": [8, 16]}
    found = check_models(trials(write(tmp_path), axes=axes))
    assert sorted({line.split(";")[0] for line in found}) == [
        "Model: mine:Model: 2 arrays, 14 parameters",
        "Model: mine:Model: 2 arrays, 21 parameters",
    ]


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
    assert line.startswith(
        "Model: numbers_of_mine:Line: 2 arrays, 4 parameters; its gradient agrees"
    )
    model, data = workload_of(trial.config), trial.config.dataset.load()
    assert data.y_train.dtype == np.float32
    assert data.shape == DatasetShape(3, 1, regression=True)
    right = {"w": np.array([1, 2, -1], np.float32), "b": np.array([5], np.float32)}
    loss, share = model.evaluate(right, data.x_test, data.y_test)
    assert loss == pytest.approx(0, abs=1e-9)
    assert share == pytest.approx(1)
    with pytest.raises(ValueError, match="no examples"):
        model.evaluate(right, data.x_test[:0], data.y_test[:0])


def test_predictions_of_numbers_must_be_one_for_each_example(tmp_path: Path) -> None:
    wrong = NUMBERS.replace(
        "return x @ params", "return x.T[:, :2] if len(x) == 32 else x @ params"
    )
    (tmp_path / "numbers_of_mine.py").write_text(
        wrong.replace("self.predict(params, x)", "x @ params['w'] + params['b']")
    )
    sections = {
        "dataset": {"kind": "python", "function": "numbers_of_mine:load", "task": "regression"},
        "workload": {"kind": "python", "module": "numbers_of_mine:Line"},
    }
    with pytest.raises(ConfigurationError, match=r"expected finite scores \[32, 1\]: a prediction"):
        check_models(trials(tmp_path, **sections))


# -- torch -----------------------------------------------------------------------------------------

TORCH = """
from torch import nn


def fits(shape):
    return nn.Linear(shape.features, shape.classes)


def {name}(shape):
    return nn.Linear({inputs}, {outputs})
"""


MISFITS = [
    (
        "wide",
        7,
        3,
        "cannot compute a gradient for x .*: RuntimeError: .*shapes cannot be multiplied",
    ),
    ("few", 4, 2, "cannot compute a gradient for x .*: IndexError"),
    ("many", 4, 9, r"predicts float32\[32, 9\] for a batch, expected finite scores \[32, 3\]"),
]


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "problem"),
    [pytest.param(*each, marks=needs_torch, id=each[0]) for each in MISFITS],
)
def test_a_module_of_torch_must_fit_the_data(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    inputs: int,
    outputs: int,
    problem: str,
) -> None:
    place = f"torch_models_{name}"
    write(tmp_path)
    text = TORCH.format(name=name, inputs=inputs, outputs=outputs)
    (tmp_path / f"{place}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    fits, other = (
        trials(tmp_path, workload={"kind": "torch", "module": f"{place}:{each}"})[0]
        for each in ("fits", name)
    )
    assert check_models([fits]) == [f"Model: {place}:fits: 2 arrays, 15 parameters."]
    with pytest.raises(ConfigurationError, match=problem):
        check_models([replace(other, name="other")])
