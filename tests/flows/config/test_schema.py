"""The JSON schema, by which editors complete and check YAML."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from flows.config.experiment import load_experiment, schema
from flows.configs import packaged_names

CONFIGS = Path(__file__).parents[3] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
VALID = Draft202012Validator(schema())


def test_the_file_beside_the_configurations_is_current() -> None:
    kept = json.loads((CONFIGS / "schema.json").read_text())
    assert kept == schema(), "run: dps schema > configs/schema.json"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_each_configuration_names_it_and_goes_by_it(path: Path) -> None:
    text = path.read_text()
    place = os.path.relpath(CONFIGS / "schema.json", path.parent)
    assert text.splitlines()[0] == f"# yaml-language-server: $schema={place}"
    data = yaml.safe_load(text)
    if "experiment" in data:
        assert not [error.message for error in VALID.iter_errors(data)]


@pytest.mark.parametrize("name", packaged_names())
def test_each_configuration_loads_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (CONFIGS / f"{name}.yaml").read_text()
    if "torch" in text:
        pytest.importorskip("torch")
    if "experiment" in yaml.safe_load(text):
        assert name.replace("/", "-").endswith(load_experiment(name).experiment)


@pytest.mark.parametrize(
    "wrong",
    [{"optimizer": {"kind": "sdg"}}, {"training": {"updates": "many"}}],
)
def test_it_refuses_mistakes(wrong: dict[str, object]) -> None:
    demo = yaml.safe_load((CONFIGS / "demo.yaml").read_text())
    assert VALID.is_valid(demo)
    assert not VALID.is_valid({**demo, **wrong})
