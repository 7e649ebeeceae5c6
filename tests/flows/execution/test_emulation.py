"""Emulated compute and stragglers, parts of data, several workers on a node; in real trials too."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dps.errors import ConfigurationError
from dps.events import Killed, Reported, WorkerJoined
from dps.virtual.profile import Gradient
from flows.config.experiment import TrialConfig, load_experiment
from flows.config.settings import TrainingSection
from flows.config.trials import Trial, expand
from flows.execution.attempt import Attempt
from flows.execution.drivers import Drivers
from flows.execution.training import durations, part_of
from flows.metrics.outcome import Outcome, outcome
from flows.metrics.prices import load_prices
from flows.metrics.updates import COMPUTE
from flows.monitor.progress import PlainView
from flows.records.events import Audited
from flows.records.record import EVENTS_FILE, Record, read_record

CONFIGS = Path(__file__).parents[3] / "configs"
STALENESS, SCALING = str(CONFIGS / "staleness.yaml"), str(CONFIGS / "scaling.yaml")
SECONDS, FACTOR = 0.02, 6.0


def training(**changes: Any) -> TrainingSection:
    settings = {"workers": 3, "updates": 30, "compute_seconds": 0.1, **changes}
    return TrainingSection.model_validate(settings)


def times(section: TrainingSection, worker: int, number: int = 4000, seed: int = 0) -> list[float]:
    return list(islice(durations(section, seed, worker), number))


# -- how long gradients take -------------------------------------------------------------------


def test_one_worker_may_be_slower_in_every_gradient() -> None:
    section = training(straggling={"factor": 4, "workers": [1]})
    assert times(section, 1, 5) == pytest.approx([0.4] * 5)
    assert times(section, 0, 5) == times(section, 2, 5) == [0.1] * 5


def test_any_worker_may_be_slower_in_some() -> None:
    section = training(straggling={"factor": 10, "share": 0.05})
    for worker in range(3):
        found = Counter(times(section, worker))
        assert set(found) == {0.1, 1.0}
        assert found[1.0] / 4000 == pytest.approx(0.05, abs=4 * np.sqrt(0.05 * 0.95 / 4000))
    assert times(section, 0) != times(section, 1) != times(section, 0, seed=1)
    assert times(section, 0) == times(section, 0)


def test_workers_do_not_compute_in_step_on_virtual_time() -> None:
    def drawn(worker: int, seed: int = 0) -> list[float]:
        gradient = Gradient(seconds=1.0, spread=0.5)
        return list(islice(durations(training(), seed, worker, gradient), 5))

    assert drawn(0) == drawn(0)
    assert not set(drawn(0)) & {*drawn(1), *drawn(0, seed=1)}


# -- whose data are whose ----------------------------------------------------------------------

CLASSES = np.array([2, 0, 1, 1, 0, 2, 2, 0, 1, 2])


def test_or_each_from_its_part_by_class() -> None:
    parts = [part_of(training(partition="by_class"), CLASSES, worker) for worker in range(3)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(10))
    assert [len(part) for part in parts] == [4, 3, 3]
    assert [CLASSES[part].tolist() for part in parts] == [[0, 0, 0, 1], [1, 1, 2], [2, 2, 2]]
    again = part_of(training(partition="by_class"), CLASSES, 4)
    assert again.tolist() == parts[1].tolist(), "who joins later takes an earlier one's part"


# -- configurations ----------------------------------------------------------------------------


def trials(path: str, *overrides: str) -> list[TrialConfig]:
    return [config for _, config in load_experiment(path, overrides).trial_configs()]


def test_workers_share_nodes() -> None:
    nodes = {c.training.workers: c.worker_nodes for c in trials(SCALING)}
    assert [len(nodes[workers]) for workers in (1, 2, 4, 8, 16)] == [1, 1, 1, 2, 4]
    assert "worker-4" not in trials(SCALING, "seeds=[0]")[-1].node_names


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (
            "training.straggling={factor: 0.5}",
            "straggling.factor: expected greater than or eq",
        ),
        ("training.straggling={factor: 2, workers: []}", "straggling.workers: "),
        ("training.straggling={factor: 2, workers: [8]}", "no worker 8; expected 0 to 7"),
        ("training.partition=by_clas", "did you mean 'by_class'?"),
    ],
)
def test_what_cannot_be_emulated_is_refused(override: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_experiment(STALENESS, ("axes={}", "comparison={}", override))
    assert told in str(refused.value)


# -- real trials -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """Small trials of both experiments, one of which loses a node, by their names."""
    bounds = "{tau 0: {kind: bsp}, tau 2: {kind: ssp, tau: 2}, tau inf: {kind: asp}}"
    several = "{workers: 4, updates: 120, compute_seconds: 0.05, workers_per_node: 2}"
    small = [
        *chosen(
            STALENESS,
            f"axes.consistency={bounds}",
            "axes.training.partition=[shared]",
            "comparison={}",
            "training.workers=4",
            "training.updates=60",
            f"training.compute_seconds={SECONDS}",
            f"training.straggling={{factor: {FACTOR}, workers: [0]}}",
        ),
        *chosen(
            SCALING,
            "axes={}",
            "comparison={}",
            f"training={several}",
            "faults=[{kind: kill, target: worker-1, at_updates: 20, back_after: 0.0}]",
        ),
    ]
    here = tmp_path_factory.mktemp("emulation")
    view = PlainView(Console(file=io.StringIO()))
    view.begin("emulation", small, [])
    found = {}

    def attempts() -> Iterator[Attempt]:
        for trial in small:
            view.started(trial)
            yield Attempt(trial, here / trial.name)

    with Drivers() as drivers:
        for attempt in drivers.run(attempts(), view):
            found[attempt.trial.name] = read_record(attempt.folder / EVENTS_FILE)
    return found


def chosen(path: str, *overrides: str) -> list[Trial]:
    return list(expand(load_experiment(path, ["seeds=[0]", *overrides])))


def computed(record: Record) -> dict[str, list[float]]:
    """Seconds that each worker reports for its gradients."""
    found: dict[str, list[float]] = {}
    for event in record.of(Reported):
        if event.name == COMPUTE:
            found.setdefault(event.worker, []).extend(event.values)
    return found


def result(record: Record) -> Outcome:
    found = outcome(record, load_prices())
    assert (found.status, found.reason) == ("valid", "")
    return found


@pytest.mark.cluster
@pytest.mark.slow
def test_gradients_take_the_time_that_is_emulated(ran: dict[str, Record]) -> None:
    for bound in ("tau-0", "tau-2", "tau-inf"):
        seconds = computed(ran[f"{bound}.shared.seed-0"])
        assert seconds.keys() == {f"worker-{number}" for number in range(4)}
        assert min(seconds.pop("worker-0")) >= FACTOR * SECONDS
        for others in seconds.values():
            assert SECONDS <= min(others) <= np.median(others) < FACTOR * SECONDS


@pytest.mark.cluster
@pytest.mark.slow
def test_the_bound_decides_how_long_others_wait_for_a_straggler(ran: dict[str, Record]) -> None:
    found = {b: result(ran[f"tau-{b}.shared.seed-0"]) for b in ("0", "2", "inf")}
    idle = {bound: outcome.row()["idle_share"] or 0.0 for bound, outcome in found.items()}
    assert idle["0"] > 3 / 4 * (1 - 1 / FACTOR) - 0.1  # three of four wait for all but a sixth
    assert idle["inf"] < idle["2"]
    # From one read of a worker to its next, each of the 3 others applies 2τ + 1 gradients at most.
    stale = {bound: outcome.row()["staleness_max"] or 0 for bound, outcome in found.items()}
    assert stale["0"] <= 3
    assert stale["2"] <= 3 * (2 * 2 + 1)
    assert stale["0"] < stale["inf"]


@pytest.mark.cluster
@pytest.mark.slow
def test_all_workers_of_a_lost_node_go_on_where_one_takes_its_place(
    ran: dict[str, Record],
) -> None:
    record = ran["seed-0"]
    result(record)
    assert [event.gone for event in record.of(Killed)] == [True]
    again = Counter(j.node for j in record.of(WorkerJoined) if j.incarnation > 1)
    assert again == {"worker-1-b": 2}
    for audited in record.of(Audited):
        assert 120 <= audited.version <= 124  # what was under way when the node died
        assert max(audited.applied.values()) - min(audited.applied.values()) <= 2
