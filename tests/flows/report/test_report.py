"""Reports: self-contained pages whose every number is one of the outcomes'."""

from __future__ import annotations

import dataclasses
import html
import io
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from dps.errors import ConfigurationError, StoreUnavailable
from flows.config.claims import ClaimSection
from flows.metrics.prices import load_prices
from flows.records.events import TrialEnded, TrialResumed, TrialStarted
from flows.records.owner import LOCK_FILE, exclusive
from flows.records.record import EVENTS_FILE, write_configuration, write_grid
from flows.report import tables
from flows.report.html import open_study, write_report
from flows.report.study import Study
from flows.report.terminal import print_study, print_table
from flows.statistics.comparison import Questions, write_questions
from tests.support.synthetic import missed, toy_events, write_events, write_experiment


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_experiment(tmp_path_factory.mktemp("results") / "demo")


@pytest.fixture(scope="module")
def study(folder: Path) -> Study:
    return open_study(folder, load_prices())[0]


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return write_report(folder, folder / "report.html").read_text()


class Tags(HTMLParser):
    """Collects tags with their attributes, checks that they are closed in order, keeps the text."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr", "path", "use", "rect", "circle"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def values(self, *names: str) -> list[str]:
        return [value or "" for _, each in self.tags for k, value in each.items() if k in names]


def parsed(page: str) -> Tags:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags


def text_of(page: str) -> str:
    return " ".join(parsed(page).text.split())


def section(page: str, name: str) -> str:
    part = page[page.index(f'<section id="{name}">') :]
    return part[: part.index("</section>") + len("</section>")]


# -- the page ----------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_anywhere(page: str) -> None:
    assert all(
        value.startswith(("#", "data:"))
        for value in parsed(page).values("src", "href", "data", "xlink:href")
    )
    assert "<script" not in page
    assert "@import" not in page
    assert not re.search(r"url\((?!#)", page)


def test_every_reference_has_its_target_and_no_id_occurs_twice(page: str) -> None:
    ids = parsed(page).values("id")
    assert len(ids) == len(set(ids))
    used = {*re.findall(r"url\(#([^)]+)\)", page), *re.findall(r'href="#([^"]+)"', page)}
    assert used
    assert used <= {*ids}


def test_tables_have_headers_and_figures_have_texts_for_screen_readers(page: str) -> None:
    tags = parsed(page).tags
    assert {each.get("scope") for tag, each in tags if tag == "th"} == {"row", "col"}
    pictures = [each for tag, each in tags if tag == "div" and each.get("role") == "img"]
    assert len(pictures) == sum(tag == "figure" for tag, _ in tags) == 5
    assert all(each["aria-label"] for each in pictures)
    regions = [each for _, each in tags if each.get("role") == "region"]
    assert all(each["aria-label"] and each["tabindex"] == "0" for each in regions)


def test_the_table_at_a_glance_has_the_outcomes_and_the_control(page: str, study: Study) -> None:
    text = text_of(section(page, "glance"))
    groups = study.valid.groupby(["strategy", "condition"])
    for key in ("effect_time_mean", "accuracy_final", "updates_lost"):
        assert study.text(key, groups.get_group(("none", "kill"))[key].mean()) in text
    quiet = groups.get_group(("none", "no fault"))["accuracy_final"]
    assert study.text("accuracy_final", quiet.mean()) in text
    assert "control: final accuracy, %" in text
    assert "applied twice: none in 16 trials" in text
    assert f"server-0 {317} {317}" in text, "when the faults were"


def test_the_header_names_model_and_data_and_money_can_be_read(page: str, study: Study) -> None:
    facts = dict(study.facts)
    assert (facts["model"], facts["data"]) == ("mlp (32 hidden units)", "digits")
    assert (facts["trials"], facts["seeds"]) == ("16 valid", "0, 1")
    assert "money, µUSD" in text_of(page)
    assert study.text("cost_usd", 0.000722) == "722"


def test_a_user_s_own_model_and_data_are_named_as_in_the_configuration(tmp_path: Path) -> None:
    started, *rest = toy_events("none", "no fault")
    assert isinstance(started, TrialStarted)
    config = {
        **started.settings["config"],
        "workload": {"kind": "python", "function": "mine.py:model"},
        "dataset": {"kind": "csv", "path": "/home/me/prices.csv"},
    }
    changed = {**started.settings, "config": config, "labels": {}}
    write_events(tmp_path / "seed-0", [dataclasses.replace(started, settings=changed), *rest])
    facts = dict(open_study(tmp_path, load_prices())[0].facts)
    assert (facts["model"], facts["data"]) == ("mine.py:model", "prices.csv")


def test_losses_are_in_the_summary(page: str) -> None:
    text = text_of(section(page, "claims"))
    assert "none, kill: lost acknowledged or buffered updates in 2 of 2 trials (mean 317.0)" in text
    assert "none, kill" in text
    assert "lost all copies of a shard in 2 of 2 trials" in text
    assert "chain, kill: lost" not in text


def test_the_results_of_a_run_fit_a_screen(study: Study) -> None:
    out = io.StringIO()
    print_study(study, None, Console(file=out, width=100))
    lines = out.getvalue().splitlines()
    assert any(line.startswith("none, kill: lost acknowledged") for line in lines)
    assert len(lines) <= 26
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("width", [80, 100])
def test_no_number_of_a_table_is_cut(study: Study, width: int) -> None:
    out = io.StringIO()
    table = tables.trials(study, brief=True)
    print_table(table, Console(file=out, width=width))
    printed = out.getvalue()
    words = {word for column in table.columns for word in column.split()}
    assert words | {*table.to_numpy().flat} <= {*printed.split()}
    assert max(map(len, printed.splitlines())) <= width


def test_question_claims_and_configuration_are_those_of_the_user(
    folder: Path, page: str, tmp_path: Path
) -> None:
    assert "No claims were fixed beforehand" in page
    for name in (
        f"{strategy}.kill.seed-{seed}" for strategy in ("none", "chain") for seed in (0, 1)
    ):
        shutil.copytree(folder / name, tmp_path / "demo" / name)
    claim = {
        "claim": "a chain is <best>",
        "metric": "rto_seconds",
        "strategy": "chain",
        "against": "none",
        "condition": {"faults": "kill"},
        "direction": "less",
        "smallest": 0.5,
    }
    asked = Questions(claims=(ClaimSection.model_validate(claim),))
    write_questions(tmp_path / "demo", asked)
    written = "# yaml-language-server: $schema=x\n# What does it\n# cost?\n#\n# More.\n"
    written += "experiment: demo\n"
    write_configuration(tmp_path / "demo", written)
    page = write_report(tmp_path / "demo", tmp_path / "r.html").read_text()
    text = text_of(section(page, "claims"))
    assert "A chain is <best>: not resolved" in text
    assert "a verdict takes at least 3 seeds" in text
    assert "fixed after the data: 4 of 4 trials began before" in text
    assert '<p class="question">What does it cost?</p>' in page
    assert html.escape(written) in page


# -- what does not count -----------------------------------------------------------------------


@pytest.mark.slow
def test_trials_that_do_not_count_are_named_with_the_next_command(tmp_path: Path) -> None:
    folder = write_experiment(tmp_path / "demo")
    write_events(folder / "chain.kill.seed-0", missed(toy_events("chain", "kill")))
    failed = [*toy_events("chain", "kill", 1)[:-1], TrialEnded(2e9, "failed", "<out of memory>")]
    write_events(folder / "chain.kill.seed-1", failed)
    started, *rest = toy_events("none", "kill", 1)
    resumed = [started, TrialResumed(rest[0].t, "c", 100), *rest]
    write_events(folder / "none.kill.seed-1", resumed)
    text = text_of(write_report(folder, tmp_path / "r.html").read_text())
    assert "14 valid, 1 invalid, 1 failed" in text
    assert "chain.kill.seed-0 is invalid and left out: the training ended first" in text
    assert "chain.kill.seed-1 is failed and left out: <out of memory>" in text
    assert "none.kill.seed-1 was resumed from its checkpoints" in text
    assert "--retry-invalid" in text
    assert "--no-resume" in text


def test_only_what_a_command_writes_now_is_running(tmp_path: Path) -> None:
    path = write_events(tmp_path / "a", toy_events())
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # drop the end event

    def status() -> str:
        (outcome,) = open_study(tmp_path, load_prices())[0].outcomes
        return outcome.status

    assert status() == "failed"
    with exclusive(tmp_path):
        lock = json.loads((tmp_path / LOCK_FILE).read_text())
        os.utime(path, (lock["since"] + 1, lock["since"] + 1))
        assert status() == "running"
        os.utime(path, (lock["since"] - 1, lock["since"] - 1))
        assert status() == "failed", "left by an earlier command"
    os.utime(path, (lock["since"] + 1, lock["since"] + 1))
    killed = {**lock, "began": lock["began"] - 100}  # its pid belongs to another process now
    (tmp_path / LOCK_FILE).write_text(json.dumps(killed))
    assert status() == "failed"


def test_a_broken_promise_is_shown(tmp_path: Path) -> None:
    events = toy_events("chain", "no fault")
    applied = next(event for event in events if type(event).__name__ == "Applied")
    versions = tuple(version + 5000 for version in applied.versions)  # type: ignore[attr-defined]
    again = dataclasses.replace(applied, versions=versions)  # type: ignore[type-var, call-arg]
    write_events(tmp_path / "chain.no-fault.seed-0", [*events[:-1], again, events[-1]])
    page = write_report(tmp_path, tmp_path / "r.html").read_text()
    assert '<li class="broken">applied twice: in chain.no-fault.seed-0' in page


def test_where_there_is_no_control_it_is_said(folder: Path, tmp_path: Path) -> None:
    for name in ("chain.kill.seed-0", "chain.kill.seed-1", "chain.no-fault.seed-0"):
        shutil.copytree(folder / name, tmp_path / name)
    page = write_report(tmp_path, tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The effect of the faults is unknown for 1 of 2 valid trials: chain.kill.seed-1" in page


def test_a_report_where_nothing_is_valid(tmp_path: Path) -> None:
    write_events(tmp_path / "a", [*toy_events()[:-1], TrialEnded(2e9, "failed", "no memory")])
    text = text_of(write_report(tmp_path, tmp_path / "r.html").read_text())
    assert "failed and left out: no memory" in text
    assert "No trial is valid yet" in text


def test_records_that_cannot_be_used_are_reported(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "none.kill.seed-0", tmp_path / "whole")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / EVENTS_FILE).write_text("")
    told = list[str]()
    page = write_report(tmp_path, tmp_path / "r.html", warn=told.append).read_text()
    assert told == ["begun is left out because its record is still empty"]
    assert told[0] in page


def test_a_folder_without_trials_and_a_place_that_cannot_be_written(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match="no trial has been recorded"):
        write_report(tmp_path, tmp_path / "report.html")
    (tmp_path / "file").write_text("in the way")
    shutil.copytree(folder / "none.kill.seed-0", tmp_path / "small" / "none.kill.seed-0")
    with pytest.raises(StoreUnavailable, match="report cannot be written"):
        write_report(tmp_path / "small", tmp_path / "file" / "report.html")


# -- order -------------------------------------------------------------------------------------


def test_strategies_and_conditions_have_the_order_of_the_configuration(
    folder: Path, tmp_path: Path
) -> None:
    order, strategies = ["kill", "no fault"], ["chain", "none"]
    names = [f"{s}.{fault}.seed-0" for s in strategies for fault in ("no-fault", "kill")]
    for name in names:
        shutil.copytree(folder / name, tmp_path / "demo" / name)
    write_grid(tmp_path / "demo", names, 0, {"recovery": strategies, "faults": order})
    study, _ = open_study(tmp_path / "demo", load_prices())
    assert list(study.conditions) == order
    assert list(study.strategies) == strategies
    page = write_report(tmp_path / "demo", tmp_path / "r.html").read_text()
    found = re.findall(r"<summary>All metrics: ([^<]*)", page)
    assert found == order
    rows = re.findall(r"<th scope=row>([^<]*)", section(page, "glance"))
    assert rows[: len(strategies)] == strategies
