"""Emulated compute and stragglers, parts of data, several workers on a node; in real trials too."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from dps.errors import ConfigurationError
from dps.events import Audited, Killed, Reported, ResourceSampled, WorkerJoined
from flows.config import ExperimentConfig, TrialConfig, load_experiment
from flows.drivers import Drivers
from flows.emulation import durations, part_of
from flows.experiment import run_experiment
from flows.grid import digest
from flows.outcome import Outcome
from flows.pace import COMPUTE, computing
from flows.progress import PlainView
from flows.record import Record, read_record
from flows.sections import TrainingSection

CONFIGS = Path(__file__).parents[2] / "configs"
STALENESS, SCALING = str(CONFIGS / "staleness.yaml"), str(CONFIGS / "scaling.yaml")
SECONDS, FACTOR = 0.02, 6.0


def training(**changes: Any) -> TrainingSection:
    settings = {"workers": 3, "updates": 30, "compute_seconds": 0.1, **changes}
    return TrainingSection.model_validate(settings)


def times(section: TrainingSection, worker: int, number: int = 4000, seed: int = 0) -> list[float]:
    return list(islice(durations(section, seed, worker), number))


# -- how long gradients take -------------------------------------------------------------------


def test_without_stragglers_all_gradients_take_the_same_time() -> None:
    assert times(training(), 2, 5) == [0.1] * 5


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


# -- whose data are whose ----------------------------------------------------------------------

CLASSES = np.array([2, 0, 1, 1, 0, 2, 2, 0, 1, 2])


def test_all_draw_from_everything() -> None:
    for worker in range(3):
        assert part_of(training(), CLASSES, worker).tolist() == list(range(10))


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


def test_the_packaged_experiments_vary_what_they_say() -> None:
    bounds = Counter(config.consistency.model_dump_json() for config in trials(STALENESS))
    assert list(bounds.values()) == [6] * 7
    workers = Counter(config.training.workers for config in trials(SCALING))
    assert workers == dict.fromkeys([1, 2, 4, 8, 16], 6)
    assert {c.training.updates / c.training.workers for c in trials(SCALING)} == {200}


def test_workers_share_nodes() -> None:
    nodes = {c.training.workers: c.worker_nodes for c in trials(SCALING)}
    assert [len(nodes[workers]) for workers in (1, 2, 4, 8, 16)] == [1, 1, 1, 2, 4]
    assert "worker-4" not in trials(SCALING, "seeds=[0]")[-1].node_names


def test_a_trial_without_these_settings_is_recorded_as_it_always_was() -> None:
    (plain,) = trials("demo", "axes={}", "seeds=[0]")
    (said,) = trials(
        "demo",
        "axes={}",
        "seeds=[0]",
        "training.workers_per_node=1",
        "training.straggling=null",
        "training.partition=shared",
    )
    assert digest(plain) == digest(said)
    told = plain.model_dump(mode="json")["training"]
    assert told.keys() == {"workers", "updates", "batch_size", "compute_seconds"}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.straggling={factor: 0.5}", "training.straggling.factor: expected at least 1"),
        ("training.straggling={share: 0.5}", "training.straggling.factor: is missing"),
        ("training.straggling={factor: 2, share: 0}", "share: expected more than 0"),
        ("training.straggling={factor: 2, workers: []}", "straggling.workers: "),
        ("training.straggling={factor: 2, workers: [4]}", "there is no worker 4; expected 0 to 3"),
        ("training.compute_seconds=0.0", "it makes compute_seconds longer, which is 0"),
        ("training.workers_per_node=0", "workers_per_node: expected more than 0"),
        ("training.partition=by_clas", "did you mean 'by_class'?"),
    ],
)
def test_what_cannot_be_emulated_is_refused(override: str, told: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        load_experiment(STALENESS, ("axes={}", "comparison={}", override))
    assert told in str(refused.value)


# -- real trials -------------------------------------------------------------------------------


def run(here: Path, path: str, *overrides: str) -> tuple[Outcome, ...]:
    """Run a packaged experiment, made small."""
    experiment: ExperimentConfig = load_experiment(path, overrides)
    view = PlainView(Console(file=io.StringIO()))
    with Drivers() as drivers:
        return run_experiment(experiment, here, view, drivers).outcomes


def record_of(here: Path, trial: Outcome) -> Record:
    (path,) = here.rglob(f"{trial.identity.trial}/events.jsonl")
    return read_record(path)


def computed(record: Record) -> dict[str, list[float]]:
    """Seconds that each worker reports for its gradients."""
    found: dict[str, list[float]] = {}
    for event in record.of(Reported):
        if event.name == COMPUTE:
            found.setdefault(event.worker, []).extend(event.values)
    return found


@pytest.mark.cluster
def test_a_straggler_under_different_bounds(tmp_path: Path) -> None:
    outcomes = run(
        tmp_path,
        STALENESS,
        "axes.consistency={tau 0: {kind: bsp}, tau 2: {kind: ssp, tau: 2}, tau inf: {kind: asp}}",
        "axes.training.partition=[shared]",
        "seeds=[0]",
        "training.updates=60",
        f"training.compute_seconds={SECONDS}",
        f"training.straggling={{factor: {FACTOR}, workers: [0]}}",
    )
    assert [o.status for o in outcomes] == ["valid"] * 3
    by_bound = {o.identity.strategy: o for o in outcomes}
    records = {bound: record_of(tmp_path, o) for bound, o in by_bound.items()}
    for record in records.values():
        seconds = computed(record)
        assert seconds.keys() == {f"worker-{number}" for number in range(4)}
        assert min(seconds.pop("worker-0")) >= FACTOR * SECONDS
        for others in seconds.values():
            assert SECONDS <= min(others) <= np.median(others) < 2 * SECONDS
    # All but the straggler wait for it, but where nothing is bounded.
    idle = {bound: o.pace.idle_share or 0.0 for bound, o in by_bound.items()}
    waiting = 3 / 4 * (1 - 1 / FACTOR)
    assert waiting - 0.1 < idle["tau 0"] < waiting + 0.2
    assert idle["tau inf"] < idle["tau 2"]
    # Each worker waits for 3 others at most, τ + 1 gradients ahead of it, and they then do for it.
    stale = {bound: o.staleness.max or 0 for bound, o in by_bound.items()}
    assert stale["tau 0"] <= 3
    assert stale["tau 2"] <= 3 * (2 * 2 + 1)
    assert stale["tau 0"] < stale["tau inf"]
    page = next(tmp_path.rglob("report.html")).read_text()
    assert 'id="against-consistency"' in page


@pytest.mark.cluster
def test_more_workers_than_cores_compute_without_them(tmp_path: Path) -> None:
    section = "{{workers: {}, updates: {}, compute_seconds: 0.05, workers_per_node: 2}}"
    axis = f"{{1 worker: {section.format(1, 20)}, 4 workers: {section.format(4, 80)}}}"
    found = run(tmp_path, SCALING, f"axes={{training: {axis}}}", "seeds=[0]")
    alone, together = sorted(found, key=lambda outcome: outcome.pace.pushed)
    record = record_of(tmp_path, together)
    places = Counter(joined.node for joined in record.of(WorkerJoined))
    assert places == {"worker-0": 2, "worker-1": 2}
    assert (together.pace.together or 0) > 2 * (alone.pace.together or 0)
    # The time of a gradient is not that of a core: most of it is slept.
    taken = sum(seconds for *_, seconds in computing(record))
    used: defaultdict[int, list[float]] = defaultdict(list)
    for sample in record.of(ResourceSampled):
        if sample.role == "worker":
            used[sample.pid].append(sample.cpu_seconds)
    assert len(used) == 2
    assert taken >= 4 * 19 * 0.05
    assert sum(max(seen) - min(seen) for seen in used.values()) < taken / 2


@pytest.mark.cluster
def test_all_workers_of_a_lost_node_go_on_where_one_takes_its_place(tmp_path: Path) -> None:
    (outcome,) = run(
        tmp_path,
        SCALING,
        "axes={}",
        "comparison={}",
        "seeds=[0]",
        "training={workers: 4, updates: 160, compute_seconds: 0.03, workers_per_node: 2}",
        "faults=[{kind: kill, target: worker-1, at_updates: 40, back_after: 0.0}]",
    )
    assert (outcome.status, outcome.reason) == ("valid", "")
    record = record_of(tmp_path, outcome)
    assert [event.gone for event in record.of(Killed)] == [True]
    again = Counter(j.node for j in record.of(WorkerJoined) if j.incarnation > 1)
    assert again == {"worker-1-b": 2}
    for audited in record.of(Audited):
        assert 160 <= audited.version <= 164  # what was under way when the node died
        assert max(audited.applied.values()) - min(audited.applied.values()) <= 2
