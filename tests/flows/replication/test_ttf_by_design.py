"""Part (e) of the replication of the first paper: its plan, and what is told of planted effects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dps.events import (
    Detected,
    Evaluated,
    EvaluationMissed,
    Event,
    Killed,
    NodeJoined,
    Restored,
    TrainingStarted,
    TrialEnded,
    TrialStarted,
)
from flows.analysis.finished import Finished, finished, with_effects
from flows.analysis.statistics.claims import judge
from flows.config.claims import ClaimSection
from flows.config.trials import Trial, expand
from flows.records.record import Record
from flows.replication.ttf.by_design import EFFECTS, claims_table, last_rise, sections
from flows.replication.ttf.claims import SEEDS_ONLY
from flows.replication.ttf.findings import CORRECTED, Designed, study, write
from flows.replication.ttf.run import BY_DESIGN, OF_THE_FULL, by_design, experiment
from flows.replication.version import Version
from tests.support.records import PRICES, acked

BETWEEN = 100  # both ways of writing checkpoints begin anew every so many updates


@pytest.fixture(scope="module")
def trials() -> tuple[Trial, ...]:
    return expand(experiment("ttf-by-design", Version()))


# -- the plan ----------------------------------------------------------------------------------


def test_all_strategies_of_a_seed_meet_the_same_kills(trials: tuple[Trial, ...]) -> None:
    moments: dict[tuple[int, str], set[tuple[Any, ...]]] = {}
    for trial in trials:
        plan = tuple(fault.when for fault in trial.config.build_faults())
        moments.setdefault((trial.seed, trial.labels["faults"]), set()).add(plan)
    assert {len(found) for found in moments.values()} == {1}
    first = {next(iter(moments[seed, "k=1"]))[0] for seed in range(10)}
    assert len(first) > 5


def test_kills_are_as_likely_in_every_phase_of_a_checkpoint() -> None:
    axes = experiment("ttf-by-design", Version()).axes
    for faults in axes["faults"].values():
        for fault in faults:
            low, high = fault["at_updates"]["between"]
            assert (high - low) % BETWEEN == 0


def test_with_equal_nodes_every_strategy_has_as_many(trials: tuple[Trial, ...]) -> None:
    nodes = {
        len(trial.config.node_names) for trial in trials if trial.labels["budget"] == "equal nodes"
    }
    assert len(nodes) == 1


def test_each_trial_with_kills_has_a_control(trials: tuple[Trial, ...]) -> None:
    def twin(trial: Trial) -> tuple[Any, ...]:
        return trial.labels["recovery"], trial.labels["budget"], trial.seed

    controls = {twin(trial) for trial in trials if trial.labels["faults"] == "k=0"}
    assert {twin(trial) for trial in trials} == controls


def test_real_processes_repeat_trials_of_virtual_time(trials: tuple[Trial, ...]) -> None:
    real = expand(experiment("ttf-by-design-real", Version(full=True)))
    assert {trial.config.cluster.kind for trial in real} == {"local"}
    same = {trial.name: trial.config for trial in trials}
    besides = {"cluster", "experiment"}
    for trial in real:
        twin = same[trial.name]
        assert trial.config.model_dump(exclude=besides) == twin.model_dump(exclude=besides)


def test_the_network_and_real_processes_are_of_the_full_version_alone() -> None:
    assert by_design(Version()) == BY_DESIGN
    assert by_design(Version(full=True)) == {**BY_DESIGN, **OF_THE_FULL}


# -- what is told ------------------------------------------------------------------------------

SECONDS, KILLED, DOWN = 40, 10, 4


def training(seed: int, kills: int, learnt: Callable[[float], float]) -> Record:
    """A training that pushes ten gradients a second and is evaluated as often as that.

    With a kill its shard is down for 4 s from second 10 on.
    """
    down = range(KILLED + 1, KILLED + DOWN) if kills else range(0)
    settings = {
        "trial": f"stateless.k={kills}.seed-{seed}",
        "experiment": "planted",
        "seed": seed,
        "labels": {"recovery": "stateless", "faults": f"k={kills}"},
        "config": {"faults": [{"kind": "kill"}] * kills, "seed": seed},
    }
    events: list[Event] = [
        TrialStarted(0.0, str(settings["trial"]), settings, {}),
        NodeJoined(1.0, "server-0", "server", 1, "here"),
        TrainingStarted(10.0, 1, 1, 10),
    ]
    pushed = 0
    for second in range(SECONDS + 1):
        t = 10.0 + second
        if kills and second == KILLED:
            events.append(Killed(t, 0, "server-0", 1, pushed, True))
            events.append(Detected(t, 0, 2, "server-0", False, "scheduler"))
        if kills and second == KILLED + DOWN:
            events.append(Restored(t, 0, 2, "server-0-b", pushed, "store"))
        if second in down:
            events.append(EvaluationMissed(t, "down"))
            continue
        events.append(Evaluated(t, pushed, 1.0, learnt(second)))
        seqs = range(pushed + 1, pushed + 11)
        events += [acked([seq], t=t + (seq - pushed) / 10) for seq in seqs]
        pushed += 10
    return Record((*events, TrialEnded(t + 2, "valid", "")))


def rising(t: float) -> float:
    return 0.1 + 0.01 * t


def recorded(seeds: int, lost: Callable[[int], float]) -> list[Finished]:
    """Trials of so many seeds, which lose so much of their accuracy at the kill, and controls."""
    records = []
    for seed in range(seeds):
        points = lost(seed)
        records += [
            training(seed, 0, rising),
            training(seed, 1, lambda t, p=points: rising(t) - (p if t > KILLED else 0.0)),  # type: ignore[misc]
        ]
    found = [finished(Path(f"{i}/events.jsonl"), each, PRICES) for i, each in enumerate(records)]
    return with_effects(found, PRICES)


def claim(direction: str) -> ClaimSection:
    return ClaimSection.model_validate(
        {
            "metric": "effect_time_mean",
            "strategy": "stateless",
            "against": "none-given",
            "condition": {"faults": "k=1"},
            "direction": direction,
            "smallest": 0.002,
        }
    )


def test_a_planted_loss_is_told_and_refutes_the_gain(tmp_path: Path) -> None:
    """Ten points less from the kill on, give or take a point from seed to seed."""
    done = recorded(10, lambda seed: 0.1 + 0.01 * (seed % 3 - 1))
    text = "\n".join(sections("(e)", done, [claim("more"), claim("less")], tmp_path))
    gain, loss = (line for line in text.splitlines() if line.startswith("| Effect"))
    assert "**does not hold**: it goes the other way" in gain
    assert "**holds**: by 0.2 points or more" in loss
    row = next(line for line in text.splitlines() if line.startswith("| stateless | k=1 | 10 | −"))
    assert float(row.split("|")[4].split("[")[0].replace("−", "-")) == pytest.approx(-10, abs=1.5)
    assert (tmp_path / f"{EFFECTS}.svg").exists()


def test_parts_with_controls_tell_what_kills_did(tmp_path: Path) -> None:
    """A tenth is lost at the kill. As many gradients take 3 s more, in which 0.03 are learnt."""
    part = study(CORRECTED, recorded(4, lambda _: 0.1), 8)
    text = write({CORRECTED: part}, [], [], tmp_path, None, Version())
    said = text.index("Effects of all kills of a trial together")
    assert text.index(f"### {CORRECTED}") < said
    row = next(line for line in text[said:].splitlines() if line.startswith("| stateless | k=1"))
    trials, mean, end, _, after_as_many = (cell.strip() for cell in row.split("|")[3:8])
    assert trials == "4"
    for cell, planted in ((mean, -10), (end, -10), (after_as_many, -7)):
        assert float(cell.split("[")[0].replace("−", "-")) == pytest.approx(planted, abs=0.3)


def test_effects_leave_out_trials_that_ended_with_a_shard_down(tmp_path: Path) -> None:
    *others, last = recorded(4, lambda _: 0.1)
    unserved = (event for event in last.record.events if not isinstance(event, Restored))
    ended_down = finished(Path("down/events.jsonl"), Record(tuple(unserved)), PRICES)
    part = study(CORRECTED, with_effects([*others, ended_down], PRICES), 8)
    text = write({CORRECTED: part}, [], [], tmp_path, None, Version())
    assert "Left out are trials that ended with a shard down: 1." in text
    effects = text[text.index("Effects of all kills") :]
    assert next(line for line in effects.splitlines() if "| k=1" in line).split("|")[3] == " 3 "


def test_a_part_without_controls_tells_no_effects(tmp_path: Path) -> None:
    killed = [training(seed, 1, rising) for seed in range(4)]
    without = [finished(Path(f"{i}/events.jsonl"), each, PRICES) for i, each in enumerate(killed)]
    text = write({CORRECTED: study(CORRECTED, without, 4)}, [], [], tmp_path, None, Version())
    assert "Effects of all kills" not in text


def test_of_a_kill_without_effect_on_accuracy_neither_is_shown(tmp_path: Path) -> None:
    done = recorded(10, lambda seed: 0.02 * (seed % 2 - 0.5))
    text = "\n".join(sections("(e)", done, [claim("more"), claim("less")], tmp_path))
    assert "**holds**" not in text


@pytest.mark.parametrize(
    ("metric", "marked"),
    [
        ("effect_time_mean", False),
        ("accuracy_final", False),
        ("effect_training_seconds", True),
        ("effect_cost_usd", True),
        ("effect_time_span", True),
        ("downtime_seconds", True),
    ],
)
def test_on_virtual_time_what_follows_from_times_is_marked(metric: str, marked: bool) -> None:
    claimed = ClaimSection.model_validate({**claim("more").model_dump(), "metric": metric})
    outcomes = [each.outcome for each in recorded(3, lambda seed: 0.1)]
    judged = judge(outcomes, [claimed], np.random.default_rng(0))
    assert (SEEDS_ONLY in claims_table(judged, virtual=True)) is marked
    assert SEEDS_ONLY not in claims_table(judged)


def test_the_last_rise_of_controls_is_told() -> None:
    """A hundredth a second: from two thirds of 40 s to the last evaluations."""
    rise = last_rise(recorded(2, lambda _: 0.3))
    assert rise == pytest.approx(0.12, abs=0.015)


def test_parts_by_design_come_first_and_are_counted(tmp_path: Path) -> None:
    done = recorded(3, lambda _: 0.1)
    part = Designed(study("(e) by design", done, 7), (claim("less"),))
    text = write({}, [], [part], tmp_path, None, Version())
    assert "**Only 6 of 7 trials are recorded.**" in text
    assert text.index("### (e) by design") < text.index("### Claims as they were published")
    assert f"]({EFFECTS}.svg)" in text
