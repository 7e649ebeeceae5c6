"""What each figure shows: gaps in outages, bounds of bands, how many and which interval, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.text import Text

from flows.analysis.finished import Finished, with_effects
from flows.analysis.prices import load_prices
from flows.report.figures import cost, curves, distribution, gallery, recovery, style, timeline
from flows.report.figures.dataset import Subject, Trial, start
from flows.report.figures.figure import SCREEN, Drawing, write_files
from flows.report.figures.gallery import chapters, drawings
from tests.flows.report.figures.support import segments, subject, trials


@pytest.fixture(scope="module")
def toy() -> Subject:
    return subject()


@pytest.fixture(scope="module")
def drawn(toy: Subject) -> dict[str, Drawing]:
    return {drawing.name: drawing for drawing in drawings(chapters(toy.trials))}


# -- gaps --------------------------------------------------------------------------------------


def test_no_line_crosses_an_outage(toy: Subject) -> None:
    for strategy in toy.strategies:
        hit = Subject.of(toy.under("kill", strategy))
        drawing = curves.curves(hit, curves.ACCURACY_BY_TIME, "kill")
        assert drawing is not None
        [axes] = drawing.figure.axes
        latest = max(
            began - start(trial[0]) for trial in hit.trials for began, _ in curves.outages(trial)
        )
        earliest = min(
            until - start(trial[0]) for trial in hit.trials for _, until in curves.outages(trial)
        )
        assert latest < earliest
        assert segments(axes)
        across = [(a, b) for a, b in segments(axes) if a <= latest and b >= earliest]
        assert across == []


def test_no_line_crosses_an_outage_between_two_evaluations() -> None:
    """The toy chain is away for milliseconds, which no evaluation meets."""
    [trial] = trials(("chain",), ("kill",), (0,))
    [(began, until)] = curves.outages(trial)
    points = curves.accuracy_points(trial, 0.0)
    gaps = [t for t, accuracy in points if np.isnan(accuracy)]
    assert any(began <= t <= until for t in gaps)
    before = max(t for t, accuracy in points if t < began and not np.isnan(accuracy))
    after = min(t for t, accuracy in points if t > until and not np.isnan(accuracy))
    assert all(before < t < after for t in gaps)


def test_values_between_gaps_are_seen(toy: Subject) -> None:
    nan = float("nan")
    assert style.alone([1.0, nan, 2.0, nan, 3.0, 4.0]) == [0, 2]
    assert style.alone([nan, 1.0]) == [1]
    _, axes = style.panel()
    style.draw_line(axes, np.arange(60), np.array([nan, 1.0, *[nan] * 58]), style.look(0))
    [line] = axes.get_lines()
    assert 1 in list(line.get_markevery())
    del toy


# -- what is drawn -----------------------------------------------------------------------------


def test_bands_of_shares_stay_within_what_shares_can_be(drawn: dict[str, Drawing]) -> None:
    bands = 0
    for name, drawing in drawn.items():
        if not name.startswith(("accuracy", "through")):
            continue
        for axes in drawing.figure.axes:
            for band in axes.collections:
                assert isinstance(band, PolyCollection)
                heights = np.concatenate([path.vertices[:, 1] for path in band.get_paths()])
                bands += 1
                assert np.nanmin(heights) >= 0
                assert np.nanmax(heights) <= 1
    assert bands >= 8


def test_every_figure_says_how_many_and_which_interval(drawn: dict[str, Drawing]) -> None:
    for drawing in drawn.values():
        told = drawing.figure.get_supxlabel()
        assert told.startswith("n = ") or "; n = " in told.replace("\n", " "), drawing.name
        assert "interval" in told, drawing.name


def test_no_letter_is_too_small_for_print(drawn: dict[str, Drawing]) -> None:
    for drawing in drawn.values():
        texts = drawing.figure.findobj(Text)
        sizes = {text.get_fontsize() for text in texts if text.get_text().strip()}
        assert min(sizes) >= style.SMALL, drawing.name


def test_many_faults_make_few_lines() -> None:
    """However many trials there are, upright lines stand at the medians."""
    for seeds in ((0,), tuple(range(6))):
        found = subject(strategies=("none",), faults=("kill",), seeds=seeds)
        drawing = recovery.through_fault(found, found.groups[0], None)
        assert drawing is not None
        [axes] = drawing.figure.axes
        upright = [line for line in axes.get_lines() if len(set(line.get_xdata())) == 1]
        assert len([line for line in upright if list(line.get_ydata()) == [0, 1]]) == 3
        [legend] = drawing.figure.legends
        named = [text.get_text() for text in legend.get_texts()]
        assert named == ["none", "fault", "detected", "serving again", "down"]


def test_the_front_is_of_money_and_what_faults_did() -> None:
    done = [Finished(Path(), *trial) for trial in trials(seeds=(0, 1))]
    toy = Subject.of([(each.record, each.outcome) for each in with_effects(done, load_prices())])
    found = cost.cost_effect(toy, "kill")
    assert found is not None
    effects = {row[:2]: row[3] for row in found.table.rows if row[1] != "mean"}
    assert effects == {
        (o.identity.strategy, o.identity.seed): pytest.approx(100 * o.row()["effect_time_end"])
        for _, o in toy.trials
        if o.identity.condition == "kill"
    }
    assert len(effects) == 4
    assert cost.cost_effect(toy, "no fault") is None
    assert cost.cost_effect(subject(faults=("kill",)), "kill") is None


# -- distributions of recovery times -----------------------------------------------------------


def test_recovery_times_are_those_of_all_outages(toy: Subject) -> None:
    found = distribution.outage_times(toy.under("kill", "none"))
    expected = sorted(
        fault.rto_seconds
        for _, o in toy.under("kill", "none")
        for fault in o.faults
        if fault.rto_seconds is not None
    )
    assert list(found.over) == expected
    assert found.lasting == ()
    drawing = distribution.recovery_times(toy, "kill")
    assert drawing is not None
    assert "n = 3 outages of 3 trials each" in drawing.figure.get_supxlabel()
    assert distribution.recovery_times(toy, "no fault") is None


def test_without_censoring_it_is_the_empirical_distribution() -> None:
    steps = distribution.distribution(distribution.Times((1.0, 2.0, 2.0, 4.0), ()))
    assert steps.seconds.tolist() == [1.0, 2.0, 4.0]
    assert steps.share.tolist() == pytest.approx([0.25, 0.75, 1.0])
    assert (steps.low <= steps.share).all()
    assert (steps.high >= steps.share).all()
    assert min(steps.low) >= 0
    assert max(steps.high) <= 1


def test_outages_that_last_count_for_as_long_as_they_are_known() -> None:
    """Kaplan and Meier by hand: 1 of 4, then 1 of the 2 left after one was lost from sight."""
    steps = distribution.distribution(distribution.Times((1.0, 3.0), (2.0, 5.0)))
    share = dict(zip(steps.seconds.tolist(), steps.share.tolist(), strict=True))
    assert share[1.0] == pytest.approx(0.25)
    assert share[3.0] == pytest.approx(1 - 0.75 * 0.5)
    assert max(share.values()) < 1


# -- files -------------------------------------------------------------------------------------


def test_files_are_in_three_formats_and_the_same_every_time(tmp_path: Path) -> None:
    hit = subject(strategies=("none",), faults=("kill",), seeds=(0, 1))
    found = []
    for number in range(2):
        again = [
            curves.curves(hit, curves.ACCURACY_BY_TIME, "kill"),
            timeline.story(hit, hit.groups[0]),
        ]
        found.append([drawing for drawing in again if drawing is not None])
        assert len(found[-1]) == 2
        write_files(found[-1], tmp_path / str(number))
    names = {path.name for path in (tmp_path / "0").iterdir()}
    assert names == {
        f"{drawing.name}.{kind}" for drawing in found[0] for kind in ("svg", "pdf", "png", "csv")
    }
    for name in names:
        first, second = ((tmp_path / str(i) / name).read_bytes() for i in range(2))
        assert first == second, name
        assert b"CreationDate" not in first
        assert b"<dc:date>" not in first


def test_files_are_as_wide_as_a_column_or_two(tmp_path: Path) -> None:
    from matplotlib.image import imread

    hit = subject(strategies=("none",), faults=("kill",), seeds=(0,))
    drawing = curves.curves(hit, curves.ACCURACY_BY_TIME, "kill")
    assert drawing is not None
    page = drawing.svg
    for width, inches in (("double", 7.0), ("single", 3.3)):
        write_files([drawing], tmp_path, width=width)  # type: ignore[arg-type]
        pixels = imread(tmp_path / "accuracy-time-kill.png").shape[1]
        assert pixels == pytest.approx(300 * inches, abs=1)
        svg = (tmp_path / "accuracy-time-kill.svg").read_text()
        assert f'width="{72 * inches:g}pt"' in svg
    assert svg == page


def test_files_that_are_not_written_anew_are_removed(tmp_path: Path, toy: Subject) -> None:
    drawing = curves.curves(toy, curves.GRADIENTS_BY_TIME, "kill")
    assert drawing is not None
    write_files([drawing], tmp_path)
    write_files([drawing], tmp_path, SCREEN)
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".csv"}


def test_of_a_large_grid_only_the_longest_outages_have_figures_of_each_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 3 conditions with faults for each of 2 strategies, as many whole ones as fit into 5."""

    def down(trial: Trial, condition: str, seconds: float) -> Trial:
        record, found = trial
        labels = {**found.identity.labels, "faults": condition}
        identity = replace(found.identity, labels=labels)
        downtime = replace(found.downtime, seconds=seconds)
        return record, replace(found, identity=identity, downtime=downtime)

    toys = trials(("none", "chain"), ("kill",), (0,))
    many = [down(toy, name, s) for name, s in (("a", 1), ("b", 3), ("c", 2)) for toy in toys]
    monkeypatch.setattr(gallery, "MOST_APART", 5)
    found = {chapter.name: chapter for chapter in gallery.chapters(many)}
    for name in ("through", "timeline"):
        assert {each.name.split("-")[-2] for each in found[name].drawings} == {"b", "c"}
        assert "Of 6 strategies under conditions with faults" in found[name].note
    monkeypatch.setattr(gallery, "MOST_APART", 6)
    found = {chapter.name: chapter for chapter in gallery.chapters(many)}
    assert len(found["timeline"].drawings) == 6
    assert "Of 6" not in found["timeline"].note
