"""The experiments of who wins when: what they compare, a cell of the map, and Daly's interval."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dps.core.checkpoint_interval import daly
from dps.core.faults.plan import AtSeconds
from dps.events import Detected, Evaluated, Killed
from flows.analysis.faults import training_span
from flows.analysis.finished import Finished, read_finished
from flows.analysis.prices import load_prices
from flows.config.experiment import load_experiment
from flows.config.trials import Trial, load_trials
from flows.execution.trial import run_trial
from flows.records.record import EVENTS_FILE

CONFIGS = Path(__file__).parents[3] / "configs"
FOUR_EACH = (
    *(
        "frontier-workers",
        "frontier-size",
        "frontier-layers",
        "frontier-everywhere",
        "frontier-profile",
    ),
    *("frontier-real", "frontier-faults", "partial"),
)
SHIPPED = ("frontier", "frontier-all", "frontier-model", "frontier-stores", *FOUR_EACH)
UNNOTICED = ("pause 2", "one-way cut 12", "slow link 12")
STRIKES = ("kill", "pause 12", "cut 12", "both servers", "all copies", "server + store", *UNNOTICED)
FAULTS, OUTAGE = "faults", "faults.*.back_after"
SERVES = ("server", "replica", "spare", "store")


def one_seed(name: str, *settings: str) -> tuple[Trial, ...]:
    path = str(CONFIGS / f"{name}.yaml")
    return load_trials(path, ["seeds=[0]", *settings])[1]


@pytest.fixture(scope="module")
def frontier() -> dict[tuple[str, str, str], Trial]:
    """The trials of a seed by strategy, faults and outage."""
    return {
        (trial.labels["recovery"], trial.labels[FAULTS], trial.labels[OUTAGE]): trial
        for trial in one_seed("frontier")
    }


def ran(trial: Trial, folder: Path) -> Finished:
    folder.mkdir()
    run_trial(trial, folder, lambda event: None)
    return read_finished(folder / EVENTS_FILE, load_prices())


def moments(trial: Trial) -> list[float]:
    faults = trial.config.build_faults()
    return [fault.when.seconds for fault in faults if isinstance(fault.when, AtSeconds)]


def serving(trial: Trial) -> int:
    """How many nodes there are beside workers and the evaluator."""
    return sum(name.startswith(SERVES) for name in trial.config.node_names)


@pytest.mark.parametrize("name", SHIPPED)
def test_each_strategy_of_a_seed_has_a_control_and_at_least_five_seeds_are_planned(
    name: str,
) -> None:
    experiment = load_experiment(str(CONFIGS / f"{name}.yaml"))
    assert len(experiment.seeds) >= (3 if name == "frontier-real" else 5)
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
    found = {trial.labels["recovery"]: serving(trial) for trial in one_seed("frontier-all")}
    assert found == of_all


def test_moments_are_the_same_for_all_and_come_closer_with_the_mean_time(
    frontier: dict[tuple[str, str, str], Trial],
) -> None:
    often = moments(frontier["none", "mtbf 8", "outage 2"])
    assert len(often) > 100
    for (_, faults, _), trial in frontier.items():
        if faults == "mtbf 8":
            assert moments(trial) == often
    rare = moments(frontier["none", "mtbf 64", "outage 8"])
    assert min(rare) == pytest.approx(8 * min(often))


def test_whatever_strikes_in_frontier_faults_comes_at_the_same_moments() -> None:
    struck = [trial for trial in one_seed("frontier-faults") if trial.config.faults]
    assert {trial.labels[FAULTS] for trial in struck} == set(STRIKES)
    assert {trial.labels["recovery"] for trial in struck} >= {"checkpoint, warm", "stateless"}
    at_once = [trial for trial in struck if trial.labels[FAULTS] == "both servers"]
    [(first, second)] = {tuple(moments(trial)) for trial in struck if trial not in at_once}
    assert {tuple(moments(trial)) for trial in at_once} == {(first,)}
    assert 12 <= first < 20
    assert 36 <= second < 44


@pytest.mark.slow
@pytest.mark.parametrize("strikes", STRIKES)
def test_whatever_strikes_in_frontier_faults_does_so_as_planned(
    strikes: str, tmp_path: Path
) -> None:
    """A stateless server is struck by all of them; what is not noticed as a loss gives none up."""
    [trial] = [
        trial
        for trial in one_seed("frontier-faults", "claims=[]")
        if (trial.labels["recovery"], trial.labels[FAULTS]) == ("stateless", strikes)
    ]
    done = ran(trial, tmp_path / "cell")
    assert done.outcome.status == "valid", done.outcome.reason
    given_up = {event.node for event in done.record.of(Detected)}
    assert bool(given_up) == (strikes not in UNNOTICED)


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
