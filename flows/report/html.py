"""The report of an experiment: one HTML file that needs no network and no other file."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dps.errors import ConfigurationError
from flows.analysis.comparison import baseline_of, compared, read_comparison
from flows.analysis.finished import (
    Finished,
    failed_before,
    read_experiment,
)
from flows.analysis.groups import Group, place, ranked, strategies, summarize
from flows.analysis.left_out import remedies_in, short_of_target, without_effect
from flows.analysis.outcome import Outcome
from flows.analysis.prices import Prices, load_prices
from flows.analysis.quiet import unquiet
from flows.analysis.statistics.claims import JudgedClaim, judge, read_claims
from flows.analysis.transports import described
from flows.analysis.virtual_time import told
from flows.config.base import ComparisonSection
from flows.config.claims import ClaimSection
from flows.files import write_whole
from flows.metrics import BY_KEY, Metric
from flows.metrics.effects import LEVEL
from flows.monitor.status import RUNNING, Standing, as_it_stands, under_way
from flows.records.record import labels_of
from flows.report import claims as in_words
from flows.report import sentences as words
from flows.report import tables
from flows.report.drawn_faults import drawn_faults
from flows.report.figures.dataset import Trial, whole
from flows.report.figures.figure import PRINT, SCREEN, Chapter, Drawing, Width, write_files
from flows.report.figures.gallery import chapters, drawings, opening
from flows.report.figures.style import STRATEGY_COLOURS, for_page, looks
from flows.report.reproduce import experiment_yaml, versions
from flows.report.strategies import strategy_notes
from flows.report.terms import TERMS


def page(template: str, **content: Any) -> str:
    """Return the page that a template makes of its content."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("flows", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**content)


TEMPLATE = "report/report.jinja"
FIGURES = "figures"
# What a page carries of files to download; with more of them it would be slow to open.
DOWNLOAD_BYTES = 6_000_000
# A page opens with so many figures of so many chapters, all others are folded; of one chapter less
# where it has more claims.
FIGURES_SHOWN, CHAPTERS_SHOWN, FEW_CLAIMS = 2, 3, 4
# Tables at a glance that are not folded, of one for each condition.
GLANCES_SHOWN = 1
MOST_VALUES, VARIED = 4, "varied"
CONSISTENCY = {
    "asp": "asynchronous (ASP)",
    "bsp": "synchronous (BSP)",
    "ssp": "bounded staleness (SSP)",
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim with its verdict, in words; the tone is that of the verdict."""

    title: str
    verdict: str
    tone: str
    sentence: str
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that must be 0 in every trial, where it is not, and in how many it is known."""

    column: Metric
    broken: tuple[str, ...]
    trials: int


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure on the page, with the files that it can be saved as; these are empty if too long."""

    drawing: Drawing
    svg: str
    files: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A chapter of figures on the page: those that are shown, and those that are folded."""

    chapter: Chapter
    first: tuple[Picture, ...]
    more: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """An entry of the list of contents."""

    target: str
    title: str


def write_report(
    folder: Path,
    output: Path,
    prices: Prices | None = None,
    figures: Path | None = None,
    warn: Callable[[str], None] = lambda _: None,
    recorded: Sequence[Finished] | None = None,
    left_out: Sequence[str] = (),
    kinds: Sequence[str] = (*SCREEN, *PRINT),
    width: Width | None = None,
) -> Path:
    """Write the report of the experiment whose trials are in `folder`; return where it is.

    Parameters
    ----------
    folder
        Holds a folder with a record for each trial.
    output
        The HTML file; replaced as a whole.
    prices
        The price table; None: the one that comes with the package.
    figures
        Gets every figure, as files of these `kinds`, in this `width` (None: each in its own);
        None: they are on the page only.
    warn
        Is told of each record that cannot be used, as the page tells it.
    recorded, left_out
        What is recorded in `folder`, in the order of the names, and what is said of damaged
        records, where they were read already; None: they are read.

    Raises
    ------
    ConfigurationError
        There is no record in the folder that can be used.
    StoreUnavailable
        The report or a figure cannot be written.
    """
    prices = prices or load_prices()
    if recorded is None:
        damaged = list[str]()
        recorded, left_out = read_experiment(folder, prices, damaged.append), damaged
    found, unusable = drawable(recorded), [*left_out, *_empty(recorded)]
    for said in unusable:
        warn(said)
    if not found:
        raise ConfigurationError(
            f"{folder}: no trial has been recorded here. Run the experiment first: dps run CONFIG"
        )
    compared = read_comparison(folder)
    found = in_order(found, labels_of(folder))
    claims = read_claims(folder)
    # Of several claims about a metric the finest counts.
    coarsest_first = sorted(claims, key=lambda each: -each.smallest)
    smallest = {each.metric: each.smallest for each in coarsest_first}
    drawn = chapters(found, smallest)
    going = under_way(folder, recorded)
    running = {standing.trial for standing in going}
    outcomes = [as_it_stands(result, running) for _, result in found]
    todo = remedies_in(folder, outcomes)
    page = render(found, prices, compared, drawn, unusable, going, claims, todo)
    if figures is not None:
        write_files(drawings(drawn), figures, kinds, width)
    write_whole(output, page, "the report")
    return output


def drawable(recorded: Iterable[Finished]) -> list[Trial]:
    """Return the trials that have started, in the order in which they did."""
    begun = [(each.record, each.outcome) for each in recorded if each.record.started]
    return sorted(begun, key=lambda trial: trial[0].events[0].t)


def in_order(trials: Iterable[Trial], labels: Mapping[str, Sequence[str]]) -> list[Trial]:
    """Return trials in the order of the configuration, whose `labels` are given by axis."""
    known = [(record, ranked(outcome, labels)) for record, outcome in trials]
    return sorted(known, key=lambda trial: place(trial[1], labels))


def _empty(recorded: Iterable[Finished]) -> list[str]:
    """Say of which trials there is nothing to show yet."""
    empty = (each.events_file.parent.name for each in recorded if not each.record.started)
    return [f"{name} is left out, nothing is in its record yet" for name in empty]


def render(
    trials: Sequence[Trial],
    prices: Prices,
    comparison: ComparisonSection,
    drawn: Sequence[Chapter],
    unusable: Sequence[str] = (),
    going: Sequence[Standing] = (),
    claims: Sequence[ClaimSection] = (),
    remedies: Sequence[str] = (),
) -> str:
    """Return the page: what was `drawn` of the trials, and what they say of the `claims`.

    What else they say, by the `comparison`, is exploratory.

    `unusable` says which records are left out and why, `going` which trials are running,
    `remedies` which command runs trials that do not count.
    """
    import numpy as np

    running = {standing.trial for standing in going}
    trials = [(record, as_it_stands(result, running)) for record, result in trials]
    outcomes = [outcome for _, outcome in trials]
    records = [record for record, _ in trials]
    groups = [group for group in summarize(outcomes) if group.trials]
    names, score = strategies(outcomes), outcomes[0].score
    baseline = baseline_of(outcomes, comparison)
    # Drawn anew with the same seed, so that the same records always make the same page.
    judged = judge(outcomes, claims, np.random.default_rng(0))
    rows = compared(outcomes, comparison, np.random.default_rng(0)) if groups else ()
    first = _opening(trials, drawn, claims)
    pictured, sections = _sections(drawn, CHAPTERS_SHOWN - (len(claims) > FEW_CLAIMS), first)
    return page(
        TEMPLATE,
        opening=pictured,
        unusable=unusable,
        going=going,
        experiment=outcomes[0].identity.experiment or "experiment",
        facts=_facts(trials),
        glance=(glance := tables.glance(groups, baseline)),
        glances_shown=GLANCES_SHOWN,
        level_rule=score.said(LEVEL),
        effects_told=any(BY_KEY["effect_time_mean"].label in each.headings for each in glance),
        short=_in_short(groups, baseline, judged),
        strategies=strategy_notes(records, names),
        contents=_contents(sections, bool(groups), any(row.p for row in rows)),
        claims=[_claim(each) for each in judged],
        claims_legend=in_words.legend(judged) if judged else in_words.NO_CLAIMS,
        caution=words.caution(groups),
        left_out=[o for o in outcomes if not o.valid and o.status != RUNNING],
        unquiet=unquiet(outcomes),
        doubts=[said for said in (short_of_target(outcomes), without_effect(outcomes)) if said],
        remedies=remedies,
        failed_before=[failed_before(o) for o in outcomes if o.failed_before],
        resumed=[words.resumed(record, o) for record, o in trials if not whole(record)],
        checks=_checks(outcomes),
        looks=looks(names),
        colours={colour: f"strategy-{i}" for i, colour in enumerate(STRATEGY_COLOURS)},
        statistics=tables.statistics(rows, score),
        chapters=sections,
        comparisons=[
            tables.figure_table(groups, condition)
            for condition in dict.fromkeys(group.condition for group in groups)
        ],
        trial_columns=[score.of(BY_KEY[key]) for key in tables.PER_TRIAL],
        score=score,
        trials=[(o, tables.texts(o)) for o in tables.in_reading_order(outcomes)],
        definitions=tables.definitions(score),
        terms=TERMS,
        yaml=experiment_yaml(records, claims, comparison),
        versions=versions(records),
        drawn_faults=drawn_faults(records),
        prices=tables.price_rows(prices),
    )


# -- words ------------------------------------------------------------------------------------


def _facts(trials: Sequence[Trial]) -> list[tuple[str, str]]:
    """Return what a reader wants to know first, as names and values."""
    from datetime import UTC, datetime

    outcomes = [outcome for _, outcome in trials]
    on_nodes = [outcome for outcome in outcomes if not outcome.virtual]
    configs = [_config_facts(record.config) for record, _ in trials]
    values = {name: list(dict.fromkeys(each[name] for each in configs)) for name in configs[0]}
    day = datetime.fromtimestamp(max(r.events[-1].t for r, _ in trials), UTC)
    valid = sum(outcome.valid for outcome in outcomes)
    running = sum(outcome.status == RUNNING for outcome in outcomes)
    trials_text = f"{len(outcomes)}"
    if valid < len(outcomes):
        trials_text += f", {valid} of them valid" + (f", {running} running" if running else "")
    seeds = sorted({o.identity.seed for o in outcomes if o.identity.seed is not None})
    facts = [
        ("trials", trials_text),
        ("seeds", _runs_of(seeds)),
        *((n, ", ".join(v) if len(v) <= MOST_VALUES else VARIED) for n, v in values.items()),
        ("score", outcomes[0].score.told),
        ("time", told([outcome.virtual for outcome in outcomes])),
        ("arrays sent by", described(outcome.transports for outcome in on_nodes)),
        # Virtual time begins at the same moment in every trial, which says nothing to a reader.
        ("as of" if running else "finished", f"{day:%-d %B %Y, %H:%M UTC}" if on_nodes else ""),
    ]
    return [(name, value) for name, value in facts if value.strip(" ·")]


def _config_facts(config: Mapping[str, Any]) -> dict[str, str]:
    training, server = config.get("training", {}), config.get("server", {})
    workload, dataset = (config.get(k, {}).get("kind", "") for k in ("workload", "dataset"))
    return {
        "training": f"{workload} on {dataset}" if workload else "",
        "gradients": f"{training['updates']:,}" if "updates" in training else "",
        "workers": str(training.get("workers", "")),
        "shards": str(server.get("shards", "")),
        "consistency": _consistency(config.get("consistency", {})),
    }


def _consistency(section: Mapping[str, Any]) -> str:
    kind = str(section.get("kind", ""))
    rest = [f"bound {value}" for key, value in section.items() if key != "kind"]
    return ", ".join(filter(None, [CONSISTENCY.get(kind, kind), *rest]))


def _runs_of(numbers: Sequence[int]) -> str:
    """Return numbers in order, of three and more in a row the first and last: "0–7, 12"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [
        [f"{run[0]}–{run[-1]}"] if len(run) > 2 else [str(number) for number in run] for run in runs
    ]
    return ", ".join(part for run in parts for part in run)


def _claim(judged: JudgedClaim) -> Claim:
    return Claim(
        in_words.title(judged.claim, judged.score),
        judged.decision.verdict,
        in_words.TONES[judged.decision.verdict],
        in_words.verdict_sentence(judged),
        in_words.warnings(judged),
    )


def _in_short(
    groups: Sequence[Group], baseline: str | None, judged: Sequence[JudgedClaim]
) -> tuple[str, ...]:
    """The sentences at the top: of the claims, else of what was seen."""
    if not groups:
        return ()
    return in_words.in_short(judged) if judged else words.in_short(groups, baseline)


def _checks(outcomes: Sequence[Outcome]) -> list[Check]:
    rows = [outcome.row() for outcome in outcomes]
    return [
        Check(
            BY_KEY[key],
            tuple(row["trial"] for row in rows if row[key]),
            sum(row[key] is not None for row in rows),
        )
        for key in words.MUST_BE_ZERO
    ]


# -- figures ----------------------------------------------------------------------------------


def _opening(
    trials: Sequence[Trial], drawn: Sequence[Chapter], claims: Sequence[ClaimSection]
) -> Drawing | None:
    """The figure that the page opens with: of the first claim, else of the first chapter."""
    for claim in claims[:1]:
        for _, outcome in trials:
            own = outcome.identity
            if claim.side_of(own.strategy, own.labels) == 0:
                shows = opening(trials, drawn, claim.metric, own.condition)
                if shows is not None:
                    return shows
                break
    return drawn[0].first if drawn else None


def _sections(
    drawn: Sequence[Chapter], open_chapters: int, first: Drawing | None
) -> tuple[Picture | None, list[Section]]:
    """The figure that the page opens with, and the others by chapter."""
    every = list(drawings(drawn))
    carried = sum(len(drawing.svg) + len(drawing.csv) for drawing in every) <= DOWNLOAD_BYTES
    pictures = {drawing.name: _picture(drawing, carried) for drawing in every}
    sections = list[Section]()
    for chapter in drawn:
        shown = FIGURES_SHOWN if len(sections) < open_chapters else 0
        own = [pictures[drawing.name] for drawing in chapter.drawings if drawing is not first]
        if own:
            sections.append(Section(chapter, tuple(own[:shown]), tuple(own[shown:])))
    return pictures[first.name] if first else None, sections


def _contents(sections: Sequence[Section], valid: bool, tested: bool) -> list[Link]:
    """Return what the page has, in its order."""
    return [
        *([Link("short", "In short")] if valid else []),
        Link("claims", "Claims"),
        Link("checks", "Checks"),
        *(Link(section.chapter.name, section.chapter.title) for section in sections),
        *([Link("statistics", "Exploratory statistics")] if tested else []),
        *([Link("comparison", "All metrics")] if valid else []),
        Link("trials", "Every trial"),
        Link("repeat", "To repeat it"),
        Link("definitions", "Definitions"),
    ]


def _picture(drawing: Drawing, carried: bool) -> Picture:
    svg = base64.b64encode(drawing.svg.encode()).decode()
    files = (
        (f"{drawing.name}.svg", f"data:image/svg+xml;base64,{svg}"),
        (f"{drawing.name}.csv", f"data:text/csv;charset=utf-8,{quote(drawing.csv, safe=',')}"),
    )
    return Picture(drawing, for_page(drawing.svg), files if carried else ())
