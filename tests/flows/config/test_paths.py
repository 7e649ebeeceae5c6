"""Files that a configuration names: relative to it, or on the command line to where one is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.errors import ConfigurationError
from flows.config.trials import Trial, load_trials
from tests.support.virtual_trials import BASE

ROWS = "x,y\n" + "\n".join(f"{n % 7},{'ab'[n % 2]}" for n in range(100))
TRACE = "seconds,kind,target,duration\n1.0,kill,server-0,1\n"
PROFILE = Path(__file__).parents[3] / "flows" / "config" / "profiles" / "laptop.yaml"
CSV = {"dataset": {"kind": "csv", "path": "data.csv", "target": "y"}}

Read = Callable[[Trial], str]
# What is written, the key that --set sets, and how the path is found in the trial again.
FILES: dict[str, tuple[dict[str, Any], str, str, Read]] = {
    "data": (CSV, "dataset.path", "data.csv", lambda t: t.config.model_dump()["dataset"]["path"]),
    "trace": (
        {"faults": [{"kind": "trace", "csv": "trace.csv"}]},
        "faults.0.csv",
        "trace.csv",
        lambda t: t.config.model_dump()["faults"][0]["csv"],
    ),
    "profile": (
        {"cluster": {"kind": "virtual", "profile": "mine.yaml"}},
        "cluster.profile",
        "mine.yaml",
        lambda t: t.config.model_dump()["cluster"]["profile"],
    ),
}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The folder of a configuration, and the working directory; files are in neither."""
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    monkeypatch.chdir(here)
    return there, here


def put(folder: Path) -> None:
    (folder / "data.csv").write_text(ROWS)
    (folder / "trace.csv").write_text(TRACE)
    shutil.copy(PROFILE, folder / "mine.yaml")


def written(folder: Path, **changes: Any) -> str:
    base = {key: value for key, value in BASE.items() if key != "seed"}
    (folder / "a.yaml").write_text(yaml.safe_dump({**base, **changes}))
    return str(folder / "a.yaml")


@pytest.mark.parametrize("kind", FILES)
def test_a_path_is_relative_to_the_file_that_names_it(
    folders: tuple[Path, Path], kind: str
) -> None:
    there, here = folders
    changes, key, name, path_in = FILES[kind]
    config = written(there, **changes)
    put(there)
    (trial,) = load_trials(config)[1]
    assert path_in(trial) == str(there / name)
    put(here)
    (set_here,) = load_trials(config, [f"{key}={name}"])[1]
    assert path_in(set_here) == str(here / name)
    assert set_here.digest == trial.digest, "where the same data lie makes no other trial"
    axis = {"one": name}
    config = written(there, **changes, axes={key: axis})
    assert path_in(load_trials(config)[1][0]) == str(there / name)
    of_axis = load_trials(config, [f"axes={{{key}: {json.dumps(axis)}}}"])[1][0]
    assert path_in(of_axis) == str(here / name)


@pytest.mark.parametrize(
    "text", ["dataset.path=nope.csv", "dataset={kind: csv, path: nope.csv, target: y}"]
)
def test_a_file_that_is_not_here_is_looked_for_here(folders: tuple[Path, Path], text: str) -> None:
    there, here = folders
    put(there)
    with pytest.raises(ConfigurationError) as refused:
        load_trials(written(there, **CSV), [text])
    assert str(here / "nope.csv") in str(refused.value)
    assert str(there) not in str(refused.value)


def test_a_module_on_the_command_line_may_be_here(folders: tuple[Path, Path]) -> None:
    there, here = folders
    put(there)
    (here / "mine_here.py").write_text(
        "import numpy as np\n"
        "def data():\n"
        "    x = np.arange(40, dtype='float32').reshape(20, 2)\n"
        "    return x, np.arange(20) % 2\n"
    )
    config = written(there, **CSV, training={"workers": 2, "updates": 10, "batch_size": 4})
    dataset = "dataset={kind: python, function: 'mine_here:data'}"
    (trial,) = load_trials(config, [dataset])[1]
    assert trial.config.model_dump()["dataset"]["path"] == str(here / "mine_here.py")
