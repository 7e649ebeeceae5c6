"""`dps simulate`: many schedules, one again, and errors for people."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dps.errors import ConfigurationError
from dps.sim.draw import named
from dps.sim.mutants import VARIANTS, in_place
from dps.sim.shrink import shrink
from dps.sim.simulate import simulate
from flows.cli import app


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    return result.exit_code, result.output


def test_schedules_are_counted() -> None:
    code, output = run("--schedules", "5")
    assert code == 0
    assert "5 schedules" in output
    assert "0 violations" in output


def test_a_replay_prints_faults_and_trace_and_is_the_same_again() -> None:
    code, output = run("--replay", "chain(2):3:0,1:calm")
    assert code == 0
    assert "No promise is broken" in output
    assert "EnterWorker" in output
    assert (code, output) == run("--replay", "chain(2):3:0,1:calm")


@pytest.mark.parametrize("name", ["chain(2", "chain(2):x", "chain(2):1:99", "chain(2)"])
def test_a_schedule_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError):
        named(name)


def test_a_violation_is_shrunk_to_what_it_takes_and_replays() -> None:
    with in_place(VARIANTS["mailbox left"]):
        record = simulate(named("stateless:0"))
        assert record.violation is not None
        less = shrink(record)
        assert len(less.schedule.faults) <= len(record.schedule.faults)
        assert less.violation is not None
        assert less.violation.kind == record.violation.kind
        again = simulate(named(less.schedule.name))
        assert again.trace == less.trace
        assert str(again.violation) == str(less.violation)
    assert simulate(named(less.schedule.name)).violation is None
