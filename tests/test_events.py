"""Events: every kind of record comes back from its line of JSON as it was."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings

from dps import events
from dps.events import Event, Reported, from_dict, to_dict, to_json
from dps.events.reading import LARGEST, NotAnEvent, from_line
from tests.support.records import acked, applied
from tests.support.strategies import records

KINDS = [
    cls
    for cls in vars(events).values()
    if isinstance(cls, type) and issubclass(cls, Event) and cls is not Event
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


@pytest.mark.parametrize("record", [{"event": "Unheard", "t": 1.0}, {"t": 1.0}])
def test_an_unknown_kind_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(KeyError):
        from_dict(record)


def test_a_record_that_lacks_a_field_is_refused() -> None:
    with pytest.raises(TypeError, match="missing"):
        from_dict({"event": "Reported", "t": 1.0})


def test_reading_a_record_leaves_it_as_it_is() -> None:
    record = to_dict(Reported(1.5, "worker-0", 1, "loss", (), (), ()))
    before = dict(record)
    from_dict(record)
    assert record == before


# -- what a file holds -------------------------------------------------------------------------


def names(kind: type[Event]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


FIELDS = [(kind, name) for kind in KINDS for name in names(kind)]
STARTED = events.TrialStarted(1.0, "t", {"labels": {"a": "b"}, "seed": 10**40}, {"dps": "0.1.0"})
REAL: dict[type[Event], Event] = {
    events.Applied: applied([1, 2]),
    events.Acked: acked([1, 2]),
    events.TrialStarted: STARTED,
    events.TrialEnded: events.TrialEnded(1.0, "failed", "«x»"),
}
VALUES = {"float": 1.5, "int": 7, "str": "x", "bool": True, "int | None": None, "float | None": 0.5}
VALUES |= {"dict[str, int]": {"train": 3}, "dict[str, str]": {}, "tuple[float, ...]": (1.0, 2.5)}
VALUES |= {"tuple[int, ...]": (1, 2), "tuple[str, ...]": ("a", "b"), "tuple[bool, ...]": ()}


def real(kind: type[Event]) -> Event:
    """An event such as a run may write."""
    types = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    own = {"role": "server"}
    return REAL.get(kind) or kind(**{n: own.get(n) or VALUES[said] for n, said in types.items()})


@pytest.mark.parametrize("kind", KINDS, ids=lambda cls: cls.__name__)
def test_every_kind_of_event_comes_back_from_its_line(kind: type[Event]) -> None:
    assert from_line(to_json(real(kind))) == real(kind)


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda each: getattr(each, "__name__", each))
def test_no_value_of_another_type_is_read(kind: type[Event], name: str) -> None:
    said = to_dict(real(kind))
    for odd in ([["worker-0"]], [1, None], 10**400, "\ud800", {"a": []}, {"a": 10**400}):
        if name == "settings" and odd == {"a": []}:
            continue  # what is in them is judged by who reads them
        with pytest.raises(NotAnEvent):
            from_line(json.dumps({**said, name: odd}))


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", r"it is \[\], expected an object"),
        ('{"event":["Applied"]}', r"there is no event \['Applied'\]"),
        ('{"event":"Unheard","t":1}', "there is no event 'Unheard'"),
        ('{"event":"NodeLeft","t":1}', "NodeLeft lacks node"),
        ('{"event":"NodeLeft","t":1,"node":"a","crc":"0"}', "NodeLeft has no 'crc'"),
        (
            '{"event":"NodeLeft","t":true,"node":"a"}',
            "t of NodeLeft is True, expected float or int",
        ),
        (
            '{"event":"NodeLeft","t":NaN,"node":"a"}',
            "t of NodeLeft is nan, expected a number from 0",
        ),
        ('{"event":"NodeLeft","t":1e300,"node":"a"}', "t of NodeLeft is 1e\\+300"),
        ('{"event":"NodeLeft","t":1,"node":["a"]}', r"node of NodeLeft is \['a'\], expected str"),
        ('{"event":"TrialEnded","t":1,"status":"valie","reason":""}', "expected valid or invalid"),
        (to_json(applied([1, 2])).replace("[1,2]", "[1]", 1), "columns of different lengths: 2 ti"),
        (to_json(applied([1, 2])).replace("[1,1]", "[1.1]", 1), "is 1.1, expected int"),
        (to_json(applied([1, 2])).replace("[1,1]", "[1,-1]", 1), "is -1, expected a number from 0"),
        (to_json(acked([1])).replace('"applied"', '"appljed"'), "outcomes of Acked is 'appljed'"),
        (
            '{"event":"NodeJoined","t":1,"node":"a","role":"vm","pid":7,"host":"h"}',
            "role of NodeJoined is 'vm', expected server or replica",
        ),
        (
            to_json(STARTED).replace('"b"', "[" * 50 + "]" * 50),
            "settings of TrialStarted is nested",
        ),
        (to_json(STARTED).replace('"b"', "9" * 4000), "expected a number that is not as large"),
        (
            f'{{"event":"CutTaken","t":1,"cut":{LARGEST + 1},"seconds":1}}',
            "cut of CutTaken is 92233",
        ),
    ],
)
def test_a_line_that_no_run_has_written_is_refused_with_the_reason(line: str, why: str) -> None:
    with pytest.raises(NotAnEvent, match=why) as caught:
        from_line(line)
    assert len(str(caught.value)) < 300


def test_versions_of_reports_are_whole_or_not_there() -> None:
    """The column is empty where no version is known."""
    event = Reported(1.0, "w", 1, "loss", (1.0, 2.0), (1, 2), (0.5, 0.25), (-1, 3))
    line = to_json(event)
    assert from_line(line) == event
    unknown = dataclasses.replace(event, versions=())
    assert from_line(line.replace(',"versions":[-1,3]', "")) == unknown
    assert from_line(to_json(unknown)) == unknown
    for wrong in ("[3]", "[-2,3]", "[0.5,3]", "[1,2,3]"):
        with pytest.raises(NotAnEvent, match="versions"):
            from_line(line.replace("[-1,3]", wrong))


def test_what_the_training_failed_to_compute_is_no_damage() -> None:
    for event in (
        Reported(1.0, "w", 1, "loss", (1.0, 2.0), (1, 2), (float("inf"), -float("inf"))),
        events.Evaluated(1.0, 2.0, float("inf"), 0.5),
    ):
        assert from_line(to_json(event)) == event
