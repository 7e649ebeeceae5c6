"""Reports: self-contained pages whose every number is one of the outcomes'."""

from __future__ import annotations

import csv
import dataclasses
import html
import re
import shutil
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import Disturbed, Killed, TrialEnded, TrialResumed
from flows.analysis.effects.difference import UNKNOWN
from flows.analysis.faults import FaultTimes
from flows.analysis.finished import (
    print_comparison,
    read_experiment,
)
from flows.analysis.groups import Group, conditions, ranked, strategies, summarize
from flows.analysis.learning import evaluations
from flows.analysis.left_out import without_effect
from flows.analysis.outcome import Outcome, outcome
from flows.analysis.prices import load_prices
from flows.analysis.series import series
from flows.analysis.statistics.claims import write_claims
from flows.config.base import ComparisonSection
from flows.config.claims import ClaimSection
from flows.config.experiment import ExperimentConfig
from flows.config.trials import expand
from flows.metrics import BY_KEY
from flows.records.record import EVENTS_FILE, read_record, write_grid
from flows.report import sentences as words
from flows.report import tables
from flows.report.figures.bands import Curve, band
from flows.report.figures.cost import front
from flows.report.figures.figure import Table, slugs, write_files
from flows.report.figures.gallery import chapters, drawings
from flows.report.figures.style import STRATEGY_COLOURS, looks
from flows.report.html import render, write_report
from flows.report.reproduce import experiment_yaml
from flows.report.strategies import strategy_notes
from tests.support.synthetic import (
    KILL_AT,
    STRATEGIES,
    demo_trials,
    missed,
    read_trials,
    toy_events,
    unsure_trials,
    write_events,
    write_experiment,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experiment(tmp_path_factory.mktemp("results") / "demo")


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return write_report(folder, folder / "report.html").read_text()


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[Outcome]:
    return [outcome for _, outcome in read_trials(folder, load_prices())]


def group(outcomes: list[Outcome], strategy: str, condition: str) -> Group:
    [found] = [g for g in summarize(outcomes) if (g.strategy, g.condition) == (strategy, condition)]
    return found


class Tags(HTMLParser):
    """Collects opening tags, checks that they are closed in order, and keeps the text."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr", "path", "use", "rect", "circle"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def text_of(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def text_between(page: str, summary: str, tag: str) -> str:
    """Return the text of the first element of a kind after a summary."""
    part = page[page.index(f"<summary>{summary}") :]
    return html.unescape(part[part.index(f"<{tag}>") + len(tag) + 2 : part.index(f"</{tag}>")])


# -- the page ----------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_anywhere(page: str) -> None:
    tags = parsed(page)
    loading = [v or "" for k, v in tags.attributes if k in ("src", "href", "data", "xlink:href")]
    assert all(value.startswith(("#", "data:")) for value in loading)
    assert "<script" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_no_id_occurs_twice(page: str) -> None:
    ids = [value for name, value in parsed(page).attributes if name == "id"]
    assert len(ids) == len(set(ids))


def test_every_reference_inside_a_figure_has_its_target(page: str) -> None:
    ids = {value for name, value in parsed(page).attributes if name == "id"}
    shown = re.sub(r'href="data:[^"]*"', "", page)
    used = {*re.findall(r"url\(#([^)]+)\)", shown), *re.findall(r'href="#([^"]+)"', shown)}
    assert used
    assert used <= ids


def test_the_figures_take_the_page_s_colours(page: str) -> None:
    style = page[page.index("<style>") : page.index("</style>")]
    dark = style[style.index("prefers-color-scheme: dark") :]
    for name in {*re.findall(r"var\(--((?:strategy|part)-\d)", page), "ink", "grid", "muted"}:
        assert f"--{name}:" in dark
    figures = page[page.index("</style>") :]
    assert not re.search(r"(?<!, )#(?:000000|1c2127|d55e00)", figures)


def test_the_page_says_what_was_measured(page: str, outcomes: list[Outcome]) -> None:
    text = " ".join(parsed(page).text.split())
    killed = group(outcomes, "none", "kill")
    for key in ("accuracy_final", "updates_lost", "rto_seconds", "sent_bytes_all", "cost_usd"):
        spread = killed.spread(key)
        assert spread
        assert BY_KEY[key].text(spread.mean) in text
    assert "applied twice: none in 16 trials" in text


def test_the_page_names_the_configuration_the_versions_and_the_prices(page: str) -> None:
    text = parsed(page).text
    assert "dps run demo.yaml" in text
    assert "learning_rate: 0.1" in text
    assert "0.1.0" in text
    assert load_prices().sources["gb_moved"] in text


def test_every_figure_on_the_page_is_defined_there(page: str) -> None:
    text = parsed(page).text
    for key in ("updates_lost", "rto_seconds", "staleness_p99", "peak_bytes_all", "cost_usd"):
        assert BY_KEY[key].definition in text


@pytest.mark.slow
def test_invalid_and_failed_trials_are_named_and_left_out(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path)
    write_events(folder / "chain.kill.seed-0", missed(toy_events("chain", "no fault")))
    failed = [*toy_events("chain", "kill", 1)[:-1], TrialEnded(2e9, "failed", "<out of memory>")]
    write_events(folder / "chain.kill.seed-1", failed)
    text = " ".join(parsed(write_report(folder, tmp_path / "r.html").read_text()).text.split())
    assert "2 of 16 trials are left out of every figure and statistic" in text
    assert "invalid: the training ended first" in text
    assert "failed: <out of memory>" in text
    groups = summarize([outcome for _, outcome in read_trials(folder, load_prices())])
    assert sum(len(g.left_out) for g in groups) == 2
    assert sum(len(g.trials) for g in groups) == 14


def test_a_broken_promise_is_shown(tmp_path: Path) -> None:
    events = toy_events("chain", "no fault")
    applied = next(event for event in events if type(event).__name__ == "Applied")
    twice = [*events[:-1], _again(applied), events[-1]]
    write_events(tmp_path / "chain.no-fault.seed-0", twice)
    text = parsed(write_report(tmp_path, tmp_path / "r.html").read_text()).text
    assert "applied twice in chain.no-fault.seed-0" in text


def _again(applied: object) -> object:
    later = tuple(version + 5000 for version in applied.versions)  # type: ignore[attr-defined]
    return dataclasses.replace(applied, versions=later)  # type: ignore[type-var]


def test_a_report_of_one_trial_without_axes(tmp_path: Path) -> None:
    started, *rest = toy_events("none", "no fault")
    settings = {**started.settings, "labels": {}}  # type: ignore[attr-defined]
    write_events(tmp_path / "seed-0", [dataclasses.replace(started, settings=settings), *rest])  # type: ignore[call-arg]
    page = write_report(tmp_path, tmp_path / "r.html").read_text()
    assert "All trials" in parsed(page).text


def test_a_report_where_nothing_is_valid(tmp_path: Path) -> None:
    write_events(tmp_path / "a", [*toy_events()[:-1], TrialEnded(2e9, "failed", "no memory")])
    text = parsed(write_report(tmp_path, tmp_path / "r.html").read_text()).text
    assert "failed: no memory" in text


@pytest.mark.slow
def test_only_the_trials_of_the_last_run(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "experiment")
    write_grid(tmp_path / "experiment", ["none.kill.seed-0", "chain.kill.seed-0"], 0)
    text = parsed(write_report(tmp_path / "experiment", tmp_path / "r.html").read_text()).text
    assert "applied twice: none in 2 trials" in text
    assert "stateless" not in text[: text.index("Configuration")]


def test_a_folder_without_trials(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no trial has been recorded"):
        write_report(tmp_path, tmp_path / "report.html")


@pytest.mark.slow
def test_a_report_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailable, match="report cannot be written"):
        write_report(folder, tmp_path / "file" / "report.html")


# -- repeating ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_configuration_on_the_page_expands_to_the_same_trials(folder: Path) -> None:
    records = [record for record, _ in read_trials(folder, load_prices())]
    again = expand(ExperimentConfig.model_validate(yaml.safe_load(experiment_yaml(records))))
    assert {t.digest for t in again} == {t.digest for t in demo_trials()}
    assert {t.name for t in again} == {t.name for t in demo_trials()}


# -- words and figures -------------------------------------------------------------------------


def test_ranges_are_given_as_ranges(outcomes: list[Outcome]) -> None:
    killed = group(outcomes, "none", "kill")
    rto = killed.spread("rto_seconds")
    assert rto
    said = words.span(killed, "rto_seconds", " s")
    assert said == f"{rto.low:.2f}–{rto.high:.2f} s"
    assert words.span(killed, "updates_lost") == str(KILL_AT)
    assert words.span(group(outcomes, "none", "no fault"), "rto_seconds") is None


def test_the_rule_of_curves_in_outages_stands_where_effects_do(
    folder: Path, tmp_path: Path
) -> None:
    said = "if accuracy is worse after it, it drops where the outage began"
    assert said in BY_KEY["effect_time_mean"].definition
    page = parsed(write_report(folder, tmp_path / "r.html").read_text()).text
    assert page.count(said) >= 2  # below the table at a glance, and among the definitions


def test_where_there_is_no_control_no_effect_is_told(
    folder: Path, outcomes: list[Outcome], tmp_path: Path
) -> None:
    assert without_effect(outcomes) == ""
    for name in ("chain.kill.seed-0", "chain.kill.seed-1", "chain.no-fault.seed-0"):
        shutil.copytree(folder / name, tmp_path / name)
    alone = [outcome for _, outcome in read_trials(tmp_path, load_prices())]
    said = "The effect of the faults is unknown for 1 of 2 valid trials: chain.kill.seed-1 (it has"
    assert without_effect(alone).startswith(said)
    page = write_report(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8")
    assert said in page


def test_descriptions_are_named_so_and_stand_in_no_headline(outcomes: list[Outcome]) -> None:
    described = ["accuracy_before", "accuracy_after", "accuracy_drop", "regain_seconds"]
    assert all("(description)" in BY_KEY[key].label for key in described)
    assert all(BY_KEY[key].definition.startswith("Description, not an") for key in described)
    compared = ComparisonSection().metrics
    glanced = {*tables.GLANCE, *tables.GLANCE_WITHOUT_FAULTS}
    assert not {*compared, *glanced, *tables.PER_TRIAL} & {*described}
    assert {"effect_time_mean", "effect_gradients_mean", "effect_money_mean"} <= {*compared}
    [kill] = tables.glance(summarize(outcomes))
    assert kill.headings[0] == BY_KEY["effect_time_mean"].label
    none = dict(kill.rows)["none"]
    assert none[0].mean.startswith("−")
    assert none[0].mean.endswith(" points")


@pytest.mark.parametrize("order", [["no fault", "kill"], ["kill", "no fault"]], ids="-".join)
def test_conditions_have_the_order_of_the_configuration_everywhere(
    folder: Path, tmp_path: Path, order: list[str]
) -> None:
    shutil.copytree(folder, tmp_path / "experiment")
    names = [path.name for path in (tmp_path / "experiment").iterdir() if path.is_dir()]
    labels = {"recovery": list(STRATEGIES), "faults": order}
    write_grid(tmp_path / "experiment", names, 0, labels)
    found = read_experiment(tmp_path / "experiment", load_prices())
    assert list(conditions([each.outcome for each in found])) == order
    page = write_report(tmp_path / "experiment", tmp_path / "r.html").read_text()
    assert (
        list(yaml.safe_load(text_between(page, "Configuration", "pre"))["axes"]["faults"]) == order
    )
    part = page[page.index('<section id="comparison">') :]
    summaries = re.findall(r"<summary>([^<]*)", part[: part.index("</section>")])
    assert [said.strip() for said in summaries] == order
    titles = [re.sub("<[^>]+>", "", said) for said in re.findall(r"<h4>(.*?)</h4>", page)]
    for title in ("Loss against gradients", "Cost against accuracy"):
        said = [each.split(", ")[-1] for each in titles if each.startswith(f"{title}, ")]
        assert said == order


@pytest.mark.slow
def test_strategies_have_the_order_of_the_configuration_everywhere(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "experiment")
    names = [path.name for path in (tmp_path / "experiment").iterdir() if path.is_dir()]
    order = ["stateless", "none", "chain", "checkpoint"]
    assert {*order} == {*STRATEGIES} != order
    write_grid(tmp_path / "experiment", names, 0, {"recovery": order, "faults": ["kill"]})
    found = read_experiment(tmp_path / "experiment", load_prices())
    trials = [(each.record, each.outcome) for each in found]
    assert list(strategies([outcome for _, outcome in trials])) == order
    console = Console(record=True, width=200)
    print_comparison([outcome for _, outcome in trials], console)
    printed = re.findall(rf"^ ?({'|'.join(order)}) .*kill", console.export_text(), re.MULTILINE)
    assert printed[: len(order)] == order
    for drawing in drawings(chapters(trials)):
        for legend in drawing.figure.legends:
            told = [text.get_text() for text in legend.get_texts()]
            shown = [each for each in told if each in order]
            assert shown == [each for each in order if each in shown], drawing.name
    page = write_report(tmp_path / "experiment", tmp_path / "r.html").read_text()
    for part in page.split("<table")[1:]:
        rows = re.findall(r'scope="row"><span class="strategy"[^>]*>([^<]+)</span></th>', part)
        assert rows == [each for each in order if each in rows]


def test_numbers_have_the_order_of_the_configuration(outcomes: list[Outcome]) -> None:
    order = ["every 500", "every 20", "every 100"]
    found = [
        dataclasses.replace(
            outcomes[0],
            identity=dataclasses.replace(outcomes[0].identity, labels={"recovery": label}),
        )
        for label in sorted(order)
    ]
    assert strategies(found) == ("every 20", "every 100", "every 500"), "which was not noted"
    assert list(strategies([ranked(each, {"recovery": order}) for each in found])) == order


def test_each_strategy_is_explained_in_a_line(folder: Path) -> None:
    records = [record for record, _ in read_trials(folder, load_prices())]
    told = dict(strategy_notes(records, STRATEGIES))
    assert list(told) == list(STRATEGIES)
    assert "initial values" in told["none"]
    assert "2 servers hold each shard" in told["chain"]
    assert "up to 32 updates per shard" in told["stateless"]


def test_what_is_0_for_every_strategy_has_no_line(outcomes: list[Outcome]) -> None:
    table = tables.figure_table(summarize(outcomes), "no fault")
    lines = {line.column.key for _, lines in table.sections for line in lines}
    zeros = {column.key for column in table.zeros}
    assert "updates_applied_twice" in zeros
    assert not zeros & lines
    assert "accuracy_final" in lines


def test_a_strategy_keeps_its_look_whatever_is_beside_it() -> None:
    alone, together = looks(["chain"]), looks(["mine", "stateless", "chain"])
    assert alone["chain"] == together["chain"]
    assert together["mine"].colour == STRATEGY_COLOURS[4]


@pytest.mark.slow
def test_every_figure_is_a_file_of_each_kind_and_its_table_holds_what_is_drawn(
    folder: Path, tmp_path: Path
) -> None:
    found = chapters(read_trials(folder, load_prices()))
    assert [chapter.name for chapter in found] == [
        "accuracy",
        "recovery",
        "money",
        "through",
        "timeline",
        "work",
        "resources",
    ]
    drawn = list(drawings(found))
    write_files(drawn[:2], tmp_path)
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".pdf", ".png", ".csv"}
    assert (tmp_path / f"{drawn[0].name}.png").read_bytes().startswith(b"\x89PNG")
    names = {drawing.name for drawing in drawn}
    assert len(names) == len(drawn)
    assert {
        "accuracy-time-kill",
        "timeline-kill-chain",
        "recovery-time",
        "cost-accuracy-kill",
    } <= names
    for drawing in drawn:
        header, *rows = csv.reader(drawing.csv.splitlines())
        assert rows
        assert {len(row) for row in rows} == {len(header)}


@pytest.mark.slow
def test_the_table_of_recovery_times_agrees_with_the_outcomes(
    folder: Path, outcomes: list[Outcome]
) -> None:
    drawn = {d.name: d for d in drawings(chapters(read_trials(folder, load_prices())))}
    rto = group(outcomes, "chain", "kill").spread("rto_seconds")
    assert rto
    rows = [row for row in drawn["recovery-time"].table.rows if row[0] == "chain"]
    assert sum(row[3] for row in rows if row[2] != "total of a trial") == pytest.approx(rto.mean)
    assert {row[3] for row in rows if row[2] == "total of a trial"} == {rto.low, rto.high}


def test_time_through_a_fault_counts_from_the_one_that_took_a_shard_down(tmp_path: Path) -> None:
    events = toy_events("chain", "kill", 0)
    [kill] = [event for event in events if isinstance(event, Killed)]
    harmless = Disturbed(kill.t - 0.2, 1, "slow", "worker-0", 40, "it was slow", True)
    record = read_record(write_events(tmp_path, [*events[:-1], harmless, events[-1]]))
    [drawn] = [
        drawing
        for drawing in drawings(chapters([(record, outcome(record, load_prices()))]))
        if drawing.name == "through-fault-kill-chain"
    ]
    times = [since for *_, since, accuracy in drawn.table.rows if not np.isnan(accuracy)]
    assert times == pytest.approx([step.t - kill.t for step in evaluations(record)])


@pytest.mark.slow
def test_the_timeline_tells_every_part_of_a_recovery(folder: Path) -> None:
    drawn = {d.name: d for d in drawings(chapters(read_trials(folder, load_prices())))}
    rows = drawn["timeline-kill-checkpoint"].table.rows
    lanes = {row[0] for row in rows}
    assert {"shard 0", "shard 1", "server-0", "server-0-b", "worker-1"} <= lanes
    down = [row for row in rows if row[0] == "shard 0" and row[4] == "fault 0"]
    assert [row[1] for row in down] == ["detect", "wait for a node", "restore"]
    assert all(before[3] == after[2] for before, after in pairwise(down))
    assert ("server-0", "fault") in {row[:2] for row in rows}


def test_a_band_is_there_only_where_every_seed_has_a_value() -> None:
    x = np.array([0.0, 1.0, 2.0, 3.0])
    gap = np.array([1.0, np.nan, 1.0, 1.0])
    found = band([Curve("a", 0, x, gap), Curve("a", 1, x[:3], 3 * np.ones(3))])
    assert found
    assert (found.x[0], found.x[-1]) == (0.0, 2.0)
    assert np.isnan(found.mean[1:-1]).all()
    assert (found.mean[-1], found.low[-1], found.high[-1]) == (2.0, 1.0, 3.0)


def test_a_band_over_three_seeds_is_the_interval_of_the_mean() -> None:
    x = np.array([0.0, 1.0])
    found = band([Curve("a", seed, x, np.full(2, float(seed))) for seed in range(3)])
    assert found
    # Student's t with 2 degrees of freedom: 4.303 × 1 / √3.
    assert found.high[0] - found.mean[0] == pytest.approx(2.484, abs=1e-3)
    assert found.mean[0] - found.low[0] == pytest.approx(2.484, abs=1e-3)


def test_the_front_holds_what_nothing_beats_in_both() -> None:
    points = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.8), (1.0, 0.4), (4.0, 0.95)]
    assert front(points) == [(1.0, 0.5), (2.0, 0.9), (4.0, 0.95)]
    losses = [(cost, 1 - value) for cost, value in points]
    assert front(losses, -1) == [(1.0, 0.5), (2.0, 1 - 0.9), (4.0, 1 - 0.95)]


@pytest.mark.slow
def test_words_and_legends_speak_only_of_what_is_drawn(folder: Path) -> None:
    trials = [
        each for each in read_trials(folder, load_prices()) if each[1].identity.seed in (0, 1)
    ]
    drawn = {d.name: d for d in drawings(chapters(trials))}
    [tradeoff, *_] = [d for name, d in drawn.items() if name.startswith("cost-accuracy")]
    assert "(n = 2 seeds; a 95% interval would take 3 seeds at least)" in tradeoff.note
    [roles, *_] = [d for name, d in drawn.items() if name.startswith("cpu-roles")]
    [legend] = roles.figure.legends
    named = {text.get_text() for text in legend.get_texts()}
    assert "server" in named
    assert named == {row[2] for row in roles.table.rows if row[3] > 0}


def test_names_of_files_differ_even_where_labels_hardly_do() -> None:
    found = slugs(["a b", "a-b", "A/B", ""])
    assert len(set(found.values())) == 4
    assert all(re.fullmatch(r"[a-z0-9.~-]*", slug) for slug in found.values())


def test_a_table_leaves_gaps_empty() -> None:
    table = Table(("a", "b"), ((1, float("nan")), (None, 0.123456789)))
    assert table.to_csv() == "a,b\n1,\n,0.123457\n"


def test_what_is_said_of_faults_of_any_kind() -> None:
    fault = dict.fromkeys(field.name for field in dataclasses.fields(FaultTimes))
    seen = {**fault, "fault": 0, "node": "server-1", "updates": 9, "began": 12.0, "ended": 13.5}
    told = words.told(FaultTimes(**{**seen, "kind": "slow"}), 10.0)  # type: ignore[arg-type]
    assert told == "server-1 was slowed down at 2.00 s for 1.50 s, and every shard went on serving"
    lost = words.told(FaultTimes(**{**seen, "kind": "host", "ended": None}), 10.0)  # type: ignore[arg-type]
    assert lost.startswith("server-1 was lost with its host at 2.00 s")
    assert "hit by “flood”" in words.told(FaultTimes(**{**seen, "kind": "flood"}), 10.0)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_resumed_trial_is_said_to_be_one_and_left_out_of_figures_over_time(
    tmp_path: Path,
) -> None:
    events = toy_events("checkpoint", "no fault")
    began = next(event.t for event in events if type(event).__name__ == "TrainingStarted")
    resumed = [*events[:-1], TrialResumed(began, "somewhere", 250), events[-1]]
    write_events(tmp_path / "checkpoint.no-fault.seed-0", resumed)
    write_events(tmp_path / "chain.no-fault.seed-0", toy_events("chain", "no fault"))
    trials = read_trials(tmp_path, load_prices())
    drawn = {d.name: d for d in drawings(chapters(trials))}
    over_time = drawn["accuracy-time-no-fault"]
    assert {row[0] for row in over_time.table.rows} == {"chain"}
    assert "1 of the trials was resumed" in over_time.note
    against = drawn["accuracy-gradients-no-fault"].table.rows
    assert min(row[2] for row in against if row[0] == "checkpoint") >= 250
    text = parsed(write_report(tmp_path, tmp_path / "r.html").read_text()).text
    assert "went on from its checkpoints at 250 updates" in text
    rows = {outcome.identity.strategy: outcome.row() for _, outcome in trials}
    for key in ("training_seconds", "updates_acked", "cpu_seconds_all", "cost_usd"):
        assert rows["checkpoint"][key] is None
        assert rows["chain"][key] is not None
    assert rows["checkpoint"]["accuracy_final"] is not None
    assert rows["checkpoint"].keys() == rows["chain"].keys()


def test_numbers_read_well() -> None:
    seconds, share, money = (BY_KEY[k] for k in ("rto_seconds", "accuracy_final", "cost_usd"))
    assert [seconds.text(v) for v in (0, 0.0412, 1.583, 12.34, 1234.5)] == [
        "0",
        "0.041",
        "1.58",
        "12.3",
        "1,234",
    ]
    assert share.text(0.9567) == "95.7"
    assert [money.text(v) for v in (0.0012345, 1e-9, 2.5)] == ["0.001234", "<0.000001", "2.50"]
    assert BY_KEY["updates_lost"].text(1234) == "1,234"
    assert BY_KEY["accuracy_drop"].text(-0.019) == "−1.9"
    assert seconds.text(None) == "–"
    assert BY_KEY["peak_bytes_all"].text(159_800_000) == "160"


def test_series_are_in_order_and_cover_the_training(folder: Path) -> None:
    record = read_record(folder / "chain.kill.seed-0" / EVENTS_FILE)
    points = series(record)
    assert [p.t for p in points] == sorted(p.t for p in points)
    names = {p.name for p in points}
    assert {"train/loss", "eval/accuracy", "staleness/p99", "server/updates"} <= names


@pytest.mark.slow
def test_rendering_is_deterministic(folder: Path) -> None:
    trials, prices = read_trials(folder, load_prices())[:4], load_prices()
    pages = [render(trials, prices, ComparisonSection(), chapters(trials)) for _ in range(2)]
    assert pages[0] == pages[1]


# -- verdicts ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unsure_page() -> str:
    metrics = ("accuracy_final", "accuracy_drop", "rto_seconds", "updates_lost")
    section = ComparisonSection(metrics=(*metrics, "gradients_per_second", "cost_usd"))
    return render(unsure_trials(), load_prices(), section, [])


def test_what_was_not_claimed_is_exploratory_on_the_page(unsure_page: str) -> None:
    text = text_of(unsure_page)
    assert "No claims were fixed beforehand" in text
    assert "Exploratory statistics" in text
    assert "p 0.032 lower" in text
    assert "holds" not in text.partition("Exploratory statistics")[0]


def test_the_page_opens_with_what_faults_did_and_what_to_be_ready_costs(tmp_path: Path) -> None:
    found = read_experiment(write_experiment(tmp_path), load_prices())
    told = words.in_short(summarize([each.outcome for each in found]))
    assert len(told) == 3
    assert re.match(r"server-0 was killed with SIGKILL after [\d,]+ (to [\d,]+ )?updates", told[0])
    rows = [each.outcome.row() for each in found]
    means = {
        name: BY_KEY["effect_time_mean"].text(
            np.mean([r["effect_time_mean"] for r in rows if r["strategy"] == name and r["control"]])
        )
        for name in STRATEGIES
    }
    for name, mean in means.items():
        assert f"{mean} points with {name}" in told[1]
    assert told[1].index(" with chain") < told[1].index(" with none"), "the best first"
    assert "(mean of 2 seeds)" in told[1]
    assert re.fullmatch(
        r"Without a fault, (\w+ cost \d\.\d\d times(, | and )?){3} the money of none\.", told[2]
    )


def test_without_faults_the_page_opens_with_what_came_of_each_setting(
    outcomes: list[Outcome],
) -> None:
    quiet = summarize([outcome for outcome in outcomes if not outcome.faults])
    told = words.in_short(quiet)
    assert told[0] == "4 settings of recovery were run without faults, each with 2 seeds."
    best = max(mean.mean for group in quiet if (mean := group.spread("accuracy_final")))
    assert told[1].startswith(f"Final accuracy was {BY_KEY['accuracy_final'].text(best)}% with")
    assert told[2].endswith("the money of none.")
    [table] = tables.glance(quiet)
    assert [name for name, _ in table.rows] == list(STRATEGIES)
    assert "money" in table.headings
    assert words.in_short(quiet[:1])[2].startswith("It cost ")


@pytest.mark.slow
def test_several_claims_are_counted_and_the_first_one_s_figure_opens(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "demo")
    named = {"effect_gradients_mean": "A is better", "accuracy_final": "B is better"}
    write_claims(
        tmp_path / "demo",
        [
            ClaimSection.model_validate(
                {
                    "claim": claim,
                    "metric": metric,
                    "strategy": "chain",
                    "against": "none",
                    "condition": {"faults": "kill"},
                    "direction": "more",
                    "smallest": 0.01,
                }
            )
            for metric, claim in named.items()
        ],
    )
    page = write_report(tmp_path / "demo", tmp_path / "r.html").read_text()
    short = text_of(page[page.index('<section id="short">') : page.index('<section id="claims">')])
    assert "Of 2 claims, 2 of them fixed after the data, 2 are not resolved." in short
    assert "Not resolved: A is better (effect on accuracy, after as many gradients: " in short
    assert "; B is better (final accuracy: " in short
    [first, *_] = re.findall(r"<h4>(.*?)</h4>", page)
    assert first == "Accuracy against gradients, kill"


def test_means_are_of_as_many_seeds_as_have_the_figure(outcomes: list[Outcome]) -> None:
    quiet = [each for each in summarize(outcomes) if not each.faulty]
    quiet[1] = dataclasses.replace(quiet[1], trials=quiet[1].trials[:1])
    told = words.in_short(quiet)
    assert told[0].endswith("were run without faults, each with 1 to 2 seeds.")
    assert told[1].endswith(" (means of 1 to 2 seeds).")
    kill = [each for each in summarize(outcomes) if each.faulty]
    [first, second] = kill[0].trials
    unknown = dataclasses.replace(first, effects=UNKNOWN)
    kill[0] = dataclasses.replace(kill[0], trials=(unknown, second))
    assert words.in_short(kill)[1].endswith(" (means of 1 to 2 seeds).")


def test_a_trial_that_met_no_fault_is_told_of(outcomes: list[Outcome]) -> None:
    kill = [each for each in summarize(outcomes) if each.faulty]
    trials = sum(len(each.trials) for each in kill)
    [first, second] = kill[0].trials
    kill[0] = dataclasses.replace(kill[0], trials=(dataclasses.replace(first, faults=()), second))
    assert f"So it was in {trials - 1} of {trials} trials" in words.plan(kill)
    many = dataclasses.replace(second, faults=second.faults * 5)
    kill[0] = dataclasses.replace(kill[0], trials=(kill[0].trials[0], many))
    assert words.plan(kill[:1]).startswith("0 to 5 faults in each trial")


def test_the_page_opens_with_the_claims_and_their_verdicts() -> None:
    claims = [
        ClaimSection.model_validate(
            {
                "claim": "A chain ends lower than no recovery",
                "metric": "accuracy_final",
                "strategy": "chain",
                "against": "none",
                "direction": "less",
                "smallest": 0.01,
            }
        )
    ]
    page = render(unsure_trials(), load_prices(), ComparisonSection(), [], claims=claims)
    text = text_of(page)
    section = text.index("What was claimed, and what came of it")
    short = text[text.index("In short ") : section]
    assert (
        "Holds: A chain ends lower than no recovery (final accuracy: 44.0 points less [9.2, 78.8])."
    ) in short
    assert "differed on average" not in short
    assert section < text.index("A chain ends lower than no recovery: holds")
    assert (
        "Final accuracy with chain: 44.0 points less than with none [9.2, 78.8], 3 seeds, "
        "p = 0.032: holds (by 1 point or more)."
    ) in text
    assert "Fixed after the data: 6 of its 6 trials had begun before." in text
    assert "claims:" in page, "the configuration repeats them"
