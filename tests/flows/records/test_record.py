"""Records: what is written comes back, and what was cut short is noticed."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from zlib import crc32

import pytest

from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import CheckpointFailed, Evaluated, FaultMissed, Reported, to_json
from dps.recovery.files import sealed
from flows.records.events import DashboardServed, TrialEnded
from flows.records.record import (
    EVENTS_FILE,
    EventWriter,
    RecordDamaged,
    _event,
    end_record,
    event_files,
    read_end,
    read_record,
    read_trial,
    without_secrets,
    write_grid,
)
from tests.support.synthetic import toy_events, write_events


def test_every_event_comes_back_as_it_was_written(tmp_path: Path) -> None:
    events = toy_events("stateless")
    path = write_events(tmp_path, events)
    record = read_record(path)
    assert sorted(record.events, key=repr) == sorted(events, key=repr)
    assert not record.torn


def test_of_two_ends_the_last_one_counts(tmp_path: Path) -> None:
    """A trial may be told to have failed after it has written its end."""
    path = write_events(tmp_path, toy_events("none", "no fault"))
    end_record(path, TrialEnded(99.0, "failed", "it did not go away"))
    assert read_trial(path).ended == TrialEnded(99.0, "failed", "it did not go away")
    assert read_end(path) == read_trial(path).ended


def test_events_are_on_disk_before_the_writer_is_closed(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events.jsonl") as write:
        write(Evaluated(1.0, 2.0, 0.5, 0.9))
        assert read_record(tmp_path / "events.jsonl").events == (Evaluated(1.0, 2.0, 0.5, 0.9),)


def test_texts_of_events_show_no_password() -> None:
    why = "OSError: ftp://ann:pa55word@host/a is away"
    for event in (
        CheckpointFailed(1.0, 0, 1, why),
        FaultMissed(1.0, 0, "server-0", why),
        TrialEnded(1.0, "failed", why),
        DashboardServed(1.0, "http://host:8787/status?token=pa55word"),
    ):
        shown = to_json(without_secrets(event))
        assert "pa55word" not in shown
        assert "***" in shown
    said = Evaluated(1.0, 2.0, 0.5, 0.9)
    assert without_secrets(said) == said


def test_events_written_from_many_threads_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as write:

        def report(worker: int) -> None:
            for step in range(200):
                write(Reported(1.0, f"worker-{worker}", 1, "loss", (1.0,), (step,), (0.5,)))

        threads = [threading.Thread(target=report, args=(worker,)) for worker in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    reports = read_record(path).of(Reported)
    for worker in range(4):
        steps = [step for r in reports if r.worker == f"worker-{worker}" for step in r.steps]
        assert steps == list(range(200))


@pytest.mark.parametrize("kept", [1, -1, None])
def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path, kept: int | None) -> None:
    path = tmp_path / "events.jsonl"
    whole, cut = to_json(Evaluated(1.0, 2.0, 0.5, 0.9)), to_json(TrialEnded(1.0, "valid", ""))
    path.write_text(f"{sealed(whole)}\n{cut[:kept]}")
    record = read_record(path)
    assert record.torn
    assert len(record.events) == 1
    assert record.ended is None


def test_a_line_ends_with_the_checksum_of_what_is_before_it(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events.jsonl") as write:
        write(Evaluated(1.0, 2.0, 0.5, 0.9))
    line = (tmp_path / "events.jsonl").read_text()
    said = '{"event":"Evaluated","t":1.0,"updates":2.0,"loss":0.5,"accuracy":0.9'
    said += ',"objective":null,"stationarity":null'
    assert line == f'{said},"crc":"{crc32(f"{said}}}".encode()):08x}"}}\n'
    assert json.loads(line)["accuracy"] == 0.9


def test_a_flipped_bit_anywhere_in_a_line_is_found(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as write:
        for accuracy in (0.1, 0.9583, 0.2):
            write(Evaluated(1.0, 2.0, 0.5, accuracy))
    first, line, last = path.read_bytes().splitlines(keepends=True)
    for at in range(len(line)):
        struck = line[:at] + bytes([line[at] ^ 1 << at % 8]) + line[at + 1 :]
        path.write_bytes(first + struck + last)
        with pytest.raises(RecordDamaged, match=r"events\.jsonl, line [23] "):
            read_record(path)


@pytest.mark.parametrize("line", ['{"event":"Unheard"}', '{"event":"TrialEnded"}'])
def test_an_event_of_another_version_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{sealed(to_json(TrialEnded(1.0, 'valid', '')))}\n{sealed(line)}\n")
    with pytest.raises(ConfigurationError, match=r"events\.jsonl, line 2 is not an event"):
        read_record(path)


def test_a_record_that_does_not_begin_as_that_of_a_trial_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as write:
        write(TrialEnded(1.0, "valid", ""))
        write(TrialEnded(2.0, "valid", ""))
    with pytest.raises(RecordDamaged, match="line 1 is TrialEnded, expected the start of a trial"):
        read_trial(path)


def test_a_record_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        EventWriter(tmp_path / "file" / "events.jsonl")


def test_trials_of_an_earlier_configuration_are_not_read(tmp_path: Path) -> None:
    for name in ("old.seed-0", "new.seed-0"):
        with EventWriter(tmp_path / name / EVENTS_FILE):
            pass
    write_grid(tmp_path, ["new.seed-0"], order_seed=0)
    assert [path.parent.name for path in event_files(tmp_path)] == ["new.seed-0"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "JSONDecodeError"),
        ("[]", "KeyError"),
        ('{"event":"Unheard","t":1}', "Unheard"),
        ('{"event":"NodeLeft","t":1}', "missing 1 required"),
        ('{"event":"NodeLeft","t":1,"node":"a","crc":"0"}', "unexpected keyword argument 'crc'"),
    ],
)
def test_a_line_of_another_version_is_refused_with_the_reason(line: str, why: str) -> None:
    with pytest.raises(RecordDamaged, match=why):
        _event(Path("events.jsonl"), 3, line.encode())
