"""Whether the machine was quiet: load averages of trials, and how far controls differ in pace."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from flows.metrics.outcome import Outcome, outcome
from flows.metrics.prices import load_prices
from flows.records.events import LoadMeasured
from flows.records.record import Record
from flows.report.html import write_report
from flows.report.study import Study
from flows.report.terminal import print_study
from flows.statistics.caveats import spread_of_pace, unquiet
from tests.support.records import with_values
from tests.support.synthetic import toy_events, write_events

PRICES = load_prices()
TOY = toy_events("none", "no fault")  # on five nodes


def trial(seed: int = 0, pace: float = 100.0, loads: tuple[float, ...] = (0.5, 1.0)) -> Outcome:
    """Return a control with this pace, on two cores with these load averages."""
    measured = [LoadMeasured(event.t, load, 2) for event, load in zip(TOY, loads, strict=False)]
    found = outcome(Record((*TOY[:-1], *measured, TOY[-1])), PRICES)
    identity = replace(found.identity, seed=seed)
    return with_values(replace(found, identity=identity), gradients_together=pace)


@pytest.mark.parametrize(("loads", "quiet"), [((0.5, 7.0), True), ((9.4, 1.0), False), ((), True)])
def test_a_load_of_more_than_a_trial_and_its_cores_is_none_of_a_quiet_machine(
    loads: tuple[float, ...], quiet: bool
) -> None:
    """The nodes of the trial, the scheduler and the driver are seven processes."""
    said = unquiet([trial(loads=loads)])
    assert (said == "") == quiet
    assert quiet or "at a load average of up to 9" in said


def test_controls_that_differ_in_pace_speak_of_a_busy_machine() -> None:
    even = [trial(seed, pace) for seed, pace in enumerate((98.0, 100.0, 102.0))]
    uneven = [trial(seed, pace) for seed, pace in enumerate((80.0, 100.0, 120.0))]
    assert spread_of_pace(even) == pytest.approx(0.02)
    assert unquiet(even) == ""
    assert spread_of_pace(uneven) == pytest.approx(0.2)
    assert "the pace of trials without faults varied by 20% between seeds" in unquiet(uneven)
    assert spread_of_pace(uneven[:1]) is None
    assert unquiet([replace(each, virtual="laptop") for each in uneven]) == ""
    assert unquiet([replace(each, status="invalid") for each in uneven]) == ""


def test_it_is_said_beside_times_and_money(tmp_path: Path) -> None:
    busy = [trial(seed, pace) for seed, pace in enumerate((80.0, 100.0, 120.0))]
    console = Console(file=io.StringIO(), width=160)
    print_study(Study(tuple(busy)), None, console)
    assert isinstance(console.file, io.StringIO)
    assert "The machine was not quiet: " in console.file.getvalue()
    measured = LoadMeasured(TOY[-2].t, 30.0, 2)
    write_events(tmp_path / "none.no-fault.seed-0", [*TOY[:-1], measured, TOY[-1]])
    page = write_report(tmp_path, tmp_path / "report.html").read_text()
    assert "The machine was not quiet: 1 of 1 trials wanted more cores than there are" in page
