"""Events: every kind of record comes back from its line of JSON as it was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from dps import events
from dps.events import Event, Reported, from_dict, to_dict, to_json
from flows.records import events as trial_events
from tests.support.strategies import records

KINDS = [
    cls
    for cls in {**vars(events), **vars(trial_events)}.values()
    if isinstance(cls, type) and issubclass(cls, Event) and not cls.__subclasses__()
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda cls: cls.__name__)
def test_every_kind_of_event_comes_back_from_one_line_of_json(kind: type[Event]) -> None:
    @given(records(kind))
    @settings(max_examples=15)
    def check(event: Event) -> None:
        line = to_json(event)
        assert "\n" not in line
        back = from_dict(json.loads(line))
        assert type(back) is kind
        assert back == event
        assert from_dict(to_dict(event)) == event

    check()


def test_every_kind_of_event_can_be_read_by_its_name() -> None:
    assert len(KINDS) > 20
    assert Event.kinds == {cls.__name__: cls for cls in KINDS}


def test_an_event_is_one_flat_object_with_its_kind() -> None:
    event = Reported(1.5, "worker-0", 1, "loss", (1.25,), (3,), (0.25,))
    assert json.loads(to_json(event)) == {
        "event": "Reported",
        "t": 1.5,
        "worker": "worker-0",
        "incarnation": 1,
        "name": "loss",
        "times": [1.25],
        "steps": [3],
        "values": [0.25],
        "versions": [],
    }


def test_values_that_a_training_failed_to_compute_are_kept() -> None:
    for event in (
        Reported(1.0, "w", 1, "loss", (1.0, 2.0), (1, 2), (float("inf"), -float("inf"))),
        events.Evaluated(1.0, 2.0, float("inf"), 0.5),
    ):
        assert from_dict(json.loads(to_json(event))) == event
