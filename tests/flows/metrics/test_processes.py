"""Which process a sample, a start and a death belong to, whatever its pid is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dps.events import Event, Killed, NodeJoined, NodeLeft, ResourceSampled
from flows.metrics.outcome import outcome
from flows.metrics.prices import load_prices
from flows.metrics.processes import deaths, joins, node_spans, process_of
from flows.records.record import Record
from tests.support.synthetic import toy_events


@pytest.mark.parametrize("strategy", ["chain", "stateless"])
def test_no_figure_depends_on_pids(strategy: str) -> None:
    """Containers share pids: every process may be number 1."""
    events = toy_events(strategy)
    records = [Record(tuple(events)), Record(tuple(map(_as_in_a_container, events)))]
    outcomes = [outcome(record, load_prices()) for record in records]
    assert outcomes[0].row() == outcomes[1].row()
    assert node_spans(records[0]) == node_spans(records[1])


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
