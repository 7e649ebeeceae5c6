"""`python -m tests.simulator`: many schedules, one again, and error messages."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dps.errors import ConfigurationError
from tests.simulator.__main__ import app
from tests.simulator.broken.variants import VARIANTS
from tests.simulator.patches import patched
from tests.simulator.schedules.draw import named
from tests.simulator.simulate import shrink, simulate


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_violation_is_shrunk_to_what_it_takes_and_replays() -> None:
    with patched(*VARIANTS["mailbox left"].patches):
        record = simulate(named("stateless:1"))
        assert record.violation is not None
        less = shrink(record)
        assert len(less.schedule.faults) <= len(record.schedule.faults)
        assert less.violation is not None
        assert less.violation.kind == record.violation.kind
        again = simulate(named(less.schedule.name))
        assert again.trace == less.trace
        assert str(again.violation) == str(less.violation)
    assert simulate(named(less.schedule.name)).violation is None


@pytest.mark.slow
def test_a_fresh_series_is_that_of_a_commit_and_says_how_to_repeat_it() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    code, output = run("--fresh", commit, "--schedules", "2")
    assert code == 0
    assert "make simulate SCHEDULES=2 SEED=19088743" in output
    assert "2 schedules in" in output


@pytest.mark.parametrize("commit", ["", "HEAD", "0123"])
def test_a_commit_is_a_hash(commit: str) -> None:
    with pytest.raises(ConfigurationError, match="expected the hash of a commit"):
        CliRunner().invoke(app, ["--fresh", commit], catch_exceptions=False)
