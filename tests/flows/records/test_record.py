"""Records: what is written comes back, and what was cut short is noticed."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from zlib import crc32

import pytest

from dps.core.checksum import unsealed
from dps.errors import ConfigurationError, RecordDamaged, StoreUnavailable
from dps.events import (
    CheckpointFailed,
    DashboardServed,
    Evaluated,
    Event,
    FaultMissed,
    Reported,
    TrialEnded,
    TrialStarted,
    to_json,
)
from flows.config.limits import LONGEST_KEY
from flows.records.log import LOG_FILE, TrialLog
from flows.records.record import (
    EVENTS_FILE,
    GRID_FILE,
    RESERVE_FILE,
    EventWriter,
    end_record,
    event_files,
    read_configuration,
    read_end,
    read_record,
    read_start,
    read_trial,
    trial_names,
    without_secrets,
    write_configuration,
    write_grid,
)
from tests.support.synthetic import toy_events, write_events


def test_every_event_comes_back_as_it_was_written(tmp_path: Path) -> None:
    events = toy_events("stateless")
    path = write_events(tmp_path, events)
    record = read_record(path)
    assert sorted(record.events, key=repr) == sorted(events, key=repr)
    assert not record.torn


def test_start_and_end_are_found(tmp_path: Path) -> None:
    record = read_record(write_events(tmp_path, toy_events("none", "no fault")))
    assert record.started is not None
    assert record.started.trial == "none.no-fault.seed-0"
    assert record.ended is not None
    assert record.ended.status == "valid"
    assert {type(event) for event in record.of(Evaluated)} == {Evaluated}


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
    assert without_secrets(said) is said


def test_events_that_come_too_late_are_left_out(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events.jsonl") as write:
        write(TrialEnded(1.0, "valid", ""))
    write(Evaluated(2.0, 2.0, 0.5, 0.9))
    assert read_record(tmp_path / "events.jsonl").events == (TrialEnded(1.0, "valid", ""),)


def test_an_older_record_is_replaced(tmp_path: Path) -> None:
    path = write_events(tmp_path, toy_events())
    with EventWriter(path) as write:
        write(TrialEnded(1.0, "failed", "again"))
    assert read_record(path).events == (TrialEnded(1.0, "failed", "again"),)


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


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_last_line_that_was_cut_short_is_left_out(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "events.jsonl"
    whole, cut = to_json(Evaluated(1.0, 2.0, 0.5, 0.9)), to_json(TrialEnded(1.0, "valid", ""))
    path.write_text(f"{whole}\n{cut[:kept]}")
    record = read_record(path)
    assert record.torn
    assert len(record.events) == 1
    assert record.ended is None


def test_a_complete_last_line_without_its_newline_counts_as_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(to_json(TrialEnded(1.0, "valid", "")))
    assert read_record(path).torn


def test_a_writer_that_is_closed_leaves_the_record_alone(tmp_path: Path) -> None:
    with EventWriter(tmp_path / EVENTS_FILE) as write:
        write(TrialEnded(1.0, "valid", ""))
        assert (tmp_path / RESERVE_FILE).exists()
    assert [path.name for path in tmp_path.iterdir()] == [EVENTS_FILE]


def test_no_configuration_is_kept_of_a_run_that_nobody_wrote_one_for(tmp_path: Path) -> None:
    for written in ("experiment: demo\n", ""):
        write_configuration(tmp_path, written)
        assert read_configuration(tmp_path) == written


def test_a_start_without_its_newline_is_none_yet(tmp_path: Path) -> None:
    path = write_events(tmp_path, toy_events())
    path.write_bytes(path.read_bytes().partition(b"\n")[0])
    assert read_start(path) is None


def test_a_line_ends_with_the_checksum_of_what_is_before_it(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "events.jsonl") as write:
        write(Evaluated(1.0, 2.0, 0.5, 0.9))
    line = (tmp_path / "events.jsonl").read_text()
    said = '{"event":"Evaluated","t":1.0,"updates":2.0,"loss":0.5,"accuracy":0.9'
    said += ',"objective":null,"stationarity":null'
    assert line == f'{said},"crc":"{crc32(f"{said}}}".encode()):08x}"}}\n'
    assert json.loads(line)["accuracy"] == 0.9


def test_every_flipped_bit_of_a_line_is_found(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as write:
        for accuracy in (0.1, 0.9583, 0.2):
            write(Evaluated(1.0, 2.0, 0.5, accuracy))
    first, line, last = path.read_bytes().splitlines(keepends=True)
    for at in range(len(line)):
        for bit in range(8):
            struck = line[:at] + bytes([line[at] ^ 1 << bit]) + line[at + 1 :]
            path.write_bytes(first + struck + last)
            with pytest.raises(RecordDamaged, match=r"events\.jsonl, line [23] "):
                read_record(path)


def test_checksums_are_in_all_lines_or_in_none(tmp_path: Path) -> None:
    path = write_events(tmp_path, toy_events())
    whole = path.read_bytes()
    lines = [unsealed(line)[0] for line in whole.splitlines()]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    assert len(read_trial(path).events) == len(lines), "as records were before"
    sealed, *_ = whole.splitlines()
    path.write_bytes(b"".join(line + b"\n" for line in [sealed, *lines[1:]]))
    with pytest.raises(RecordDamaged, match="line 2 is without the checksum that the lines before"):
        read_trial(path)


def test_what_is_no_text_is_written_as_marks(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as write:
        write(TrialEnded(1.0, "failed", "no file 'a\udcff' 😀"))
    assert read_record(path).events == (TrialEnded(1.0, "failed", "no file 'a?' 😀"),)


@pytest.mark.parametrize("line", ["{", "[]", '{"event":"Unheard"}', '{"event":"TrialEnded"}', ""])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{to_json(TrialEnded(1.0, 'valid', ''))}\n{line}\n")
    with pytest.raises(ConfigurationError, match=r"events\.jsonl, line 2 is not an event"):
        read_record(path)


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (TrialEnded(1.0, "valid", ""), "line 1 is not the start of a trial, but TrialEnded"),
        (
            TrialStarted(1.0, "a", {"config": {"training": {"workers": "two"}}}, {}),
            "line 1 has 'two' as config.training.workers, not of type int",
        ),
        (TrialStarted(1.0, "a", {"labels": []}, {}), "has \\[\\] as labels, not of type dict"),
        (TrialStarted(1.0, "a", {"labels": {"x": 3}}, {}), "has 3 as labels.x, not of type str"),
        (TrialStarted(1.0, "a", {"trial": "\x1b[2J"}, {}), "as trial, which cannot be printed"),
        (TrialStarted(1.0, "a", {"seed": True}, {}), "has True as seed, not of type int"),
        (
            TrialStarted(1.0, "a", {"experiment": "x" * 501}, {}),
            "xxx' as experiment, expected 500 characters at most",
        ),
        (
            TrialStarted(1.0, "a", {"config": {"cluster": []}}, {}),
            r"has \[\] as config.cluster, not of type dict",
        ),
        (
            TrialStarted(1.0, "a", {"config": {"faults": [{}, {"kind": None}]}}, {}),
            "has None as config.faults.1.kind, not of type str",
        ),
        (
            TrialStarted(1.0, "a", {"config": {"evaluation": {"metric": 0.1}}}, {}),
            "has 0.1 as config.evaluation.metric, not of type str",
        ),
        (
            TrialStarted(1.0, "a", {"config": {"evaluation": {"metric": "acc"}}}, {}),
            "has 'acc' as config.evaluation.metric, expected one of accuracy, auc, ",
        ),
        (
            TrialStarted(1.0, "a", {"config": {"evaluation": {"objective": 3}}}, {}),
            "has 3 as config.evaluation.objective, not of type dict",
        ),
    ],
)
def test_a_record_that_does_not_begin_as_that_of_a_trial_is_damaged(
    tmp_path: Path, first: Event, why: str
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(f"{to_json(first)}\n{to_json(TrialEnded(2.0, 'valid', ''))}\n")
    with pytest.raises(RecordDamaged, match=why):
        read_trial(path)


@pytest.mark.parametrize(
    "label",
    [
        *("0.1\u00a0and more", "日本\u3000語", "two\nlines\tand a tab"),
        pytest.param("x" * LONGEST_KEY, id="as long as one may be"),
    ],
)
def test_a_label_that_a_configuration_may_have_does_no_damage(tmp_path: Path, label: str) -> None:
    with EventWriter(tmp_path / "events.jsonl") as write:
        write(TrialStarted(1.0, "a", {"labels": {"optimizer": label}}, {}))
    started = read_trial(tmp_path / "events.jsonl").started
    assert started is not None
    assert started.settings["labels"] == {"optimizer": label}


def test_a_record_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.jsonl: no events to read"):
        read_record(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize("place", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path)])
def test_a_record_that_is_no_file_is_damaged_and_not_waited_for(
    tmp_path: Path, place: Callable[[Path], object]
) -> None:
    path = tmp_path / "events.jsonl"
    place(path)
    for read in (read_record, read_trial, read_start, read_end):
        with pytest.raises(RecordDamaged, match="no events to read"):
            read(path)


def test_a_record_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailable, match="cannot be written"):
        EventWriter(tmp_path / "file" / "events.jsonl")


def test_a_record_is_not_written_through_a_link(tmp_path: Path) -> None:
    """Whoever may write to the results folder must not choose what is overwritten."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / EVENTS_FILE).write_text("mine")
    (tmp_path / "linked").symlink_to(mine)
    with pytest.raises(StoreUnavailable, match="its folder is a link"):
        EventWriter(tmp_path / "linked" / EVENTS_FILE)
    for name in (RESERVE_FILE, EVENTS_FILE):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).symlink_to(mine / EVENTS_FILE)
        with pytest.raises(StoreUnavailable, match="cannot be written"):
            EventWriter(folder / EVENTS_FILE)
    assert (mine / EVENTS_FILE).read_text() == "mine"
    assert [path.name for path in mine.iterdir()] == [EVENTS_FILE]


def test_a_log_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / LOG_FILE).symlink_to(tmp_path / "mine")
    with pytest.raises(StoreUnavailable, match="the log cannot be written"):
        TrialLog(tmp_path / LOG_FILE, {})
    assert (tmp_path / "mine").read_text() == "mine"


def test_trials_of_an_earlier_configuration_are_not_read(tmp_path: Path) -> None:
    for name in ("old.seed-0", "new.seed-0"):
        with EventWriter(tmp_path / name / EVENTS_FILE):
            pass
    write_grid(tmp_path, ["new.seed-0"], order_seed=0)
    assert [path.parent.name for path in event_files(tmp_path)] == ["new.seed-0"]


LISTS = [
    *(b"", b'{"trials": ["a', b"[]", b"{}", b'{"trials": 3}', b"\xff", b"[" * 100_000),
    *(b'{"trials": "ab"}', b'{"trials": [3]}', b'{"trials": [["a"]]}', b'{"trials": ["../a"]}'),
    *(b'{"trials": [".."]}', b'{"trials": ["a\\u0000"]}', b'{"trials": ["\\ud800"]}'),
    b'{"trials": ["a"],"crc":"00000000"}',
]


@pytest.mark.parametrize("text", LISTS)
def test_a_damaged_list_of_trials_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / GRID_FILE).write_bytes(text)
    with pytest.raises(ConfigurationError, match=r"grid\.json does not name .* Run the experiment"):
        event_files(tmp_path)


def test_every_flipped_bit_of_a_list_of_trials_is_found(tmp_path: Path) -> None:
    write_grid(tmp_path, ["chain.seed-0", "none.seed-0"], order_seed=3)
    path = tmp_path / GRID_FILE
    whole = path.read_bytes()
    for at, bit in product(range(len(whole)), range(8)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        with pytest.raises(ConfigurationError, match=r"grid\.json does not name"):
            trial_names(tmp_path)
