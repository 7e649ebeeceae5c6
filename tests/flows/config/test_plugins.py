"""Kinds that installed packages register: in YAML like those of dps, and told of when they fail."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml

import dps
from dps.core.faults.plan import AtUpdates, Seat
from dps.protocol.wire import decode, encode
from flows.config.experiment import TrialConfig, load_experiment
from flows.config.plugins import distributions, modules, sections_in
from flows.config.trials import digest, expand, flat
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
    assert everything.build_optimizer() == dps.StalenessAware(rules.SignDescent(0.5))
    assert everything.build_filters() == {"*": [filters.Alternate(2), dps.Lossless()]}
    assert everything.build_recovery().durability == durabilities.Standby(3)
    assert workload_of(everything) == workloads.Centroids(shape, offsets=(1.0, 2.5))
    assert everything.dataset.load("test").shape == shape
    first, second, *_ = everything.build_faults()
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


def test_configurations_travel_to_other_processes(everything: TrialConfig) -> None:
    sent = pickle.dumps(everything)
    again = pickle.loads(sent)  # noqa: S301
    assert again == everything
    assert again.model_dump(exclude_unset=True) == everything.model_dump(exclude_unset=True)
    code = (
        "import pickle, sys; from flows.config.trials import digest;"
        "print(digest(pickle.load(sys.stdin.buffer)))"
    )
    run = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert run.stdout.decode().strip() == digest(everything)


def test_a_list_stands_for_a_tuple_and_what_is_missing_has_its_default(
    config: Path, tmp_path: Path
) -> None:
    source = """
        from __future__ import annotations
        from dataclasses import dataclass, field
        from typing import Optional

        @dataclass(frozen=True)
        class Optionals:
            new: tuple[int, ...] | None = None
            old: Optional[tuple[float, ...]] = None
            later: tuple[int, ...] = field(default_factory=lambda: (7,))
            slots = ()
            def step(self): ...
    """
    point = "[dps.rules]\nmine = optionals:Optionals\n"
    with installed(package(tmp_path / "site", "more-dps", point, optionals=dedent(source))):
        rule = only(config, "optimizer={kind: mine, new: [1, 2], old: [3]}").build_optimizer()
        assert (rule.new, rule.old, rule.later) == ((1, 2), (3.0,), (7,))
        assert only(config, "optimizer={kind: mine, new: null}").build_optimizer().new is None


def test_who_provides_them_is_known(everything: TrialConfig, config: Path) -> None:
    assert len(list(sections_in(everything))) == 7
    assert distributions(everything) == {"acme-dps": "1.2.0"}
    assert "acme_dps.rules" in modules(everything)
    assert not modules(only(config))
    assert not distributions(only(config))


def test_a_durability_of_another_maker_says_itself_that_it_writes_checkpoints(
    config: Path, tmp_path: Path
) -> None:
    cellar = """
from dataclasses import dataclass
from dps import Checkpoint

@dataclass(frozen=True)
class Cellar(Checkpoint):
    keep: int = 3
"""
    entry = "[dps.durabilities]\nmine = cellar:Cellar\n"
    kill = "faults=[{kind: kill, target: server-0, phase: checkpoint}]"
    with installed(package(tmp_path / "site", "cellar-dps", entry, cellar=cellar)):
        assert only(config, "recovery.durability={kind: mine}", kill).build_faults()


def test_they_can_be_varied_and_overridden(config: Path, acme: Path) -> None:
    values = "{own: {kind: sgd, learning_rate: 1}, sign: {kind: acme_sign, learning_rate: 1}}"
    axes = f"axes.optimizer={values}"
    own, sign = expand(load_experiment(str(config), [axes]))
    assert (own.config.optimizer.kind, sign.config.optimizer.kind) == ("sgd", "acme_sign")
    assert only(config, RULE, "optimizer.decay=0").build_optimizer().decay == 0


def test_a_kind_of_dps_is_found_without_looking_up_others(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.config.plugins.entry_points", None)
    assert only(config).optimizer.kind == "sgd"


# -- mistakes in a configuration -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "optimizer={kind: acme_sing, learning_rate: 1}",
            "optimizer.kind: unknown kind 'acme_sing'; did you mean 'acme_sign'? There are: sgd, "
            "momentum, adagrad, adam, adamw, ftrl, proximal, delayed_proximal, by_name, acme_sign",
        ),
        (
            "faults=[{kind: kil, target: server-0, at_updates: 1}]",
            "faults.0.kind: unknown kind 'kil'; did you mean 'kill'? There are: kill, pause,",
        ),
        ("filters={'*': [{kind: nothing}]}", "filters.*.0.kind: unknown kind 'nothing'; there are"),
        ("recovery.durability={kind: standby}", "recovery.durability.kind: unknown kind 'standby'"),
        ("optimizer={kind: acme_sign}", "optimizer.learning_rate: is missing; add it"),
        (f"{RULE[:-1]}, decai: 1}}", "optimizer.decai: unknown key; did you mean 'decay'? There"),
        (f"{RULE[:-1]}, decay: x}}", "optimizer.decay: expected a number, got 'x'"),
        (f"{RULE[:-1]}, decay: 2}}", "optimizer: SignDescent: decay=2.0, expected 0 to below 1"),
        ("filters={'*': [{kind: acme_alternate, every: 1.5}]}", "expected a whole number, got 1.5"),
        ("workload={kind: acme_centroids, offsets: [x]}", "workload.offsets.0: expected a number"),
        ("workload={kind: acme_centroids, shape: 1}", "workload.shape: unknown key"),
        ("dataset={kind: acme_clouds, seed: a}", "dataset.seed: expected a whole number, got 'a'"),
        ("faults=[{kind: acme_stutter, target: server-0}]", "expected exactly one moment"),
        (
            "faults=[{kind: acme_stutter, target: server-9, at_updates: 1}]",
            "faults.0.target: there is no node 'server-9' to acme_stutter",
        ),
        (
            "faults=[{kind: acme_stutter, target: server-0, at_updates: 1, seconds: 0}]",
            "acme_stutter of server-0: seconds=0.0, expected more than 0",
        ),
        (
            "faults=[{kind: acme_stutter, target: {role: spare, pick: each}, "
            "every: {mtbf: 9, until: 9}, block: 7}]",
            "acme_stutter: block=7.0, expected 0 to seconds",
        ),
        ("filters={'*': [{kind: lossless}, {kind: acme_alternate}]}", "cannot work: first say"),
    ],
)
def test_mistakes_are_told_as_those_in_sections_of_dps(
    config: Path, acme: Path, override: str, told: str
) -> None:
    assert told in complaint(config, override)


def test_a_record_whose_package_is_gone_says_what_is_missing(config: Path, acme: Path) -> None:
    from flows.records.settings import settings, trial_from

    (trial,) = expand(load_experiment(str(config), [RULE]))
    kept = json.loads(json.dumps(settings(trial, {})))
    assert trial_from(kept, "there").config == trial.config
    kept["config"]["optimizer"]["kind"] = "acme_gone"
    with pytest.raises(dps.DpsError, match=r"unknown kind 'acme_gone'[\s\S]*install what it needs"):
        trial_from(kept, "there")


# -- mistakes of packages --------------------------------------------------------------------------

SOUND = """
from dataclasses import dataclass, field
from dps.core.faults.plan import Disturbing

@dataclass
class Thawed:
    slots = ()
    def step(self): ...

@dataclass(frozen=True)
class NoStep:
    slots = ()

@dataclass(frozen=True)
class Sound:
    slots = ()
    def step(self): ...

@dataclass(frozen=True)
class OfNothing:
    slots = ()
    rate: "Nothing" = 1
    def step(self): ...

@dataclass(frozen=True)
class OfAnything:
    rate: print = 1
    slots = ()
    def step(self): ...

@dataclass(frozen=True)
class Taken:
    kind: str
    slots = ()
    def step(self): ...

@dataclass(frozen=True)
class Again:
    staleness_aware: bool = True
    slots = ()
    def step(self): ...

@dataclass(frozen=True)
class Push:
    slots = ()
    def step(self): ...

@dataclass(frozen=True, kw_only=True)
class ByName:
    rate: float
    slots = ()
    def step(self): ...

@dataclass(frozen=True)
class Computed:
    rate: float = field(init=False, default=1.0)
    slots = ()
    def step(self): ...

@dataclass(frozen=True)
class Raising:
    slots = ()
    def step(self): ...
    def __post_init__(self): {}["x"]

@dataclass(frozen=True)
class Shapeless:
    name = parameters = initial = gradient = evaluate = None

@dataclass(frozen=True)
class Fault(Disturbing):
    kind = "bang"

@dataclass(frozen=True)
class Kindless:
    target: str
    when: int
    kind = "bang"

@dataclass(frozen=True)
class Vague:
    replicas: int = 1
    def persistence(self, context): ...
    def is_restorable(self, stored, store): ...
"""
OPTIMIZER = "optimizer={kind: mine}"
WORKLOAD = "workload={kind: mine}"
DURABILITY = "recovery.durability={kind: mine}"
BANG = "faults=[{kind: bang, target: server-0, at_updates: 1}]"


@pytest.mark.parametrize(
    ("entry", "override", "told"),
    [
        ("dps.rules: mine = nowhere:Rule", OPTIMIZER, "cannot be imported: ModuleNotFoundError"),
        ("dps.rules: mine = sound:Nothing", OPTIMIZER, "cannot be imported: AttributeError"),
        ("dps.rules: mine = broken:Rule", OPTIMIZER, "cannot be imported: ZeroDivisionError"),
        ("dps.rules: mine = sound:Thawed", OPTIMIZER, "expected a frozen dataclass"),
        ("dps.rules: mine = sound:SOUND", OPTIMIZER, "is 3, expected a frozen dataclass"),
        ("dps.rules: mine = sound:NoStep", OPTIMIZER, "NoStep has no 'step', which it needs"),
        ("dps.rules: mine = sound:OfNothing", OPTIMIZER, "a type of its fields is wrong: name"),
        ("dps.rules: mine = sound:OfAnything", OPTIMIZER, "its fields (rate) has a type that YAML"),
        ("dps.rules: mine = sound:Taken", OPTIMIZER, "a section cannot have the key 'kind'"),
        ("dps.rules: mine = sound:Again", OPTIMIZER, "cannot have the key 'staleness_aware'"),
        ("dps.rules: mine = sound:Push", OPTIMIZER, "dps.protocol.messages.push.Push has this"),
        ("dps.rules: mine = sound:Computed", OPTIMIZER, "'rate' cannot be given by its position"),
        ("dps.rules: mine = sound:ByName", OPTIMIZER, "'rate' cannot be given by its position"),
        ("dps.rules: sgd = sound:Sound", OPTIMIZER, "dps has a kind of this name itself"),
        ("dps.workloads: mine = sound:Shapeless", WORKLOAD, "Shapeless needs a field 'shape'"),
        ("dps.faults: bang = sound:Fault", BANG, "Fault is carried out by nothing: enter that"),
        ("dps.faults: bang = sound:Kindless", BANG, "is not derived from dps.core.faults.plan"),
        ("dps.durabilities: mine = sound:Vague", DURABILITY, "Vague is not derived from dps.Dur"),
        (
            "dps.faults: boom = sound:Fault",
            BANG.replace("bang", "boom"),
            "Fault has the kind 'bang', which its entry point must be named",
        ),
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


def test_a_class_that_fails_is_told_as_what_is_wrong_with_its_section(
    config: Path, tmp_path: Path
) -> None:
    point = "[dps.rules]\nmine = raising:Raising\n"
    with installed(package(tmp_path / "site", "broken-dps", point, raising=SOUND)):
        assert complaint(config, OPTIMIZER).endswith(": optimizer: Raising: 'x'")


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


def test_a_class_that_cannot_be_loaded_keeps_no_other_from_being_read(tmp_path: Path) -> None:
    source = """
        from dataclasses import dataclass

        @dataclass(frozen=True)
        class Readable:
            rate: float
            slots = ()
            def step(self): ...
    """
    points = "[dps.rules]\nfirst = broken:Rule\nlast = readable:Readable\n"
    modules = {"broken": "1 / 0", "readable": dedent(source)}
    with installed(package(tmp_path / "site", "half-dps", points, **modules)):
        from readable import Readable

        assert decode(encode(Readable(0.5))) == Readable(0.5)


def test_the_command_ends_with_the_line_and_without_a_traceback(
    config: Path, tmp_path: Path
) -> None:
    folder = package(tmp_path / "site", "broken-dps", "[dps.rules]\nmine = broken:Rule\n")
    command = [sys.executable, "-m", "flows.cli", "plan", "small.yaml", "--set", OPTIMIZER]
    with installed(folder):
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "optimizer.kind: broken-dps 0.3, entry point dps.rules: mine = broken:Rule" in run.stderr
    assert "Traceback" not in run.stderr
