"""Charts of replications: bands within what shares can be, lines that can be told apart, files."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dps.events import EvaluationMissed
from flows.analysis.finished import Finished
from flows.analysis.outcome import outcome
from flows.analysis.prices import load_prices
from flows.records.record import Record
from flows.replication.charts import Chart, Dot
from flows.replication.ttf.figures import accuracy_figure, accuracy_panel, recorded_panel
from flows.replication.ttf.findings import PUBLISHED
from flows.report.figures import style
from tests.flows.report.figures.support import segments
from tests.support.synthetic import toy_events


@pytest.fixture
def chart() -> Chart:
    dots = [Dot(1, 0.82, -0.1, 0.9), Dot(5, 0.975, 0.95, 1.04)]
    return Chart(
        "shares",
        "Shares.",
        "iteration",
        "test accuracy",
        {"one": dots, "another": dots, "published": [Dot(1, 0.9)]},
        "n = 4 seeds; band: 95% interval of the mean",
        dashed=frozenset({"published"}),
        share=True,
    )


def test_bands_of_shares_are_cut(chart: Chart) -> None:
    [axes] = chart.drawing.figure.axes
    for band in axes.collections:
        heights = np.concatenate([path.vertices[:, 1] for path in band.get_paths()])
        assert 0 <= heights.min() <= heights.max() <= 1
    assert chart.csv().splitlines()[1:3] == ["one,1,0.82,0,0.9", "one,5,0.975,0.95,1"]


def test_equal_lines_do_not_hide_one_another(chart: Chart) -> None:
    one, another, published = chart.drawing.figure.axes[0].get_lines()
    assert one.get_linewidth() > another.get_linewidth()
    assert one.get_marker() != another.get_marker()
    assert published.get_fillstyle() == "none"
    assert "n = 4 seeds" in chart.drawing.figure.get_supxlabel()


def test_its_ticks_say_what_they_are_at(chart: Chart, tmp_path: Path) -> None:
    chart.write(tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".pdf", ".png", ".csv"}
    axes = chart.drawing.figure.axes[0]
    shown = re.findall(r">([\d.]+)%</text>", (tmp_path / "shares.svg").read_text())
    ticks = [100 * tick for tick in axes.get_yticks()]
    assert shown
    assert all(min(abs(float(text) - tick) for tick in ticks) < 1e-6 for text in shown)


def test_curves_of_accuracy_have_a_gap_where_a_shard_was_down(tmp_path: Path) -> None:
    shown = []
    for seed in range(2):
        record = Record(tuple(toy_events("none", "kill", seed)))
        assert record.of(EvaluationMissed)
        found = outcome(record, load_prices())
        shown.append((Finished(tmp_path / str(seed), record, found), "none"))
    panel = accuracy_panel("(b)", shown)
    published = recorded_panel(PUBLISHED, 2)
    assert published is not None
    figure = accuracy_figure([published, panel])
    [kill] = [moment for what, moment in panel.moments if what == "kill"]
    [back] = [moment for what, moment in panel.moments if what == "recovery"]
    own = segments(figure.axes[1])
    assert own
    assert not [(a, b) for a, b in own if a < kill + 0.3 and b > back - 0.3]
    told = " ".join(figure.get_supxlabel().split())
    assert "(b): n = 2 trials" in told
    assert figure.get_figwidth() == style.DOUBLE


def test_what_was_published_is_drawn_as_it_was_recorded() -> None:
    panel = recorded_panel(PUBLISHED, 2)
    assert panel is not None
    curves = dict(panel.curves)
    assert curves["stateless"][1] == [0.476, 0.589, 0.606, 0.689, 0.725]
    assert len(panel.ticks) == 5
    assert recorded_panel(PUBLISHED, 3) is None
