"""The configuration: what YAML may say, what it builds of dps, and how mistakes are told."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import dps
from dps.core.faults.plan import AtUpdates, Kill, Pause
from dps.core.outage import Continue, Replay
from dps.core.rules.penalties import L1, L2, ElasticNet
from dps.errors import ConfigurationError
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.layered import Layered
from dps.protocol.durabilities.partial_checkpoint import PartialCheckpoint
from dps.protocol.durabilities.presets import PRESETS
from dps.protocol.durabilities.shared_store import SharedStore
from dps.protocol.recovery import Recovery
from flows.config.experiment import TrialConfig, load_experiment, packaged_names
from flows.config.trials import digest
from flows.config.workload import workload_of
from flows.workloads import SHAPES, SoftmaxRegression

SMALL: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"updates": 100},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
}
KILL: dict[str, Any] = {"kind": "kill", "target": "server-0", "at_updates": 50}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL, sort_keys=False))
    return path


FULL = {"kind": "disk_full", "at_updates": 20}


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


def test_of_many_names_the_nearest_are_told(config: Path) -> None:
    text = complaint(config, "comparison.metrics=[accuracy]")
    assert "did you mean 'accuracy_final' or 'accuracy_best' or 'accuracy_after'?" in text
    assert len(text) < 300
    assert "cost_usd" not in text


def test_a_folder_without_the_data_is_refused(config: Path, tmp_path: Path) -> None:
    text = complaint(config, f"dataset={{kind: fashion_mnist, folder: {tmp_path}}}")
    assert "dataset.folder" in text
    assert f"folder {tmp_path} has no train-images-idx3-ubyte" in text


# -- what it builds ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ("consistency", "bsp"),
        ("workload", "softmax"),
        ("dataset", "digits"),
        ("cluster", "virtual"),
        ("recovery.durability", "chain"),
        ("recovery.outage", "continue"),
    ],
)
def test_a_kind_alone_stands_for_its_section(config: Path, section: str, kind: str) -> None:
    assert only(config, f"{section}={kind}") == only(config, f"{section}={{kind: {kind}}}")


def test_what_a_kind_alone_lacks_is_told_of(config: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"consistency\.tau: is missing"):
        only(config, "consistency=ssp")
    assert only(config, "consistency=ssp", "consistency.tau=4").build_consistency() == dps.SSP(4)


def test_defaults_are_those_of_dps(config: Path) -> None:
    trial = only(config)
    assert trial.build_consistency() == dps.ASP()
    assert trial.build_optimizer() == dps.SGD(0.1)
    assert trial.build_recovery() == Recovery()
    assert trial.build_faults() == ()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_the_recovery_of_its_name(config: Path, name: str) -> None:
    trial = only(config, f"recovery={name}")
    assert trial.build_recovery() == PRESETS[name]
    assert trial.recovery.name == name


@pytest.mark.parametrize(
    ("settings", "built"),
    [
        ("{kind: momentum, learning_rate: 0.1}", dps.Momentum(0.1)),
        ("{kind: adam}", dps.Adam()),
        ("{kind: adam, learning_rate: 1, beta1: 0}", dps.Adam(1.0, 0.0)),
        ("{kind: adagrad}", dps.AdaGrad()),
        ("{kind: adagrad, learning_rate: 1, eps: 0.5}", dps.AdaGrad(1.0, 0.5)),
        ("{kind: ftrl}", dps.FTRL()),
        ("{kind: ftrl, alpha: 1, beta: 2, l1: 3, l2: 4}", dps.FTRL(1.0, 2.0, 3.0, 4.0)),
        (
            "{kind: proximal, learning_rate: 0.1, penalty: {kind: l1, strength: 2}}",
            dps.Proximal(0.1, dps.L1(2.0)),
        ),
        (
            "{kind: proximal, learning_rate: 0.1, penalty: {kind: l2, strength: 2}}",
            dps.Proximal(0.1, dps.L2(2.0)),
        ),
        (
            "{kind: proximal, learning_rate: 0.1, penalty: {kind: elastic_net, l1: 2, l2: 3}}",
            dps.Proximal(0.1, dps.ElasticNet(2.0, 3.0)),
        ),
        (
            "{kind: proximal, learning_rate: 0.1, penalty: {kind: group_l1, strength: 2}}",
            dps.Proximal(0.1, dps.GroupL1(2.0)),
        ),
        (
            "{kind: delayed_proximal, l_var: 2, l_cov: 1, tau: 4, eps: 0.5, "
            "penalty: {kind: l2, strength: 0}}",
            dps.DelayedProximal(2.0, 1.0, 4, dps.L2(0.0), 0.5),
        ),
    ],
)
def test_optimizers(config: Path, settings: str, built: dps.UpdateRule) -> None:
    assert only(config, f"optimizer={settings}").build_optimizer() == built
    aware = f"optimizer={settings[:-1]}, staleness_aware: true}}"
    assert only(config, aware).build_optimizer() == dps.StalenessAware(built)


def test_an_axis_over_ahead_leaves_trials_without_it_as_they_were(config: Path) -> None:
    document = [
        t
        for _, t in load_experiment(str(config), ["axes={training.ahead: [0, 1]}"]).trial_configs()
    ]
    assert digest(document[0]) == digest(only(config))
    assert document[1].model_dump(mode="json")["training"]["ahead"] == 1


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


def test_an_axis_over_staleness_awareness_leaves_trials_without_it_as_they_were(
    config: Path,
) -> None:
    axes = "axes={optimizer.staleness_aware: [false, true]}"
    without, aware = (t for _, t in load_experiment(str(config), [axes]).trial_configs())
    assert (without.build_optimizer(), aware.build_optimizer()) == (
        dps.SGD(0.1),
        dps.StalenessAware(dps.SGD(0.1)),
    )
    assert without.model_dump(mode="json") == only(config).model_dump(mode="json")
    told = aware.model_dump(mode="json")
    assert told["optimizer"]["staleness_aware"] is True
    assert TrialConfig.model_validate(told) == aware


def test_a_workload_may_be_regularised(config: Path) -> None:
    assert workload_of(only(config)) == SoftmaxRegression(SHAPES["digits"])
    assert workload_of(only(config, "workload.l2=0.01")) == SoftmaxRegression(
        SHAPES["digits"], l2=0.01
    )
    assert "workload.l2: expected at least 0" in complaint(config, "workload.l2=-1.0")


def test_consistency_models(config: Path) -> None:
    assert only(config, "consistency.kind=bsp").build_consistency() == dps.BSP()
    trial = only(config, "consistency={kind: ssp, tau: 4}")
    assert trial.build_consistency() == dps.SSP(4)


def test_recovery_by_its_axes(config: Path) -> None:
    trial = only(
        config,
        "recovery.durability={kind: checkpoint, every: 50, mode: sync, path: /shared/x, keep: 3}",
        "recovery.outage={kind: continue, limit: 8, buffer: worker}",
        "recovery.replay={policy: mean}",
    )
    assert trial.build_recovery() == Recovery(
        Checkpoint(50, "sync", "/shared/x", 3), Continue(8, "worker"), Replay("mean")
    )
    assert trial.recovery.name == "custom"


def test_the_interval_of_checkpoints_may_be_in_seconds(config: Path) -> None:
    assert only(config, "recovery=checkpoint").build_recovery() == Recovery(Checkpoint(100))
    shown = only(config, "recovery=checkpoint").model_dump(mode="json")["recovery"]["durability"]
    assert (shown["every"], shown["seconds"]) == (100, None)
    timed = only(config, "recovery=checkpoint", "recovery.durability.seconds=2.5")
    assert timed.build_recovery() == Recovery(Checkpoint(seconds=2.5))
    axes = "axes={recovery.durability.seconds: [0.5, 1.5]}"
    configs = load_experiment(str(config), ["recovery=checkpoint", axes]).trial_configs()
    built = [trial.build_recovery() for _, trial in configs]
    assert built == [Recovery(Checkpoint(seconds=seconds)) for seconds in (0.5, 1.5)]
    with pytest.raises(ConfigurationError, match=r"durability\.seconds"):
        load_experiment(str(config), ["recovery=checkpoint", "recovery.durability.seconds=0.0"])


def test_the_interval_of_checkpoints_may_be_chosen_while_training_goes_on(config: Path) -> None:
    trial = only(config, "recovery={preset: checkpoint, durability: {every: auto, mtbf: 60.0}}")
    assert trial.build_recovery() == Recovery(Checkpoint("auto", mtbf=60.0))
    shown = trial.model_dump(mode="json")["recovery"]["durability"]
    assert (shown["every"], shown["mtbf"]) == ("auto", 60.0)
    axes = "axes={recovery.durability.every: [25, auto]}"
    configs = load_experiment(str(config), ["recovery=checkpoint", axes]).trial_configs()
    built = [trial.build_recovery() for _, trial in configs]
    assert built == [Recovery(Checkpoint(25)), Recovery(Checkpoint("auto"))]
    with pytest.raises(ConfigurationError, match=r"mtbf go with every='auto' alone"):
        load_experiment(str(config), ["recovery=checkpoint", "recovery.durability.mtbf=60.0"])


def test_checkpoints_may_hold_a_part_of_a_shard(config: Path) -> None:
    trial = only(config, "recovery={durability: {kind: partial_checkpoint, every: 40, share: 0.1}}")
    durability = trial.build_recovery().durability
    assert durability == PartialCheckpoint(40, 0.1)
    assert durability.at_risk == 4
    with pytest.raises(ConfigurationError, match=r"durability\.share"):
        load_experiment(
            str(config), ["recovery={durability: {kind: partial_checkpoint, share: 2}}"]
        )
    with pytest.raises(ConfigurationError, match="would be lost with the process"):
        only(config, "recovery={durability: {kind: partial_checkpoint, path: 'memory://x'}}")


@pytest.mark.parametrize(("kind", "above"), [("chain", Chain(3)), ("shared_store", SharedStore(8))])
def test_checkpoints_may_lie_below_a_chain_or_a_store(
    config: Path, kind: str, above: Chain | SharedStore
) -> None:
    own = "replicas: 3" if kind == "chain" else "every: 8"
    layered = f"recovery.durability={{kind: {kind}, {own}, below: {{every: 50, keep: 3}}}}"
    trial = only(config, layered)
    below = Checkpoint(50, keep=3)
    assert trial.build_recovery() == Recovery(Layered(above, below))
    assert trial.recovery.name == "custom"
    shown = trial.model_dump(mode="json")["recovery"]["durability"]
    assert shown["below"] == {"every": 50, "seconds": None, "path": None, "keep": 3}
    plain = only(config, f"recovery.durability={{kind: {kind}, {own}}}")
    assert len(trial.node_names) == len(plain.node_names)
    axes = "axes={recovery.durability.below.every: [25, 50]}"
    configs = load_experiment(str(config), [layered, axes]).trial_configs()
    built = [each.build_recovery().durability for _, each in configs]
    assert built == [Layered(above, Checkpoint(every, keep=3)) for every in (25, 50)]


def test_a_layer_has_an_interval_of_its_own_and_goes_where_all_nodes_see_it(config: Path) -> None:
    layered = "recovery.durability={kind: chain, below: %s}"
    built = only(config, layered % "{}").build_recovery().durability
    assert built == Layered(Chain(2), Checkpoint(100))
    timed = only(config, layered % "{seconds: 2.5}").build_recovery().durability
    assert timed == Layered(Chain(2), Checkpoint(seconds=2.5))
    for wrong, reason in [
        ("{every: 0}", r"durability\.below\.every"),
        ("{mode: sync}", r"durability\.below\.mode: unknown key; there are: every"),
        ("{path: 'memory://x'}", "would be lost with the process"),
    ]:
        with pytest.raises(ConfigurationError, match=reason):
            only(config, layered % wrong)
    with pytest.raises(ConfigurationError, match=r"durability\.below: unknown key"):
        only(config, "recovery.durability={kind: checkpoint, below: {every: 5}}")


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("memory://x", "would be lost with the process"),
        ("nowhere://x", "cannot be written to 'nowhere://x'"),
    ],
)
def test_checkpoints_go_where_all_nodes_see_them(config: Path, path: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        load_experiment(str(config), ["recovery=checkpoint", f"recovery.durability.path={path}"])
    assert "recovery.durability.path" in str(caught.value)


def test_all_shards_may_go_back_together_but_not_while_workers_continue(config: Path) -> None:
    together = ["recovery=checkpoint", "recovery.durability.scope=all"]
    assert only(config, *together).build_recovery() == Recovery(Checkpoint(scope="all"))
    with pytest.raises(ConfigurationError, match="scope='all' does not go with outage=continue"):
        load_experiment(str(config), [*together, "recovery.outage.kind=continue"])


def test_a_shard_may_be_rebuilt_from_the_copies_of_workers(config: Path) -> None:
    trial = only(
        config, "recovery.durability={kind: worker_cache}", "recovery.outage.kind=continue"
    )
    assert trial.build_recovery() == Recovery(dps.WorkerCache(), Continue())
    assert trial.recovery.name == "custom"


def test_a_preset_may_be_adjusted(config: Path) -> None:
    trial = only(config, "recovery=checkpoint", "recovery.durability.every=7")
    assert trial.build_recovery() == Recovery(Checkpoint(7))
    assert trial.recovery.name == "checkpoint"
    changed = only(config, "recovery={preset: checkpoint, durability: {kind: chain, replicas: 3}}")
    assert changed.build_recovery() == Recovery(dps.Chain(3))
    assert changed.recovery.name == "chain"
    hybrid = only(config, "recovery={preset: chain, outage: {kind: continue}}")
    assert hybrid.recovery.name == "custom"


def test_faults(config: Path) -> None:
    trial = only(config, faults(KILL, {**KILL, "target": "worker-1", "back_after": None}))
    assert trial.build_faults() == (
        Kill("server-0", AtUpdates(50), 1.0),
        Kill("worker-1", AtUpdates(50), None),
    )


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
    assert (two.build_recovery().stores, two.build_recovery().durability.replicas) == (2, 1)


def test_a_second_store_is_of_the_budget(config: Path) -> None:
    recovery = "recovery={preset: stateless, durability: {stores: 2}}"
    assert only(config, recovery, "budget={nodes: 5}").spares == 1
    with pytest.raises(ConfigurationError, match="2 for servers and replicas and 2 stores"):
        only(config, recovery, "budget={nodes: 3}")


def test_the_objective_has_the_penalty_of_the_update_rule(config: Path) -> None:
    assert only(config).build_objective() is None
    proximal = "optimizer={kind: proximal, learning_rate: 0.1, penalty: {kind: l1, strength: 0.2}}"
    delayed = (
        "optimizer={kind: delayed_proximal, l_var: 1, l_cov: 1, tau: 2, "
        "penalty: {kind: l2, strength: 0.3}}"
    )
    ftrl = "optimizer={kind: ftrl, l1: 0.4, l2: 0.5}"
    for rule, penalty in (
        ("optimizer={kind: sgd, learning_rate: 0.1}", None),
        (proximal, L1(0.2)),
        (delayed, L2(0.3)),
        (ftrl, ElasticNet(0.4, 0.5)),
    ):
        wanted = only(config, rule, "evaluation.objective={step: 0.5}").build_objective()
        assert wanted is not None
        assert (wanted.penalty, wanted.step) == (penalty, 0.5)


def test_an_excess_is_over_something(config: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"evaluation.objective.target: an excess over"):
        only(config, "evaluation.objective={target: 0.1}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("size: 9", r"size=9, expected 2 to 8, as the images have 8 × 8 pixels"),
        ("size: 4, components: 16", r"components=16, expected 1 to 15, as patches of 4 × 4"),
    ],
)
def test_patches_that_cannot_be_cut_are_refused(config: Path, settings: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        only(config, "workload={kind: rica}", f"dataset={{kind: patches, {settings}}}")


# -- where it comes from -----------------------------------------------------------------------


def test_packaged_configurations_load_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"demo", "fashion"} <= set(packaged_names())
    cnn = {"replicate/ttf-cnn", "replicate/ttf-by-design-cnn"}
    needs_torch = cnn if find_spec("torch") is None else set()
    no_experiment = {"replicate/ttf", "replicate/ftps", "replicate/ttf-published"}
    for name in set(packaged_names()) - needs_torch - no_experiment:
        assert name.replace("/", "-").endswith(load_experiment(name).experiment)
    for name in no_experiment:
        with pytest.raises(ConfigurationError, match=f"{name}.*(`dps run` runs it|only `dps rep)"):
            load_experiment(name)


def test_demo_is_four_strategies_with_and_without_a_kill() -> None:
    trials = [labels for labels, _ in load_experiment("demo").trial_configs()]
    assert len(trials) == 24
    assert {labels["recovery"] for labels in trials} == set(PRESETS)
    assert {labels["faults"] for labels in trials} == {"no fault", "kill"}


def test_scientific_notation_without_a_dot_is_a_number(config: Path) -> None:
    config.write_text(config.read_text().replace("0.1", "1e-3"))
    assert only(config).build_optimizer() == dps.SGD(0.001)


# -- axes --------------------------------------------------------------------------------------


def labels_of(path: Path, *overrides: str) -> list[dict[str, str]]:
    return [labels for labels, _ in load_experiment(str(path), overrides).trial_configs()]


def test_every_combination_runs_with_every_seed(config: Path) -> None:
    axes = "axes={recovery: [none, chain], server.shards: [1, 2]}"
    configs = [c for _, c in load_experiment(str(config), [axes, "seeds=[3, 4]"]).trial_configs()]
    found = {(c.recovery.name, c.server.shards, c.seed) for c in configs}
    assert len(configs) == len(found) == 8
    assert ("chain", 1, 4) in found


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


def test_whole_sections_are_set_before_keys_in_them(config: Path) -> None:
    axes = "axes={recovery.durability.every: [5, 6], recovery: [checkpoint]}"
    configs = [trial for _, trial in load_experiment(str(config), [axes]).trial_configs()]
    assert [trial.build_recovery() for trial in configs] == [
        Recovery(Checkpoint(5)),
        Recovery(Checkpoint(6)),
    ]


def test_an_axis_over_a_kind_keeps_only_what_was_written(config: Path) -> None:
    axes = "axes={optimizer.kind: [sgd, momentum, adam]}"
    rules = [t.build_optimizer() for _, t in load_experiment(str(config), [axes]).trial_configs()]
    assert rules == [dps.SGD(0.1), dps.Momentum(0.1), dps.Adam(0.1)]


def test_an_axis_over_one_fault_of_a_plan(config: Path) -> None:
    settings = [faults(KILL), "axes.faults.0.at_updates=[10, 20]"]
    trials = [trial for _, trial in load_experiment(str(config), settings).trial_configs()]
    assert [trial.faults[0].at_updates for trial in trials] == [10, 20]


# -- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["trainning.updates=5"], "trainning: unknown key; did you mean 'training'?"),
        (["training.update=5"], "training.update: unknown key; did you mean 'updates'?"),
        (["recovery=chian"], "unknown recovery strategy 'chian'; did you mean 'chain'?"),
        (["recovery={preset: 7}"], "unknown recovery strategy 7"),
        (["recovery.durability.kind=chian"], "unknown kind 'chian'; did you mean 'chain'?"),
        (["recovery.replay.policy=means"], "unknown policy 'means'; did you mean 'mean'?"),
        (["recovery.name=mine"], "recovery.name: unknown key"),
        (["optimizer.kind=sdg"], "unknown kind 'sdg'; did you mean 'sgd'?"),
        (["dataset.kind=digit"], "unknown kind 'digit'; did you mean 'digits'?"),
        (["dataset.folder=x"], "dataset.folder: unknown key"),
        (
            ["workload.kind=gan"],
            "unknown kind 'gan'; there are: mlp, softmax, logistic, linear, rica, torch, cnn",
        ),
        (["consistency={}"], "consistency: needs a 'kind'"),
        (["training=5"], "training: expected a section with keys, got 5"),
        (["training.updates=many"], "training.updates: expected a whole number, got 'many'"),
        (["training.updates=true"], "training.updates: expected a whole number, got True"),
        (["training.updates=1.5"], "training.updates: expected a whole number, got 1.5"),
        (["training.updates="], "training.updates: expected a whole number, got nothing"),
        (["training.updates=0"], "training.updates: expected more than 0, got 0"),
        (["optimizer.learning_rate=fast"], "expected a number, got 'fast'"),
        (["optimizer.learning_rate=.nan"], "optimizer.learning_rate: expected a finite number"),
        (["optimizer={kind: sgd}"], "optimizer.learning_rate: is missing"),
        (["optimizer={kind: momentum, learning_rate: 1, momentum: 1}"], "expected less than 1"),
        (["consistency={kind: ssp}"], "consistency.tau: is missing; add it: a whole number"),
        (["claims=[{}]"], "claims.0.direction: is missing; add it: less, more or equivalent"),
        (["claims=[{}]"], "claims.0.smallest: is missing; add it: the smallest difference"),
        (["optimizer={kind: ftrl, alpha: 0}"], "optimizer.alpha: expected more than 0"),
        (["optimizer={kind: ftrl, learning_rate: 1}"], "optimizer.learning_rate: unknown key"),
        (
            ["optimizer={kind: proximal, learning_rate: 1}"],
            "optimizer.penalty: is missing; add it",
        ),
        (
            ["optimizer={kind: proximal, learning_rate: 1, penalty: {kind: group_l2}}"],
            "optimizer.penalty.kind: unknown kind 'group_l2'; did you mean 'group_l1'?",
        ),
        (
            ["optimizer={kind: proximal, learning_rate: 1, penalty: {kind: l1, strength: -1}}"],
            "optimizer.penalty.strength: expected at least 0",
        ),
        (
            ["optimizer={kind: proximal, learning_rate: 1, penalty: 0.1}"],
            "optimizer.penalty: expected a section with keys, got 0.1",
        ),
        (["optimizer.staleness_aware=1"], "optimizer.staleness_aware: expected true or false"),
        (["workload={kind: mlp, hidden: 3}"], "workload.hidden: expected a list"),
        (["workload={kind: mlp, hidden: [3, x]}"], "workload.hidden.1: expected a whole number"),
        (["experiment=a/b"], "experiment: 'a/b' names a folder"),
        (["seeds=[]"], "seeds: expected at least one seed"),
        (["seeds=[1, 1]"], "seeds: a seed is given twice"),
        (["faults=[{kind: stop, target: server-0, at_updates: 1}]"], "unknown kind 'stop'"),
        (["axes={recovery: []}"], "axes.recovery: expected a list of values"),
        (["axes={recovery: {}}"], "axes.recovery: expected a list of values"),
        (["axes={recovery: chain}"], "axes.recovery: expected a list of values"),
        (["axes=5"], "axes: expected keys and values, got 5"),
        (["axes={seed: [1]}"], "axes.seed: cannot be an axis"),
        (["axes={recovery: [chain, chain]}"], "axes.recovery: 'chain' is given twice"),
        (["axes={server.shards: {1: 1, '1': 2}}"], "axes.server.shards: '1' is given twice"),
        (["axes={faults: {no: []}}"], "YAML reads the label False as no text"),
        (["axes={training.update: [1]}"], "axes.training.update: '1': unknown key"),
        (["axes={recovery: [chian]}"], "axes.recovery: 'chian': unknown recovery strategy"),
        (["axes={training.updates.x: [1]}"], "axes.training.updates.x: 100 has no key 'x'"),
        (["training.updates.x=1"], "--set training.updates.x=1: 100 has no key 'x'"),
        (
            ["axes={recovery: [none], recovery.durability.every: [5]}"],
            "axes.recovery.durability.every: '5': unknown key; there are: kind "
            "(with recovery 'none')",
        ),
    ],
)
def test_mistakes_are_told_with_key_and_expectation(
    config: Path, overrides: list[str], told: str
) -> None:
    text = complaint(config, *overrides)
    assert told in text
    assert "--set" in text


def test_mistakes_in_the_file_are_told_with_their_lines(config: Path) -> None:
    lines = config.read_text().replace("updates", "update").replace("softmax", "softmacks")
    config.write_text(lines)
    told = complaint(config).splitlines()
    assert "small.yaml, line 3: workload.kind: unknown kind 'softmacks'" in told[0]
    assert "small.yaml, line 7: training.update: unknown key; did you mean 'updates'?" in told[1]


def test_a_missing_section_is_named(config: Path) -> None:
    config.write_text("experiment: small\n")
    assert "small.yaml: optimizer: is missing; add it" in complaint(config)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("server-2", "did you mean 'server-1'? There are: server-0, server-1, worker-0"),
        ("replica-0-1", "there is no node 'replica-0-1' to kill"),
        ("store-0", "there is no node 'store-0' to kill"),
    ],
)
def test_a_fault_needs_an_existing_node(config: Path, target: str, told: str) -> None:
    text = complaint(config, faults({**KILL, "target": target}))
    assert told in text
    assert "faults.0.target" in text


@pytest.mark.parametrize(
    ("recovery", "target", "told"),
    [
        ("stateless", "store-0", None),
        ("checkpoint", "server-0", None),
        ("checkpoint", {"shard": 0}, None),
        ("stateless", "server-0", "nothing is written to disk"),
        ("none", {"shard": 0}, "nothing is written to disk"),
        ("checkpoint", ["server-0", "worker-0"], "a worker keeps nothing that could fail"),
        ("checkpoint", {"role": "evaluator", "pick": "all"}, "an evaluator keeps nothing"),
    ],
)
def test_only_who_keeps_something_can_be_full(
    config: Path, recovery: str, target: Any, told: str | None
) -> None:
    plan = (f"recovery={recovery}", faults({**FULL, "target": target}))
    if told is None:
        assert only(config, *plan).faults
    else:
        assert told in complaint(config, *plan)


def test_a_node_can_be_killed_once_and_its_replacement_then(config: Path) -> None:
    again = {**KILL, "at_updates": 60}
    assert "no node 'server-0' to kill" in complaint(config, faults(KILL, again))
    assert only(config, faults(KILL, {**again, "target": "server-0-b"})).faults
    never = {**KILL, "back_after": None}
    text = complaint(config, faults(never, {**again, "target": "server-0-b"}))
    assert "faults.1.target" in text


def test_a_node_can_be_paused_again_and_killed_after_that(config: Path) -> None:
    pause = {"kind": "pause", "target": "server-0", "at_updates": 40}
    trial = only(config, faults(pause, {**pause, "at_updates": 45, "seconds": 0.5}, KILL))
    assert trial.build_faults() == (
        Pause("server-0", AtUpdates(40), 2.0),
        Pause("server-0", AtUpdates(45), 0.5),
        Kill("server-0", AtUpdates(50), 1.0),
    )
    late = {**pause, "at_updates": 60}
    assert "no node 'server-0' to pause" in complaint(config, faults(KILL, late))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"seconds": 0}, "faults.0.seconds: expected more than 0"),
        ({"seconds": "2 s"}, "faults.0.seconds: expected a number"),
        ({"back_after": 1.0}, "faults.0.back_after: unknown key"),
        ({"kind": "stop"}, "faults.0.kind: unknown kind 'stop'"),
    ],
)
def test_a_wrong_pause_is_refused(config: Path, fault: dict[str, Any], told: str) -> None:
    pause = {"kind": "pause", "target": "server-0", "at_updates": 40, **fault}
    assert told in complaint(config, faults(pause))


def test_a_fault_is_checked_under_the_recovery_it_meets(config: Path) -> None:
    kill = {**KILL, "target": "replica-0-1"}
    assert labels_of(config, faults(kill), "axes={recovery: [chain]}")
    text = complaint(config, faults(kill), "axes={recovery: [chain, none]}")
    assert "(with recovery 'none')" in text


def test_a_kill_after_the_end_is_allowed(config: Path) -> None:
    trial = only(config, faults({**KILL, "at_updates": 101}, {**KILL, "target": "server-1"}))
    ((fault, end),) = trial.late_faults
    assert (fault.when, end) == (AtUpdates(101), "the training ends after 100")


def test_an_override_that_an_axis_would_undo_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the axis 'recovery' varies this key"):
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
    [
        ("none", 2),
        ("checkpoint", 2),
        ("chain", 0),
        ("stateless", 1),
        ("{preset: checkpoint, outage: {kind: continue}}", 1),
    ],
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
            "budget.nodes: this strategy needs 6 nodes: 6 for servers and replicas; expected",
        ),
        (
            ["recovery=stateless", "budget={nodes: 2}"],
            "needs 3 nodes: 2 for servers and replicas and 1 store",
        ),
        (["axes={recovery: [none, chain]}", "budget={nodes: 3}"], "(with recovery 'chain')"),
        (["server.spares=1", "budget={nodes: 4}"], "spares are what a strategy leaves of it"),
        (["recovery.spares=1", "budget={nodes: 4}"], "recovery.spares: with a budget, spares are"),
        (["budget={nodes: 0}"], "budget.nodes: expected more than 0"),
    ],
)
def test_a_budget_that_is_too_small_is_refused(
    config: Path, settings: list[str], told: str
) -> None:
    assert told in complaint(config, "server.shards=2", *settings)
