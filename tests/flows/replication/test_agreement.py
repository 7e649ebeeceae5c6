"""Verdicts of real processes beside those of virtual time, and the file that they travel in."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps.errors import ConfigurationError
from flows.analysis.statistics import Interval
from flows.analysis.statistics.decisions import Verdict
from flows.cli import replicate
from flows.replication.agreement import agreement, compared
from flows.replication.cells import cells_compared, number
from flows.replication.ftps.run import experiment as ftps_experiment
from flows.replication.ttf.findings import NO_SPACE, NOT_VIRTUAL
from flows.replication.ttf.run import (
    JUDGED,
    SHORT,
    SHOWN,
    VIRTUAL,
    Short,
    alike_of,
    by_design,
    experiment,
)
from flows.replication.verdicts import CellFigure, ClaimVerdict, Verdicts, read_verdicts
from flows.replication.version import Version
from tests.support.needs_torch import needs_torch

FULL_VIRTUAL = Version(full=True, virtual=True)
DOCS = Path("docs/figures").resolve()
FEW = {
    "recovery": ("async checkpoint", "stateless"),
    "faults": ("k=0", "k=1"),
    "training.workers": ("2",),
}


def judged(
    verdict: Verdict,
    *effect: float | None,
    claim: str = "4. It costs the same",
    measured: str = "one kill: price",
    found: str = "found",
) -> ClaimVerdict:
    mean, low, high = effect if effect else (None, None, None)
    numbers = None if mean is None else Interval(mean, low, high, 6)
    return ClaimVerdict.of(claim, found, verdict, numbers, study="(b)", measured=measured)


def verdicts(*claims: ClaimVerdict, virtual: bool = False) -> Verdicts:
    command = Version(full=virtual, virtual=virtual).command("ttf")
    return Verdicts(paper="ttf", command=command, virtual=virtual, claims=claims)


@pytest.mark.parametrize(
    ("real", "virtual", "expected"),
    [
        (judged("holds", 2, 1, 3), judged("holds", 2.5, 2.4, 2.6), "same"),
        (judged("holds", 2, 1, 3), judged("holds", 9, 8.9, 9.1), "apart"),
        (judged("not resolved", 2, -1, 5), judged("holds", 2, 1.9, 2.1), "resolution"),
        (judged("not resolved", 1, -4, 6), judged("holds", -2, -2.1, -1.9), "direction"),
        (judged("not resolved", 2, -1, 5), judged("holds", 9, 8.9, 9.1), "contradiction"),
        (judged("holds", 2, 1, 3), judged("does not hold", -2, -3, -1), "contradiction"),
        (judged("holds"), judged("does not hold"), "contradiction"),
        (judged("not resolved"), judged("holds", 2, 1, 3), "unknown"),
        (judged("not resolved", 2, None, None), judged("holds", 9, 8, 10), "unknown"),
        (judged("not resolved"), judged("not resolved", 2, 1, 3), "same"),
        (judged("not resolved", found="–"), judged("not resolved", 2, 1, 3), "nothing"),
        (judged("holds", 2, 1, 3), judged("not resolved", found="–; reached by 0 of 3"), "nothing"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.verdict.replace(" ", "-"),
)
def test_how_two_verdicts_stand_to_each_other(
    real: ClaimVerdict, virtual: ClaimVerdict, expected: str
) -> None:
    assert agreement(real, virtual) == expected


def test_the_direction_of_a_ratio_turns_at_one() -> None:
    real = ClaimVerdict.of("Faster", "", "not resolved", Interval(0.96, 0.9, 1.02, 3), turn=1)
    slower = ClaimVerdict.of("Faster", "", "does not hold", Interval(0.99, 0.98, 1.0, 5), turn=1)
    faster = ClaimVerdict.of("Faster", "", "holds", Interval(1.01, 1.0, 1.02, 5), turn=1)
    assert agreement(real, slower) == "resolution"
    assert agreement(real, faster) == "direction"


def test_disagreements_are_named_and_what_one_side_lacks_is_told() -> None:
    both = judged("holds", 2, 1, 3), judged("does not hold", -2, -3, -1)
    alone = judged("holds", 1, 0, 2, measured="one kill: pace")
    gone = judged("holds", 1, 0, 2, measured="on average: price")
    said, table = compared(verdicts(both[0], gone), verdicts(both[1], alone, virtual=True))
    text = " ".join(said)
    assert "Of 1 claim that both have judged: 1 with verdicts that disagree" in text
    assert "Apart or in disagreement: (b): 4. one kill: price." in text
    assert "No verdict by real processes has 1 claim: asked later." in text
    assert "By real processes alone were judged 1 of (b)" in text
    assert [row[-1] for row in table.rows] == ["disagree", "–"]
    assert table.rows[1][1:3] == ["–", "–"]


def test_claims_without_a_figure_on_one_side_are_not_counted_as_agreement() -> None:
    """Two that nothing resolves, where one has no trial that tells anything, do not agree."""
    counted = judged("holds", 2, 1, 3), judged("holds", 2.5, 2.4, 2.6)
    bound = judged("holds", found="at most 3", measured="time")
    less = judged("not resolved", found="–", measured="pace")
    more = judged("not resolved", 2, 1, 3, measured="pace")
    real = verdicts(counted[0], bound, less, judged("holds", 2, 1, 3, measured="gap"))
    other = judged("not resolved", found="–; target reached by 0 of 0", measured="gap")
    said, table = compared(real, verdicts(counted[1], bound, more, other, virtual=True))
    assert said[1] == (
        "Of 2 claims that both have judged: 2 with the same verdict. Not counted: 1 without a "
        "figure on real processes and 1 without a figure on virtual time, where there is nothing "
        "to agree on."
    )
    nothing = "no figure to compare"
    assert [row[-1] for row in table.rows] == ["same", "same", nothing, nothing]


def test_what_both_have_run_is_told_apart_from_what_more_cells_say() -> None:
    """More seeds and cells can bring another effect, of which time is not the cause."""
    real, alike = judged("holds", 2, 1, 3), judged("holds", 2.1, 2, 2.2)
    said, table = compared(
        verdicts(real),
        verdicts(judged("does not hold", -1, -1.1, -0.9), virtual=True),
        verdicts(alike, virtual=True),
    )
    assert table.headings[3::3] == ["virtual time, the same cells and seeds", "virtual time, all"]
    assert table.rows[0][5::3] == ["same", "disagree"]
    same, all_of_it = said[1:]
    assert same.startswith(
        "By the same cells and seeds, of 1 claim that both have judged: 1 with the"
    )
    assert all_of_it.startswith(
        "By all of them, of 1 claim that both have judged: 1 with verdicts that dis"
    )


def test_without_verdicts_of_real_processes_there_is_nothing_to_compare() -> None:
    said, table = compared(None, verdicts(judged("holds", 2, 1, 3), virtual=True))
    assert "run `dps replicate ttf` first" in said[0]
    assert table.rows == [["(b): 4. one kill: price", "–", "–", "found", "holds", "–"]]


def test_verdicts_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = verdicts(judged("holds", 2, 1, 3), judged("not resolved"))
    found.write(tmp_path)
    assert read_verdicts(tmp_path / "verdicts.json", "ttf") == found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        ("{", r"Invalid JSON.*expected the verdicts.json of a `dps replicate`"),
        ('{"paper": "ttf", "command": "", "virtual": false}', "claims: "),
        (verdicts(virtual=True).model_dump_json(), "of ttf on real processes"),
        (
            Verdicts(paper="ftps", command="", virtual=False, claims=()).model_dump_json(),
            "of ttf on real processes",
        ),
    ],
    ids=["missing", "broken", "incomplete", "virtual", "other-paper"],
)
def test_other_files_are_refused_with_what_was_expected(
    tmp_path: Path, text: str | None, reason: str
) -> None:
    path = tmp_path / "verdicts.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=reason):
        read_verdicts(path, "ttf")


def test_verdicts_are_set_beside_those_of_virtual_time_only() -> None:
    with pytest.raises(ConfigurationError, match="expected --virtual with it"):
        replicate.ttf(beside=Path("verdicts.json"))


@pytest.mark.parametrize("paper", ["ttf", "ftps"])
def test_the_verdicts_of_the_documentation_can_be_read(paper: str) -> None:
    found = read_verdicts(DOCS / paper / "verdicts.json", paper)
    assert found.claims
    page = (DOCS.parent / "findings.md").read_text("utf-8")
    assert all(each.found in page for each in found.claims)


# -- what is on virtual time -------------------------------------------------------------------


@pytest.mark.parametrize(
    "full",
    [pytest.param(True, marks=needs_torch), pytest.param(False, marks=needs_torch)],
    ids=["full", "short"],
)
def test_every_trial_is_on_virtual_time_and_none_in_a_folder_of_real_ones(full: bool) -> None:
    version = Version(full, virtual=True)
    names = [*JUDGED.values(), *SHOWN.values(), *by_design(version).values()]
    virtual = [experiment(name, version) for name in names]
    virtual += [
        ftps_experiment(f"replicate/ftps-{part}", version) for part in ("scaling", "failure")
    ]
    real = [experiment(name, Version(full)) for name in (*JUDGED.values(), *SHOWN.values())]
    real += [
        ftps_experiment(f"replicate/ftps-{part}", Version(full)) for part in ("scaling", "failure")
    ]
    assert {each.cluster.kind for each in virtual} == {"virtual"}
    assert not {each.experiment for each in virtual} & {each.experiment for each in real}
    twins = [each for each in virtual if "by-design" not in each.experiment]
    fewer = [
        (one.experiment, other.trials - one.trials)
        for one, other in zip(twins, real, strict=True)
        if one.trials != other.trials
    ]
    seeds = 10 if full else SHORT["ttf-path-damaged"].seeds
    assert fewer == [("ttf-path-damaged-virtual", seeds)], "all others have the same trials"


def test_what_is_not_on_virtual_time_is_said_with_the_reason() -> None:
    assert any(NO_SPACE in reason and "never full" in reason for reason in NOT_VIRTUAL)
    whole = experiment("ttf-path-damaged", Version(full=True))
    assert NO_SPACE in whole.axes["faults"]
    assert NO_SPACE not in experiment("ttf-path-damaged", FULL_VIRTUAL).axes["faults"]
    left_out = set(by_design(Version(full=True))) - set(VIRTUAL)
    assert left_out == {reason.partition(":")[0] for reason in NOT_VIRTUAL if reason[1] == "e"}


@pytest.mark.torch
def test_beside_the_short_version_are_its_own_cells_and_seeds(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed: make torch")
    short = verdicts(judged("holds", 2, 1, 3))
    found = alike_of(FULL_VIRTUAL, short, tmp_path, print)
    assert {title: study.planned for title, study in found.items()} == {
        title: experiment(name, Version()).trials for title, name in JUDGED.items()
    }
    full = short.model_copy(update={"command": Version(full=True).command("ttf")})
    assert not alike_of(FULL_VIRTUAL, full, tmp_path, print), "these have all cells and seeds"
    assert not alike_of(Version(virtual=True), short, tmp_path, print)


@pytest.mark.slow
def test_a_replication_on_virtual_time_is_marked_and_compared_with_real_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flows.replication.ttf.run.JUDGED", {"(b) corrected": "ttf-corrected"})
    monkeypatch.setattr("flows.replication.ttf.run.SHOWN", {})
    monkeypatch.setitem(SHORT, "ttf-corrected", Short(2, FEW))
    monkeypatch.chdir(tmp_path)
    replicate.ttf(virtual=True, beside=DOCS / "ttf" / "verdicts.json")
    text = capsys.readouterr().out
    assert "\n## Training Through Failure, on virtual time\n" in text
    assert "records of `dps replicate ttf --virtual`. Time: virtual, with the profile" in text
    assert "(b) corrected: 8 of 8 trials" in text
    assert "### Agreement with real processes" in text
    assert "Of 7 claims that both have judged" in text
    assert "Not counted: 10 without a figure on virtual time" in text, "no chain, no two kills"
    folders = sorted(each.name for each in (tmp_path / "results").iterdir())
    assert folders == ["replicate-ttf-short-virtual", "ttf-corrected-virtual"]
    written = Path("results/replicate-ttf-short-virtual/verdicts.json").read_text("utf-8")
    found = Verdicts.model_validate_json(written)
    assert {each.seeds for each in found.cells} == {(0, 1)}
    assert "### Cells of real processes, on virtual time" in text
    assert "Of 14 figures of 4 cells that both have run" in text, "real processes have these seeds"


# -- figures of single cells -------------------------------------------------------------------


def figure(values: dict[int, float], name: str = "pace") -> CellFigure:
    return CellFigure.of("(b)", "stateless", "k=1", name, values)


def test_cells_are_paired_by_the_seeds_that_both_have() -> None:
    real = figure({0: 100.0, 1: 110.0, 2: 120.0, 3: 500.0})
    virtual = figure({0: 101.0, 1: 111.0, 2: 121.5, 9: 0.0})
    said, (table,) = cells_compared([real], [virtual])
    assert table.rows == [["(b): stateless", "k=1", "3", "–", "–", f"110.0, 111.2: {DIFFERS}", "–"]]
    assert said[0].startswith("Of 1 figures of 1 cells that both have run")
    assert "1 of the 1 with an interval of 95% of real processes lie within it" in said[0]


DIFFERS = "+1.2 [+0.4, +1.9]"


def test_a_difference_of_zeros_has_no_sign() -> None:
    real = figure({0: 0.4, 1: 0.5, 2: 0.6}, "final accuracy")
    virtual = figure({0: 0.4001, 1: 0.49995, 2: 0.59995}, "final accuracy")
    _, (table,) = cells_compared([real], [virtual])
    assert "0.500, 0.500: 0.000 [0.000, 0.000]" in table.rows[0]


def test_a_mean_of_other_seeds_is_not_compared_and_one_of_the_same_has_no_interval() -> None:
    kept = figure({0: 100.0, 1: 110.0}).model_copy(update={"values": ()})
    said, (table,) = cells_compared([kept], [figure({0: 90.0, 1: 110.0, 2: 0.0})])
    assert table.rows[0][5] == "105.0, 100.0: −5.0"
    assert "not paired" in said[0]
    assert cells_compared([kept], [figure({0: 90.0})]) == ([], [])


def test_figures_outside_the_interval_of_real_processes_are_counted() -> None:
    real, far = figure({0: 1.0, 1: 1.1, 2: 1.2}, "gap"), figure({0: 2.0, 1: 2.1, 2: 2.2}, "gap")
    said, _ = cells_compared([real], [far])
    assert "0 are within 5% of each other; 0 of the 1" in said[0]


def test_figures_of_cells_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = verdicts(judged("holds", 2, 1, 3)).model_copy(
        update={"cells": (figure({0: 1.5, 3: 2.5}),)}
    )
    found.write(tmp_path)
    again = read_verdicts(tmp_path / "verdicts.json", "ttf")
    assert again == found
    assert again.cells[0].by_seed == {0: 1.5, 3: 2.5}


@pytest.mark.parametrize(("value", "text"), [(-0.04, "0.0"), (-1.25, "−1.2"), (12.0, "12.0")])
def test_numbers_have_a_real_minus_but_none_before_zero(value: float, text: str) -> None:
    assert number(value, 1) == text
