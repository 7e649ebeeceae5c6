"""The tables of who wins when: from real records, and what is not recorded stays as it is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

import pytest
import yaml
from scipy import stats

from dps.errors import ConfigurationError
from flows.analysis.finished import read_experiment
from flows.analysis.prices import load_prices
from flows.analysis.statistics.claims import write_claims
from flows.config.trials import Trial, load_trials
from flows.execution.trial import run_trial
from flows.replication.frontier_page import CONFIGS, read_study, with_tables
from flows.replication.frontier_tables import (
    FINAL,
    SECTIONS,
    Column,
    Section,
    contrasts,
    difference_cell,
    mean_cell,
    number,
)

PAGE = Path("docs/who-wins-when.md")
BEGIN, END = "<!-- records of {} -->", "<!-- end of records -->"
PAGES = (PAGE, Path("docs/guide.md"))  # as in `make frontier`
OF_SMALL = ("checkpoint, warm", "chain(2)", "stateless")
SMALL = """\
# Another model

<!-- records of frontier-model: runs -->
<!-- end of records -->

In the words of whoever wrote it.

<!-- records of frontier-model: 8 s -->

| old |
| --- |

<!-- end of records -->
<!-- records of frontier: points -->
stays
<!-- end of records -->
"""


def run(page: Path, results: Path, configs: Path) -> subprocess.CompletedProcess[str]:
    given = map(str, (page, results, configs))
    command = [sys.executable, "-m", "flows.replication.frontier_page", *given]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def parts_of(section: Section) -> list[Section]:
    """A section, and all that it is made of."""
    return [section, *(part for _, each in section.parts for part in parts_of(each))]


def record(trial: Trial, results: Path) -> None:
    folder = results / trial.experiment / trial.name
    folder.mkdir(parents=True)
    run_trial(trial, folder, lambda event: None)


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of `frontier-model`, far smaller, with three seeds; and `frontier` as it is."""
    folder = tmp_path_factory.mktemp("configs")
    small = yaml.safe_load((CONFIGS / "frontier-model.yaml").read_text("utf-8"))
    recovery, faults = small["axes"]["recovery"], small["axes"]["faults"]
    small["axes"]["recovery"] = {name: recovery[name] for name in OF_SMALL}
    small["axes"]["faults"] = {name: faults[name] for name in ("mtbf inf", "mtbf 8")}
    small["claims"] = [c for c in small["claims"] if c["condition"] == {"faults": "mtbf 8"}]
    del small["exclude"]
    small["workload"]["hidden"] = [2]
    small["training"]["updates"] = 32
    small["seeds"] = [3, 4, 5]
    (folder / "frontier-model.yaml").write_text(yaml.safe_dump(small, sort_keys=False), "utf-8")
    (folder / "frontier.yaml").write_bytes((CONFIGS / "frontier.yaml").read_bytes())
    return folder


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, configs: Path) -> Path:
    """All trials of the small one, and one of a seed that is not among them."""
    folder = tmp_path_factory.mktemp("results")
    path = str(configs / "frontier-model.yaml")
    experiment, trials = load_trials(path)
    for trial in (*trials, load_trials(path, ["seeds=[9]"])[1][-1]):
        record(trial, folder)
    write_claims(folder / "frontier-model", experiment.claims)
    return folder


@pytest.mark.slow
def test_tables_are_made_of_the_records_and_the_rest_stays(
    tmp_path: Path, configs: Path, results: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text(SMALL, "utf-8")
    done = run(page, results, configs)
    assert done.returncode == 0, done.stderr
    assert "frontier-model: tables of 18 trials" in done.stdout
    assert "frontier: 0 of 1,080 trials are recorded" in done.stdout
    text = page.read_text("utf-8")
    assert "**n = 3 seeds** (3 to 5), 18 trials, all valid." in text
    assert "| old |" not in text
    assert "In the words of whoever wrote it." in text
    assert "<!-- records of frontier: points -->\nstays\n<!-- end of records -->" in text

    found = [each.outcome for each in read_experiment(results / "frontier-model", load_prices())]
    for strategy in OF_SMALL:
        points = [
            100 * each.row()["effect_time_mean"]
            for each in found
            if each.identity.strategy == strategy
            and each.identity.labels["faults"] == "mtbf 8"
            and each.identity.seed != 9
        ]
        reach = stats.t.ppf(0.975, 2) * stdev(points) / 3**0.5
        row = next(line for line in text.splitlines() if line.startswith(f"| {strategy} (4)"))
        cell = row.split(" | ")[1]
        assert cell == f"{mean(points):.1f} ±{reach:.1f}".replace("-", "−")

    again = run(page, results, configs)
    assert again.returncode == 0
    assert page.read_text("utf-8") == text


@pytest.mark.slow
def test_where_a_trial_is_missing_the_tables_stay(
    tmp_path: Path, configs: Path, results: Path
) -> None:
    fewer = tmp_path / "results" / "frontier-model"
    fewer.mkdir(parents=True)
    for each in results.joinpath("frontier-model").iterdir():
        if not each.name.endswith("seed-4"):
            (fewer / each.name).symlink_to(each)
    page = tmp_path / "page.md"
    page.write_text(SMALL, "utf-8")
    done = run(page, fewer.parent, configs)
    assert done.returncode == 0, done.stderr
    assert "frontier-model: 12 of 18 trials are recorded" in done.stdout
    assert page.read_text("utf-8") == SMALL


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{BEGIN.format('frontier: winners')}\n{END}\n", "frontier: winners"),
        (f"{BEGIN.format('frontier: points')}\n", "of 1 tables"),
        (
            f"{BEGIN.format('frontier-all: runs')}\n{BEGIN.format('frontier: runs')}\n{END}\n",
            "of 2",
        ),
    ],
    ids=["unknown", "without-end", "one-in-another"],
)
def test_a_page_with_wrong_marks_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=said):
        with_tables(text, lambda _: None)
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    done = run(page, tmp_path, CONFIGS)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert page.read_text("utf-8") == text


def test_the_page_has_its_marks_and_stays_without_records() -> None:
    text = PAGE.read_text("utf-8")
    assert text.count("<!-- records of frontier: ") >= 4
    assert with_tables(text, lambda _: None) == text


def test_every_section_is_on_a_page() -> None:
    marks = re.compile("^<!-- records of (.*) -->$", re.MULTILINE)
    used = [name for page in PAGES for name in marks.findall(page.read_text("utf-8"))]
    assert set(used) == set(SECTIONS)
    assert f"for page in {' '.join(page.stem for page in PAGES)};" in Path("Makefile").read_text()


@pytest.mark.parametrize("experiment", sorted({each.experiment for each in SECTIONS.values()}))
def test_what_sections_are_made_of_is_configured(experiment: str) -> None:
    """Conditions and pairs of a section are among the labels of its experiment."""
    trials = load_trials(str(CONFIGS / f"{experiment}.yaml"), ["seeds=[0]"])[1]
    strategies = {trial.labels["recovery"] for trial in trials}
    named = [(name, each) for name, whole in SECTIONS.items() for each in parts_of(whole)]
    for name, section in named:
        if section.experiment != experiment:
            continue
        assert {each for pair in section.pairs for each in pair} <= strategies, name
        contrasted = (column for pair in section.contrasts for column in pair)
        for column in (*section.columns, *contrasted):
            met = {
                trial.labels["recovery"]
                for trial in trials
                if column.labels.items() <= trial.labels.items()
            }
            assert met >= set(section.of or strategies), (name, column.heading)


@pytest.mark.slow
def test_contrasts_are_of_the_same_strategy_and_seeds(configs: Path, results: Path) -> None:
    study = read_study("frontier-model", results, configs, lambda _: None)
    assert study is not None
    struck, quiet = ({"faults": f"mtbf {mtbf}"} for mtbf in ("8", "inf"))
    pair = (Column("often", FINAL, struck), Column("never", FINAL, quiet))
    text = contrasts(study, [pair], OF_SMALL[:2])
    heading, _, row = text.splitlines()
    assert heading == "| pair | checkpoint, warm | chain(2) |"
    cells = row.strip("| ").split(" | ")
    assert cells[0] == "often − never"
    for strategy, cell in zip(OF_SMALL, cells[1:], strict=False):
        often, never = (study.values(strategy, labels, FINAL) for labels in (struck, quiet))
        differences = [often[seed] - never[seed] for seed in (3, 4, 5)]
        found = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        wanted = f"{mean(differences):.1f} [{found.low:.1f}, {found.high:.1f}]"
        assert cell == wanted.replace("-", "−")


def test_cells_say_how_many_seeds_they_are_of() -> None:
    assert mean_cell([1.0, 2.0, 3.0], 1, 3) == "2.0 ±2.5"
    assert mean_cell([1.0, 2.0, 3.0], 1, 12) == "2.0 ±2.5 (3)"
    assert mean_cell([1.0, 2.0], 1, 12) == "1.5 (2)"
    assert mean_cell([], 1, 12) == "– (0)"
    assert mean_cell([0.0] * 12, 1, 12) == "0.0 ±0.0"
    assert mean_cell([0.0] * 3, 1, 3) == "0.0"  # no exact interval of 95% is so short


def test_differences_of_other_seeds_are_not_told() -> None:
    mine = {0: 1.0, 1: 2.0, 2: 3.0}
    assert difference_cell(mine, dict.fromkeys(mine, 4.0), 1) == "−2.0 [−4.5, 0.5]"
    assert difference_cell(mine, {0: 1.0}, 1) == "not comparable (3 and 1 seeds)"


@pytest.mark.parametrize(("value", "text"), [(-0.04, "0.0"), (-1.25, "−1.2"), (12.0, "12.0")])
def test_numbers_have_a_real_minus_but_none_before_zero(value: float, text: str) -> None:
    assert number(value, 1) == text
