"""The experiments of who wins when: what they compare, a cell of the map, and Daly's interval."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

from dps.core.checkpoint_interval import daly
from dps.events import Evaluated, Killed
from dps.faults import AtSeconds
from flows.config.experiment import load_experiment
from flows.config.trials import Trial, load_trials
from flows.execution.trial import run_trial
from flows.metrics.faults import training_span
from flows.metrics.prices import load_prices
from flows.records.record import EVENTS_FILE
from flows.statistics.finished import Finished, read_finished

FOUR_EACH = (
    "studies/frontier-workers",
    "studies/frontier-size",
    "studies/frontier-layers",
    "studies/frontier-everywhere",
    "studies/frontier-profile",
    "studies/frontier-real",
    "studies/frontier-faults",
    "studies/partial",
)
OF_ALL = "studies/frontier-all"
SHIPPED = (
    "studies/frontier",
    OF_ALL,
    "studies/frontier-model",
    "studies/frontier-stores",
    *FOUR_EACH,
)
FAULTS, OUTAGE = "faults", "faults.*.back_after"
SERVES = ("server", "replica", "spare", "store")


@cache
def one_seed(name: str, *settings: str) -> tuple[Trial, ...]:
    return load_trials(name, ["seeds=[0]", *settings])[1]


@pytest.fixture(scope="module")
def frontier() -> dict[tuple[str, str, str], Trial]:
    """The trials of a seed by strategy, faults and outage."""
    return {
        (trial.labels["recovery"], trial.labels[FAULTS], trial.labels[OUTAGE]): trial
        for trial in one_seed("studies/frontier")
    }


def ran(trial: Trial, folder: Path) -> Finished:
    folder.mkdir()
    run_trial(trial, folder, lambda event: None)
    return read_finished(folder / EVENTS_FILE, load_prices())


def moments(trial: Trial) -> list[float]:
    faults = trial.config.fault_plan
    return [fault.when.seconds for fault in faults if isinstance(fault.when, AtSeconds)]


def serving(trial: Trial) -> int:
    """How many nodes there are beside workers and the evaluator."""
    return sum(name.startswith(SERVES) for name in trial.config.node_names)


@pytest.mark.parametrize("name", SHIPPED)
def test_each_strategy_of_a_seed_has_a_control_and_at_least_five_seeds_are_planned(
    name: str,
) -> None:
    experiment = load_experiment(name)
    assert len(experiment.seeds) >= (3 if name == "studies/frontier-real" else 5)
    trials = one_seed(name)
    quiet = {t.labels["recovery"] for t in trials if not t.config.faults}
    assert quiet == {t.labels["recovery"] for t in trials}


def test_who_is_said_to_have_four_nodes_has_four(
    frontier: dict[tuple[str, str, str], Trial],
) -> None:
    for strategy in ("checkpoint, warm", "chain(2)", "stateless"):
        assert serving(frontier[strategy, "mtbf 8", "outage 2"]) == 4
    for name in FOUR_EACH:
        assert {serving(trial) for trial in one_seed(name)} == {4}
    of_all = {"checkpoint, warm": 4, "chain(2)": 4, "stateless": 4, "worker cache, warm": 4}
    of_all |= {"checkpoint, cold": 2, "chain(2), spares": 6, "chain(3)": 6}
    found = {trial.labels["recovery"]: serving(trial) for trial in one_seed(OF_ALL)}
    assert found == of_all


def test_whatever_strikes_in_frontier_faults_comes_at_the_same_moments() -> None:
    struck = [trial for trial in one_seed("studies/frontier-faults") if trial.config.faults]
    assert len({trial.labels[FAULTS] for trial in struck}) == 9
    assert {trial.labels["recovery"] for trial in struck} >= {"checkpoint, warm", "stateless"}
    at_once = [trial for trial in struck if trial.labels[FAULTS] == "both servers"]
    [(first, second)] = {tuple(moments(trial)) for trial in struck if trial not in at_once}
    assert {tuple(moments(trial)) for trial in at_once} == {(first,)}
    assert 12 <= first < 20
    assert 36 <= second < 44


def test_a_cell_of_the_map_runs(
    tmp_path: Path, frontier: dict[tuple[str, str, str], Trial]
) -> None:
    done = ran(frontier["checkpoint, warm", "mtbf 24", "outage 2"], tmp_path / "cell")
    assert done.outcome.status == "valid", done.outcome.reason
    row = done.outcome.row()
    assert len(done.record.of(Killed)) >= row["outages"] > 0
    assert 0 < row["target_usd"] < row["cost_usd"]


@pytest.mark.slow
def test_the_best_fixed_interval_is_the_one_next_to_dalys(tmp_path: Path) -> None:
    """In the setting of `interval`: updates a second that are left in the end, by the interval.

    A write keeps acks waiting for the 0.1 s that the object store takes, less half of the 0.05 s
    of a gradient, which the other of two workers is at.
    """
    fixed, mtbf, rate, cost = (25, 100, 400), 5.0, 2 / 0.05, 0.075
    kept = dict.fromkeys(fixed, 0.0)
    for trial in one_seed("interval", "training.updates=1500", "claims=[]"):
        strategy, faults = trial.labels["recovery"], trial.labels[FAULTS]
        every = int(strategy.removeprefix("every ")) if strategy.startswith("every") else 0
        if faults != "mtbf 5" or every not in fixed:
            continue
        record = ran(trial, tmp_path / str(every)).record
        span = training_span(record)
        assert span is not None
        kept[every] = record.of(Evaluated)[-1].updates / (span[1] - span[0])
    wanted = rate * daly(cost, mtbf)
    assert max(kept, key=lambda every: kept[every]) == min(
        fixed, key=lambda every: abs(math.log(every / wanted))
    )
