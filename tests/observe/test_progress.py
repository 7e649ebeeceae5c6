"""How far a training is said to be: the rate, the time left, and the line that shows it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dps.observe.progress import Pace, Standing, display, duration
from tests.observe.test_views import Checked

HALF = Standing(500, 1000, 50.0, 10.0, 2, 4, {"loss": 0.25})


def test_a_rate_is_taken_over_the_last_ten_seconds() -> None:
    pace = Pace()
    for second in range(31):  # 100 a second, then 10 a second
        pace.look(float(second), {"a": min(second, 20) * 100 + max(0, second - 20) * 10})
    assert pace.of("a", 30.0, 2100, began=0.0) == pytest.approx(10.0)


def test_the_first_rate_is_since_the_worker_began() -> None:
    pace = Pace()
    pace.look(104.0, {"a": 260})
    assert pace.of("a", 104.0, 260, began=100.0, before=60) == pytest.approx(50.0)


def test_the_rate_of_who_has_pushed_nothing_for_ten_seconds_is_0() -> None:
    pace = Pace()
    for second, count in ((1.0, 0), (2.0, 7), (9.0, 7)):
        pace.look(second, {"a": count})
    assert pace.of("a", 9.0, 7, began=0.0) == pytest.approx(7 / 8)
    pace.look(19.5, {"a": 7})
    assert pace.of("a", 19.5, 7, began=0.0) == 0.0


def test_a_rate_is_never_negative_though_updates_may_be_lost() -> None:
    pace = Pace()
    pace.look(1.0, {"a": 100})
    pace.look(2.0, {"a": 40})
    assert pace.of("a", 2.0, 40, began=0.0) == 0.0


def test_looks_in_quick_succession_take_no_memory_and_change_no_rate() -> None:
    pace = Pace()
    for tick in range(5000):
        pace.look(tick / 1000, {"a": tick})
    assert pace.of("a", 4.999, 4999, began=0.0) == pytest.approx(1000.0, rel=0.01)
    assert len(pace._looks) < 60


def test_the_line_says_how_much_is_left_where_that_is_known() -> None:
    assert HALF.line() == (
        "500 of 1,000 gradients · 50.0/s · 10 s left · 2 of 4 workers running · loss 0.25"
    )
    unknown = Standing(500, None, 50.0, 10.0, 1, 1, {}, lost=3)
    assert unknown.left is None
    assert replace(HALF, running=0).left is None, "nobody computes what is left"
    assert unknown.line() == "500 gradients · 50.0/s · 1 of 1 workers running · 3 updates lost"
    ended = Standing(1000, 1000, 0.0, 62.0, 0, 4, {})
    assert ended.line() == "1,000 of 1,000 gradients · 0.0/s · ended after 1 min 02 s"
    before = Standing(1000, None, 0.0, None, 0, 4, {})
    assert before.line() == "1,000 gradients · 0.0/s · ended"
    assert Standing(0, None, 0.0, None, 0, 0, {}).line().endswith("no worker was started")


def test_html_has_a_bar_as_long_as_what_is_done() -> None:
    found = Checked(HALF.html())
    assert found.text == [HALF.line()]
    assert "width:50.0%" in HALF.html()
    assert "width" not in Standing(5, None, 1.0, 1.0, 1, 1, {}).html().replace("max-width", "")


def test_more_than_was_said_is_not_more_than_all() -> None:
    assert Standing(1200, 1000, 50.0, 10.0, 1, 1, {}).fraction == 1.0
    assert Standing(1200, 1000, 50.0, 10.0, 1, 1, {}).left == 0.0


def test_a_program_without_terminal_prints_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with display() as show:
        show(HALF)
    assert HALF.line() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (3725.0, "1 h 02 min"), (None, "?")]
)
def test_durations_are_those_people_say(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said
