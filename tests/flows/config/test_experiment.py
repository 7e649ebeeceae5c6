"""The configuration: what YAML may say, what it builds of dps, and how mistakes are told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.core.replay import Continue, Replay
from dps.errors import ConfigurationError
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.layered import Layered
from dps.recovery.strategy import PRESETS, Recovery
from flows.config.experiment import TrialConfig, load_experiment

SMALL: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 100},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
}
TWO = "axes={recovery: [none, chain]}"
KILL: dict[str, Any] = {"kind": "kill", "target": "server-0", "at_updates": 50}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL, sort_keys=False))
    return path


def faults(*plan: dict[str, Any]) -> str:
    return f"faults={json.dumps(plan)}"


def only(path: Path, *overrides: str) -> TrialConfig:
    ((_, trial),) = load_experiment(str(path), overrides).trial_configs()
    return trial


def complaint(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_experiment(str(path), overrides)
    text = str(caught.value)
    assert "pydantic" not in text
    return text


# -- what it builds ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_the_recovery_of_its_name(config: Path, name: str) -> None:
    trial = only(config, f"recovery={name}")
    assert trial.recovery.build() == PRESETS[name]
    assert trial.recovery.name == name


@pytest.mark.parametrize(
    ("consistency", "most"), [("{kind: bsp}", 0), ("{kind: ssp, tau: 2}", 2), ("{kind: asp}", 9)]
)
def test_workers_may_be_as_far_ahead_as_the_consistency_model_allows(
    config: Path, consistency: str, most: int
) -> None:
    settings = f"consistency={consistency}"
    assert only(config, settings, f"training.ahead={most}").training.ahead == most
    if most < 9:
        told = complaint(config, settings, f"training.ahead={most + 1}")
        assert f"training.ahead: ahead={most + 1}, but under" in told
        assert f"expected ahead={most} at most" in told
    assert "training.ahead" in complaint(config, "training.ahead=-1")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["training.local_steps=5"], "training.inner: expected a rule for local steps"),
        (
            ["training.inner={kind: adamw}", "training.ahead=1"],
            "training.ahead: expected 0 with inner",
        ),
        (
            ["training.inner={kind: adamw, staleness_aware: true}"],
            "training.inner: expected one rule for all elements, without clip",
        ),
    ],
)
def test_local_steps_need_a_plain_rule(config: Path, settings: list[str], told: str) -> None:
    assert told in complaint(config, *settings)


def test_recovery_by_its_axes(config: Path) -> None:
    trial = only(
        config,
        "recovery.durability={kind: checkpoint, every: 50, mode: sync, path: /shared/x, keep: 3}",
        "recovery.outage={kind: continue, limit: 8, buffer: worker}",
        "recovery.replay={policy: mean}",
    )
    assert trial.recovery.build() == Recovery(
        Checkpoint(50, "sync", "/shared/x", 3), Continue(8, "worker"), Replay("mean")
    )
    assert trial.recovery.name == "custom"


def test_a_layer_has_an_interval_of_its_own_and_goes_where_all_nodes_see_it(config: Path) -> None:
    layered = "recovery.durability={kind: chain, below: %s}"
    trial = only(config, layered % "{}")
    assert trial.recovery.build().durability == Layered(Chain(2), Checkpoint(100))
    assert trial.node_names == only(config, "recovery.durability=chain").node_names
    timed = only(config, layered % "{seconds: 2.5}").recovery.build().durability
    assert timed == Layered(Chain(2), Checkpoint(seconds=2.5))
    for wrong, reason in [
        ("{every: 0}", r"durability\.below\.every"),
        ("{mode: sync}", r"recovery\.durability: Layered: below has mode='sync', expected 'async'"),
        ("{path: 'memory://x'}", "would end with the process"),
    ]:
        with pytest.raises(ConfigurationError, match=reason):
            only(config, layered % wrong)
    with pytest.raises(ConfigurationError, match=r"durability\.below: unknown key"):
        only(config, "recovery.durability={kind: checkpoint, below: {every: 5}}")


def test_resolved_form_is_canonical(config: Path) -> None:
    written_short = only(config, "recovery=stateless")
    written_long = only(
        config,
        "recovery={durability: {kind: shared_store, every: 16},"
        " outage: {kind: continue, limit: 32, buffer: mailbox}, replay: {policy: sum}}",
    )
    resolved = written_short.model_dump(mode="json")
    assert resolved == written_long.model_dump(mode="json")
    assert resolved["recovery"]["durability"] == {
        "kind": "shared_store",
        "every": 16,
        "stores": 1,
        "below": None,
    }
    assert resolved["recovery"]["name"] == "stateless"
    assert TrialConfig.model_validate(json.loads(json.dumps(resolved))) == written_short


def test_node_names_follow_from_shards_and_recovery(config: Path) -> None:
    chain = only(config, "recovery={preset: chain, durability: {replicas: 3}}", "server.spares=1")
    assert chain.node_names == (
        *("server-0", "server-1", "replica-0-1", "replica-0-2", "replica-1-1", "replica-1-2"),
        *("spare-0", "worker-0", "worker-1", "evaluator-0"),
    )
    assert "store-0" in only(config, "recovery=stateless").node_names
    assert "store-0" not in only(config, "recovery=checkpoint").node_names
    assert "store-1" not in only(config, "recovery=stateless").node_names
    two = only(config, "recovery={preset: stateless, durability: {stores: 2, below: {every: 9}}}")
    assert [name for name in two.node_names if "store" in name] == ["store-0", "store-1"]
    assert (two.recovery.build().stores, two.recovery.build().durability.replicas) == (2, 1)


# -- axes --------------------------------------------------------------------------------------


def labels_of(path: Path, *overrides: str) -> list[dict[str, str]]:
    return [labels for labels, _ in load_experiment(str(path), overrides).trial_configs()]


def test_labels_say_the_value_in_few_words(config: Path) -> None:
    axes = (
        "axes={recovery: [chain, {preset: checkpoint, durability: {every: 5}}], "
        "consistency: [{kind: ssp, tau: 2}], training.updates: [60], faults: [[]]}"
    )
    assert labels_of(config, axes) == [
        {
            "recovery": recovery,
            "consistency": "ssp tau=2",
            "training.updates": "60",
            "faults": "none",
        }
        for recovery in ("chain", "checkpoint durability=every=5")
    ]


def test_what_is_excluded_is_left_out(config: Path) -> None:
    axes = "axes={recovery: [none, chain], training.workers: [1, 2], training.updates: [60, 70]}"
    every = labels_of(config, axes)
    one = {"recovery": "none", "training.workers": "2"}
    left_out = [each for each in every if one.items() <= each.items()]
    assert (len(every), len(left_out)) == (8, 2)
    rest = labels_of(config, axes, f"exclude=[{json.dumps(one)}]")
    assert rest == [each for each in every if each not in left_out]


def test_a_combination_is_left_out_by_the_values_that_its_axis_has(config: Path) -> None:
    grid = ["axes={optimizer.staleness_aware: [true, false], faults: [[]]}"]
    grid += ["exclude=[{optimizer.staleness_aware: true, faults: []}]"]
    (labels,) = labels_of(config, *grid)
    assert labels["optimizer.staleness_aware"] == "False"


def test_whole_sections_are_set_before_keys_in_them(config: Path) -> None:
    axes = "axes={recovery.durability.every: [5, 6], recovery: [checkpoint]}"
    configs = [trial for _, trial in load_experiment(str(config), [axes]).trial_configs()]
    assert [trial.recovery.build() for trial in configs] == [
        Recovery(Checkpoint(5)),
        Recovery(Checkpoint(6)),
    ]


# -- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["trainning.updates=5"], "trainning: unknown key; did you mean 'training'?"),
        (["cluster={kind: slurm, partition: a}"], "cluster.partition: unknown key; use 'queue'"),
        (["recovery=chian"], "no recovery strategy 'chian'; did you mean 'chain'?"),
        (["consistency=ssp"], "consistency.tau: is missing; add it"),
        (["training.updates=many"], "training.updates: expected a valid integer, got 'many'"),
        (["training.updates=0"], "training.updates: expected greater than 0, got 0"),
        (["optimizer.learning_rate=.nan"], "optimizer.learning_rate: expected a finite number"),
        (["claims=[{}]"], "claims.0.direction: is missing; add it"),
        (["experiment=a/b"], "experiment: expected a name of letters"),
        (["seeds=[]"], "seeds: expected at least 1 item"),
        (["seeds=9-1"], "seeds: a range ends with its largest seed; expected 1-9"),
        (["axes={recovery: chain}"], "axes.recovery: expected a list of values"),
        (["order_seed=-1"], "order_seed: expected greater than or equal to 0"),
        (
            [TWO, "exclude=[{recover: chain}]"],
            "no axis 'recover'; did you mean 'recovery'",
        ),
        ([TWO, "exclude=[{recovery: none}, {recovery: chain}]"], "every combination is excluded"),
        (["axes=5"], "axes: expected a valid dictionary, got 5"),
        (["axes={server.shards: [1, 2]}", "seeds=6000"], "the grid has 12,000 trials"),
        (["axes={training.update: [1]}"], "axes.training.update.1: unknown key"),
        (["recovery={preset: 5}"], "no recovery strategy '5'"),
        (["training.workers=20000"], "workers: expected less than or equal to 10000, got 20000"),
        (["seeds=20000001"], "seeds: 20,000,001 seeds; expected 10,000 at most"),
        (["comparison.metrics=[cost_usd, cost_usd]"], "a metric is given twice"),
        (["workload={kind: mlp, hidden: [0]}"], "hidden: expected widths of 1 or more, got [0]"),
    ],
)
def test_mistakes_are_told_with_key_and_expectation(
    config: Path, overrides: list[str], told: str
) -> None:
    text = complaint(config, *overrides)
    assert told in text
    assert "--set" in text


@pytest.mark.parametrize(("written", "seeds"), [("40", range(40)), ("100-103", range(100, 104))])
def test_seeds_are_a_count_a_range_or_a_list(
    config: Path, written: str, seeds: Sequence[int]
) -> None:
    assert load_experiment(str(config), [f"seeds={written}"]).seeds == tuple(seeds)


def test_mistakes_in_the_file_are_told_with_their_lines(config: Path) -> None:
    lines = config.read_text().replace("updates", "update").replace("softmax", "softmacks")
    config.write_text(lines)
    told = complaint(config).splitlines()
    assert "small.yaml, line 3: workload.kind: unknown kind 'softmacks'" in told[0]
    assert "small.yaml, line 7: training.update: unknown key; did you mean 'updates'?" in told[1]


def test_a_fault_is_checked_under_the_recovery_it_meets(config: Path) -> None:
    kill = {**KILL, "target": "replica-0-1"}
    assert labels_of(config, faults(kill), "axes={recovery: [chain]}")
    text = complaint(config, faults(kill), "axes={recovery: [chain, none]}")
    assert "(with recovery 'none')" in text


def test_an_override_that_an_axis_would_undo_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the axis 'recovery' overrides this key"):
        load_experiment("demo", ["recovery.durability.every=5"])
    experiment = load_experiment("demo", ["axes={}", "recovery=chain", "seeds=[0]"])
    assert len(list(experiment.trial_configs())) == 1


def test_an_unknown_configuration_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="did you mean 'demo'") as caught:
        load_experiment("dmo")
    assert "no such file" in str(caught.value)
    with pytest.raises(ConfigurationError, match="no such file"):
        load_experiment(str(tmp_path / "missing.yaml"))
    with pytest.raises(ConfigurationError, match="a folder, not a file"):
        load_experiment(str(tmp_path))


@pytest.mark.parametrize(
    ("recovery", "spares"),
    [("checkpoint", 2), ("chain", 0), ("stateless", 1)],
)
def test_every_strategy_has_the_budget_in_nodes(config: Path, recovery: str, spares: int) -> None:
    trial = only(config, f"recovery={recovery}", "server.shards=2", "budget={nodes: 4}")
    serving = [n for n in trial.node_names if not n.startswith(("worker", "evaluator"))]
    assert len(serving) == 4
    assert trial.spares == sum(name.startswith("spare") for name in serving) == spares


def test_a_strategy_may_have_spares_of_its_own(config: Path) -> None:
    axes = "axes={recovery: {cold: checkpoint, warm: {preset: checkpoint, spares: 2}}}"
    cold, warm = (t for _, t in load_experiment(str(config), [axes]).trial_configs())
    assert (cold.spares, warm.spares) == (0, 2)
    cold, warm = (
        t for _, t in load_experiment(str(config), [axes, "server.spares=1"]).trial_configs()
    )
    assert (cold.spares, warm.spares) == (1, 2)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            ["recovery={preset: chain, durability: {replicas: 3}}", "budget.nodes=4"],
            "budget.nodes: this strategy needs 6 nodes: 6 for servers and replicas, 0 for stores",
        ),
        (
            ["recovery=stateless", "budget={nodes: 2}"],
            "needs 3 nodes: 2 for servers and replicas, 1 for stores",
        ),
        (["server.spares=1", "budget={nodes: 4}"], "a budget determines the number of spares"),
    ],
)
def test_a_budget_that_is_too_small_is_refused(
    config: Path, settings: list[str], told: str
) -> None:
    assert told in complaint(config, "server.shards=2", *settings)
