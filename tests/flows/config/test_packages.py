"""Kinds that installed packages register: in YAML like those of dps, and told of when they fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import dps
from dps.faults import AtUpdates, Seat
from flows.config.experiment import TrialConfig, built
from flows.config.sections import derived_in, distributions, modules
from flows.config.trials import digest, flat
from flows.config.workload import workload_of
from tests.flows.config.test_experiment import SMALL, complaint, only
from tests.support.packages import installed, package

RULE = "optimizer={kind: acme_sign, learning_rate: 0.5}"
EVERYTHING: dict[str, Any] = {
    **SMALL,
    "workload": {"kind": "acme_centroids", "offsets": [1, 2.5]},
    "dataset": {"kind": "acme_clouds", "classes": 4},
    "optimizer": {"kind": "acme_sign", "learning_rate": 0.5, "staleness_aware": True},
    "filters": {"*": [{"kind": "acme_alternate"}, {"kind": "lossless"}]},
    "recovery": {"durability": {"kind": "acme_standby"}},
    "faults": [
        {"kind": "acme_stutter", "target": "server-0", "at_updates": 5, "block": 0.02},
        {
            "kind": "acme_stutter",
            "target": {"role": "server", "index": 1},
            "every": {"mtbf": 1, "until": 3},
        },
    ],
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL, sort_keys=False))
    return path


@pytest.fixture
def everything(tmp_path: Path, acme: Path) -> TrialConfig:
    path = tmp_path / "everything.yaml"
    path.write_text(yaml.safe_dump(EVERYTHING, sort_keys=False))
    return only(path)


# -- what they build -------------------------------------------------------------------------------


def test_registered_kinds_build_objects_of_their_classes(everything: TrialConfig) -> None:
    from acme_dps import datasets, durabilities, faults, filters, rules, workloads

    shape = datasets.Clouds(classes=4).shape
    assert everything.optimizer.build() == dps.StalenessAware(rules.SignDescent(0.5))
    assert built(everything.filters) == {"*": [filters.Alternate(2), dps.Lossless()]}
    assert everything.recovery.build().durability == durabilities.Standby(3)
    assert workload_of(everything) == workloads.Centroids(shape, offsets=(1.0, 2.5))
    assert everything.dataset.load("test").shape == shape
    first, second, *_ = everything.fault_plan
    assert first == faults.Stutter("server-0", AtUpdates(5), block=0.02)
    assert (type(second), second.target) == (faults.Stutter, Seat("server-1"))
    assert "replica-1-2" in everything.node_names


def test_what_is_recorded_of_them_is_read_again(everything: TrialConfig) -> None:
    written = json.loads(everything.model_dump_json())
    again = TrialConfig.model_validate(written)
    assert again == everything
    assert digest(again) == digest(everything)
    known = flat(written)
    assert known["optimizer.kind"] == "acme_sign"
    assert (known["optimizer.decay"], known["faults.0.block"]) == (0.9, 0.02)
    assert everything.model_dump(exclude_unset=True)["dataset"] == EVERYTHING["dataset"]


def test_who_provides_them_is_known(everything: TrialConfig, config: Path) -> None:
    assert len([each for each in derived_in(everything) if each.provider]) == 7
    assert distributions(everything) == {"acme-dps": "1.2.0"}
    assert "acme_dps.rules" in modules(everything)
    assert not modules(only(config))
    assert not distributions(only(config))


# -- mistakes in a configuration -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "optimizer={kind: acme_sing, learning_rate: 1}",
            "optimizer.kind: unknown kind 'acme_sing'; did you mean 'acme_sign'? There are: ",
        ),
        ("optimizer={kind: acme_sign}", "optimizer.learning_rate: is missing; add it"),
        (f"{RULE[:-1]}, decay: 2}}", "optimizer.decay: expected 0 to below 1, got 2.0"),
        (
            "filters={'*': [{kind: acme_alternate, every: 1.5}]}",
            "a valid integer, got 1.5",
        ),
        (
            "faults=[{kind: acme_stutter, target: server-9, at_updates: 1}]",
            "faults.0.target: no node 'server-9' to acme_stutter",
        ),
        (
            "filters={'*': [{kind: lossless}, {kind: acme_alternate}]}",
            "expected a filter that selects",
        ),
    ],
)
def test_mistakes_are_told_as_those_in_sections_of_dps(
    config: Path, acme: Path, override: str, told: str
) -> None:
    assert told in complaint(config, override)


# -- mistakes of packages --------------------------------------------------------------------------

SOUND = """
from dataclasses import dataclass, field
from dps.faults import Lasting

@dataclass
class Thawed:
    slots = ()
    def step(self): ...

@dataclass(frozen=True)
class Sound:
    slots = ()
    def step(self): ...

@dataclass(frozen=True)
class OfAnything:
    rate: print = 1
    slots = ()
    def step(self): ...

@dataclass(frozen=True, kw_only=True)
class ByName:
    rate: float
    slots = ()
    def step(self): ...

@dataclass(frozen=True)
class Raising:
    slots = ()
    def step(self): ...
    def __post_init__(self): {}["x"]

@dataclass(frozen=True)
class Fault:
    kind = "bang"

@dataclass(frozen=True)
class Boom(Lasting):
    kind = "boom"
    def effect(self, hit): ...

@dataclass(frozen=True)
class Idle(Lasting):
    kind = "bang"

@dataclass(frozen=True)
class Vague:
    replicas: int = 1
    def persistence(self, context): ...
    def is_restorable(self, stored, store): ...
"""
OPTIMIZER = "optimizer={kind: mine}"
DURABILITY = "recovery.durability={kind: mine}"
BANG = "faults=[{kind: bang, target: server-0, at_updates: 1}]"


@pytest.mark.parametrize(
    ("entry", "override", "told"),
    [
        ("dps.rules: mine = nowhere:Rule", OPTIMIZER, "cannot be used: ModuleNotFoundError"),
        ("dps.rules: mine = broken:Rule", OPTIMIZER, "cannot be used: ZeroDivisionError"),
        ("dps.rules: mine = sound:Thawed", OPTIMIZER, "expected a frozen dataclass"),
        ("dps.rules: mine = sound:OfAnything", OPTIMIZER, "has a type that YAML cannot represent"),
        ("dps.rules: mine = sound:ByName", OPTIMIZER, "'rate' is keyword-only"),
        ("dps.rules: sgd = sound:Sound", OPTIMIZER, "dps already has a kind of this name"),
        ("dps.faults: bang = sound:Fault", BANG, "Fault is not derived from Lasting"),
        ("dps.faults: bang = sound:Boom", BANG, "the kind of Boom is 'boom', expected 'bang'"),
        ("dps.faults: bang = sound:Idle", BANG, "Idle must define its own effect"),
        ("dps.durabilities: mine = sound:Vague", DURABILITY, "Vague is not derived from Dur"),
    ],
)
def test_what_is_wrong_with_a_package_is_told_with_its_name_and_entry_point(
    config: Path, tmp_path: Path, entry: str, override: str, told: str
) -> None:
    group, _, point = entry.partition(": ")
    folder = package(
        tmp_path / "site",
        "broken-dps",
        f"[{group}]\n{point}\n",
        sound=f"{SOUND}\nSOUND = 3\n",
        broken="1 / 0",
    )
    with installed(folder):
        text = complaint(config, override)
    assert f"broken-dps 0.3, entry point {entry}: " in text
    assert told in text
    sys.modules.pop("sound", None)


def test_two_packages_that_register_the_same_name_are_both_named(
    config: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "site"
    for name in ("first-dps", "second-dps"):
        package(folder, name, f"[dps.rules]\nmine = {name[:-4]}:Rule\n")
    with installed(folder):
        text = complaint(config, OPTIMIZER)
    assert "first-dps 0.3, entry point dps.rules: mine = first:Rule" in text
    assert "second-dps 0.3, entry point dps.rules: mine = second:Rule" in text
