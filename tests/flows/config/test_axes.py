"""The combinations of a grid: counted as they are gone through, and wrong limits told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dps.errors import ConfigurationError
from flows.config.axes import Combinations
from flows.config.experiment import load_experiment

AXES = {
    "recovery": ["none", "chain"],
    "training.workers": [1, 2, 4],
    "training.updates": {"long": 400, "medium": 200, "short": 100},
}
TOGETHER = "zip=[[training.workers, training.updates]]"


BASE: dict[str, Any] = {
    "experiment": "grid",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 100},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
}
KILL = "{kind: kill, target: server-0, at_updates: 50}"
PAUSE = "{kind: pause, target: server-0, at_updates: 50, seconds: 1}"


@pytest.fixture
def config(tmp_path: Path) -> str:
    experiment = {**BASE, "axes": AXES, "seeds": [0, 1]}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(experiment, sort_keys=False))
    return str(path)


def found(config: str, *overrides: str) -> list[tuple[str, ...]]:
    experiment = load_experiment(config, overrides)
    trials = list(experiment.trial_configs())
    assert experiment.trials == len(trials)
    return [tuple(labels.values()) for labels, config in trials if config.seed == 0]


def test_axes_that_vary_together(config: str) -> None:
    assert found(config, TOGETHER) == [
        (recovery, workers, updates)
        for recovery in ("none", "chain")
        for workers, updates in (("1", "long"), ("2", "medium"), ("4", "short"))
    ]
    ((_, first), *_) = load_experiment(config, [TOGETHER]).trial_configs()
    assert (first.training.workers, first.training.updates) == (1, 400)


def test_what_is_excluded_is_left_out(config: str) -> None:
    left_out = "exclude=[{recovery: none, training.workers: 4}, {training.updates: medium}]"
    every = found(config)
    rest = [x for x in every if x[2] != "medium" and not (x[0] == "none" and x[1] == "4")]
    assert found(config, left_out) == rest
    assert len(every) == 18
    assert len(rest) == 10
    assert len(found(config, TOGETHER, left_out)) == 3


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("zip=[[training.workers]]", "zip.0: expected two axes or more"),
        ("zip=[[training.workers, optimizer]]", "zip.0: there is no axis 'optimizer'"),
        ("zip=[[recovery, training.workers]]", "recovery has 2, training.workers has 3"),
        ("zip=[training.workers]", "zip.0: expected a list"),
        (
            "zip=[[training.workers, training.updates], [recovery, training.updates]]",
            "zip.1: 'training.updates' stands in two places",
        ),
        ("exclude=[{recovery: chian}]", "no value is labelled 'chian'; did you mean 'chain'?"),
        ("exclude=[{recover: chain}]", "there is no axis 'recover'; did you mean 'recovery'?"),
        ("exclude=[{}]", "exclude.0: expected labels by axis"),
        ("exclude={recovery: chain}", "exclude: expected a list"),
        ("exclude=[{recovery: none}, {recovery: chain}]", "every combination is left out"),
        ("axes={zip: [1]}", "axes.zip: cannot be an axis"),
        ("order_seed=-1", "order_seed: expected at least 0"),
    ],
)
def test_wrong_limits_are_told(config: str, setting: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_experiment(config, [setting])
    assert told in str(caught.value)


def test_an_exclusion_that_axes_in_step_never_meet_is_told(config: str) -> None:
    never = "exclude=[{training.workers: 1, training.updates: short}]"
    assert len(found(config, never)) == 16
    with pytest.raises(ConfigurationError, match=r"exclude\.0: matches nothing, for these axes"):
        load_experiment(config, [TOGETHER, never])


@given(st.data())
def test_the_count_is_that_of_going_through_them(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    axes = {f"a{i}": [str(n) for n in range(size)] for i, size in enumerate(sizes)}
    alike = [axis for axis in axes if len(axes[axis]) == len(axes["a0"])]
    together = [alike] if len(alike) > 1 and data.draw(st.booleans()) else []
    entry = st.fixed_dictionaries({}, optional={a: st.sampled_from(v) for a, v in axes.items()})
    excluded = data.draw(st.lists(entry.filter(bool), max_size=6))
    combinations = Combinations(axes, together, excluded)
    every = list(combinations)
    assert combinations.count == len(every)
    assert len({tuple(labels.items()) for labels in every}) == len(every)
    for labels in excluded:
        assert not any(labels.items() <= each.items() for each in every)


def test_a_grid_of_a_billion_is_counted_at_once() -> None:
    axes = {f"a{i}": [str(n) for n in range(1000)] for i in range(3)}
    excluded = [{"a0": str(n), "a2": str(n + 1)} for n in range(100)]
    began = time.process_time()
    assert Combinations(axes, (), excluded).count == 10**9 - 100 * 1000
    assert time.process_time() - began < 5


# -- the labels of an axis on the command line -----------------------------------------------------


@pytest.fixture
def labelled(tmp_path: Path) -> str:
    """The path of an experiment with labels on its axes."""
    axes: dict[str, Any] = {
        "recovery": {"none": "none", "saved": "checkpoint", "chain": "chain"},
        "faults": {"no fault": [], "kill": [yaml.safe_load(KILL)]},
        "optimizer.learning_rate": [0.1, 0.2],
    }
    path = tmp_path / "labelled.yaml"
    path.write_text(yaml.safe_dump({**BASE, "axes": axes}, sort_keys=False))
    return str(path)


def axes_of(path: str, *overrides: str) -> dict[str, dict[str, Any]]:
    return load_experiment(path, overrides).axes


def test_a_label_can_be_added(labelled: str) -> None:
    found = axes_of(labelled, f"axes.faults.x=[{PAUSE}]")["faults"]
    assert list(found) == ["no fault", "kill", "x"]
    assert found["x"] == [yaml.safe_load(PAUSE)]
    assert list(axes_of(labelled, "axes.recovery.mine=stateless")["recovery"])[-1] == "mine"


@pytest.mark.parametrize(
    ("setting", "axis", "label", "value"),
    [
        (f"axes.faults.no fault=[{PAUSE}]", "faults", "no fault", [yaml.safe_load(PAUSE)]),
        ("axes.recovery.chain=none", "recovery", "chain", "none"),
        (
            "axes.recovery.saved.durability.every=7",
            "recovery",
            "saved",
            {"preset": "checkpoint", "durability": {"every": 7}},
        ),
        ("axes.optimizer.learning_rate.more=0.5", "optimizer.learning_rate", "more", 0.5),
    ],
    ids=["list", "word", "a key of it", "new"],
)
def test_a_label_can_be_set(labelled: str, setting: str, axis: str, label: str, value: Any) -> None:
    before, after = axes_of(labelled), axes_of(labelled, setting)
    assert after == {**before, axis: {**before[axis], label: value}}


@pytest.mark.parametrize(
    "setting",
    [
        "axes.recovery.outage=[wait, continue]",
        "axes.recovery=[none]",
        "axes.training.workers=[1, 2]",
    ],
)
def test_a_key_of_the_configuration_is_an_axis_of_its_own(labelled: str, setting: str) -> None:
    key, _, values = setting.partition("=")
    assert list(axes_of(labelled, setting)[key.removeprefix("axes.")]) == yaml_labels(values)


def yaml_labels(values: str) -> list[str]:
    return [str(value) for value in yaml.safe_load(values)]


def test_a_value_that_is_its_own_label_is_not_replaced_under_it(labelled: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"'0\.2' would name another value\. Set the whole"
    ):
        load_experiment(labelled, ["axes.optimizer.learning_rate.0.2=0.3"])


def test_a_wrong_value_of_a_label_is_told_with_the_label(labelled: str) -> None:
    with pytest.raises(ConfigurationError, match=r"axes\.recovery: 'mine': .*did you mean 'chain'"):
        load_experiment(labelled, ["axes.recovery.mine=chian"])
    with pytest.raises(ConfigurationError, match=r"'none' has no key 'x', for it is not a section"):
        load_experiment(labelled, ["axes.recovery.none.preset.x=3"])


@pytest.mark.parametrize(
    ("settings", "placed"),
    [
        (["axes.recovery.chain=chian"], "--set axes.recovery.chain=chian: axes.recovery: 'chain'"),
        (
            ["axes.recovery.saved=chekpoint", "axes.recovery.chain=none"],
            "--set axes.recovery.saved=chekpoint: axes.recovery: 'saved'",
        ),
        (["axes.faults.kill.0.target=server-7"], "--set axes.faults.kill.0.target=server-7: axes"),
    ],
    ids=["label", "one of two", "key of a label"],
)
def test_what_is_wrong_with_a_label_is_placed_where_the_label_is_set(
    labelled: str, settings: list[str], placed: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_experiment(labelled, settings)
    assert placed in str(caught.value)


@pytest.mark.parametrize("who", ["comparison", "claims", "exclude"])
def test_a_mistyped_value_is_told_of_and_not_who_names_its_label(labelled: str, who: str) -> None:
    naming = {
        "comparison": "comparison.baseline=chain",
        "exclude": "exclude=[{recovery: chain, faults: kill}]",
        "claims": "claims=[{metric: accuracy_final, strategy: chain, against: none, condition: "
        "{faults: kill, optimizer.learning_rate: 0.1}, direction: more, smallest: 0.01}]",
    }[who]
    load_experiment(labelled, [naming])
    with pytest.raises(ConfigurationError) as caught:
        load_experiment(labelled, [naming, "axes.recovery=[none, chian]"])
    assert "--set axes.recovery=[none, chian]: axes.recovery: 'chian'" in str(caught.value)
    assert "did you mean 'chain'" in str(caught.value)
    assert who not in str(caught.value)
    with pytest.raises(ConfigurationError, match=f"{who}.*checkpoint"):
        load_experiment(labelled, [naming, "axes.recovery=[none, checkpoint]"])
