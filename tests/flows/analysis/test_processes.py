"""Which process a sample, a start and a death belong to, whatever its pid is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dps.events import (
    Acked,
    Event,
    Killed,
    NodeJoined,
    NodeLeft,
    ResourceSampled,
    TrainingStarted,
)
from flows.analysis.outcome import outcome
from flows.analysis.prices import load_prices
from flows.analysis.processes import deaths, joins, process_of
from flows.analysis.resources import Spending, busiest, cores_used, node_seconds
from flows.analysis.system_metrics import system_metrics
from flows.records.record import Record
from flows.report.figures import timeline
from flows.report.figures.curves import MEMORY_BY_TIME
from flows.report.figures.dataset import Subject
from tests.support.records import PRICES
from tests.support.synthetic import toy_events

DISTINCT, SHARED = (1, 2, 3, 4), (1, 1, 1, 1)
MEMORY = "system_memory_usage_megabytes"


def four_nodes(pids: tuple[int, ...]) -> Record:
    """Return a training of 100 s on four nodes, of which worker-1 is killed after 10 s."""
    nodes = ("server-0", "worker-0", "worker-1", "evaluator-0")
    joined = [
        NodeJoined(0.0, node, node.partition("-")[0], pid, f"host-{node}")
        for node, pid in zip(nodes, pids, strict=True)
    ]
    samples = [
        ResourceSampled(t, e.node, e.role, e.pid, 0.5 * t, 100, {}, {}, 0, e.host)
        for t in (1.0, 9.0, 99.0)
        for e in joined
        if t < 10.0 or e.node != "worker-1"
    ]
    return Record(
        (
            *joined,
            TrainingStarted(0.0, 2, 1, 100),
            *samples,
            Killed(10.0, 0, "worker-1", pids[2], 5, True),
            Acked(100.0, "worker-0", 1, (100.0,), (0,), (1,), (1,), ("applied",)),
        )
    )


@pytest.mark.parametrize("pids", [DISTINCT, SHARED])
def test_a_killed_node_costs_nothing_more_and_others_go_on_costing(pids: tuple[int, ...]) -> None:
    record = four_nodes(pids)
    assert node_seconds(record) == {"server": 100.0, "worker": 110.0, "evaluator": 100.0}
    dollars = outcome(record, PRICES).cost.nodes  # a node costs a dollar a second
    assert dollars == pytest.approx(310.0)
    assert Spending(record, PRICES).at(50.0) == pytest.approx(10 + 3 * 50)
    assert cores_used(record) == pytest.approx(4 * 0.5)
    assert busiest(record) == pytest.approx(0.5)
    living = [p.value for p in system_metrics(record) if p.name == "system/" + MEMORY]
    assert living == pytest.approx([400e-6, 400e-6, 300e-6])


@pytest.mark.parametrize("strategy", ["chain", "stateless"])
def test_no_figure_depends_on_pids(strategy: str) -> None:
    """Containers share pids: every process may be number 1."""
    events = toy_events(strategy)
    records = [Record(tuple(events)), Record(tuple(map(_as_in_a_container, events)))]
    outcomes = [outcome(record, load_prices()) for record in records]
    assert outcomes[0].row() == outcomes[1].row()
    metrics = [list(system_metrics(record)) for record in records]
    assert metrics[0] == metrics[1]
    trials = list(zip(records, outcomes, strict=True))
    assert MEMORY_BY_TIME.points(trials[0]) == MEMORY_BY_TIME.points(trials[1])
    stories = [timeline.story(s := Subject.of([trial]), s.groups[0]) for trial in trials]
    tables = [story.table for story in stories if story is not None]
    assert len(tables) == 2
    assert tables[0] == tables[1]


def _as_in_a_container(event: Event) -> Event:
    if isinstance(event, NodeJoined | ResourceSampled | Killed):
        return replace(event, pid=1)
    return event


def test_a_node_that_comes_back_under_its_name_is_another_process() -> None:
    first = NodeJoined(1.0, "worker-0", "worker", 1, "pod", started=0.5)
    again = NodeJoined(30.0, "worker-0", "worker", 1, "pod", started=29.5)
    killed = Killed(20.0, 0, "worker-0", 1, 5, True)
    record = Record((first, replace(first, t=5.0), again, killed))  # it worked twice at first
    assert joins(record) == {process_of(first): first, process_of(again): again}
    assert deaths(record) == {process_of(first): 20.0}


@pytest.mark.parametrize(
    ("end", "died"),
    [
        (None, 30.0),  # at the latest when the next process of that name is there
        (NodeLeft(25.0, "worker-0"), 25.0),
        (Killed(25.0, 0, "worker-0", 7, 5, True), 25.0),
        (Killed(0.5, 0, "worker-0", 7, 5, True), 0.5),  # by another host's clock
        (Killed(25.0, 0, "worker-0", 8, 5, True), 30.0),
        (Killed(25.0, 0, "worker-1", 7, 5, True), 30.0),
    ],
)
def test_how_a_process_ends(end: Event | None, died: float) -> None:
    first = NodeJoined(1.0, "worker-0", "worker", 7, "h", started=0.5)
    again = NodeJoined(30.0, "worker-0", "worker", 9, "h", started=29.5)
    record = Record((first, again, *([end] if end else [])))
    assert deaths(record) == {process_of(first): died}
