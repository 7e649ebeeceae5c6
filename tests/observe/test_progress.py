"""How far a training is said to be: the rate, the time left, and the line that shows it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dps.observe.views import Listing, Pace, TrainingView, WorkerView, display

WORKERS = Listing(
    [WorkerView(f"worker-{n}", "running", 250, 250, 25.0, {"loss": 0.25}) for n in range(2)]
    + [WorkerView(f"worker-{n}", "finished", 0, None, None) for n in (2, 3)]
)
HALF = TrainingView("t", "running", 10.0, 500, 1000, workers=WORKERS)
ENDED = replace(HALF, done=1000, workers=Listing(WORKERS[2:]), seconds=62.0)


def test_a_rate_is_taken_over_the_last_ten_seconds() -> None:
    pace = Pace()
    for second in range(31):  # 100 a second, then 10 a second
        pace.look(float(second), {"a": min(second, 20) * 100 + max(0, second - 20) * 10})
    assert pace.of("a", 30.0, 2100, began=0.0) == pytest.approx(10.0)


def test_the_rate_of_who_has_pushed_nothing_for_ten_seconds_is_0() -> None:
    pace = Pace()
    for second, count in ((1.0, 0), (2.0, 7), (9.0, 7)):
        pace.look(second, {"a": count})
    assert pace.of("a", 9.0, 7, began=0.0) == pytest.approx(7 / 8)
    pace.look(19.5, {"a": 7})
    assert pace.of("a", 19.5, 7, began=0.0) == 0.0


def test_the_line_reports_how_much_is_left_where_that_is_known() -> None:
    assert HALF.line() == (
        "500 of 1,000 gradients · 50.0/s · 0:00:10 left · 2 of 4 workers running · loss 0.25"
    )
    unknown = replace(HALF, total=None, lost=3, scores={"accuracy": 0.5})
    assert unknown.left is None
    assert unknown.line().endswith("loss 0.25 · evaluated accuracy 0.5 · 3 updates lost")
    assert ENDED.left is None, "nobody computes what is left"
    assert ENDED.line() == "1,000 of 1,000 gradients · 0.0/s · ended after 0:01:02"
    assert replace(ENDED, seconds=None).line().endswith("ended")
    assert replace(HALF, workers=Listing()).line().endswith("no workers started")
    more = replace(HALF, done=1200)
    assert (more.fraction, more.left) == (1.0, 0.0)


def test_a_notebook_shows_html_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda html: shown.append(html.data))

    def show_html(html: Any, display_id: bool) -> Any:
        assert display_id
        shown.append(html._repr_html_())  # None, or "": the notebook shows the repr instead
        return handle

    monkeypatch.setattr("dps.observe.views.notebook", lambda: object())
    monkeypatch.setattr("IPython.display.display", show_html)
    with display() as show:
        show(HALF)
    first, second = shown
    assert first == "<pre></pre>"
    assert second.startswith("<pre>")
    assert "500 of 1,000 gradients" in second


def test_a_program_without_terminal_prints_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with display() as show:
        show(HALF)
    assert HALF.line() in capsys.readouterr().out
