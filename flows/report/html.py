"""The report of an experiment: one HTML file that needs no network and no other file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dps.errors import ConfigurationError
from flows.configs import comment_of
from flows.files import write_whole
from flows.metrics.prices import Prices, load_prices
from flows.records.owner import at_work
from flows.records.record import Record, labels_of, read_configuration
from flows.report import claims as in_words
from flows.report import figures, remarks, style, tables
from flows.report.study import NUMBERS, Study
from flows.statistics.comparison import read_questions
from flows.statistics.finished import Finished, read_experiment
from flows.statistics.groups import place

TEMPLATE = "report/report.jinja"
FIGURES_SHOWN = 6  # all others are folded


def write_report(
    folder: Path,
    output: Path,
    prices: Prices | None = None,
    warn: Callable[[str], None] = lambda _: None,
    recorded: Sequence[Finished] | None = None,
    left_out: Sequence[str] = (),
) -> Path:
    """Write the report of the experiment whose trials are in `folder`; return where it is.

    `recorded` are its trials, and `left_out` has a line for each damaged record, where they were
    read already. `warn` gets a line for each record that cannot be used. Raises
    `ConfigurationError` if no record can be used, and `StoreUnavailable` if the report cannot be
    written.
    """
    prices = prices or load_prices()
    study, unusable = open_study(folder, prices, recorded, left_out)
    for text in unusable:
        warn(text)
    write_whole(output, render(study, folder, prices, unusable), "the report")
    return output


def open_study(
    folder: Path,
    prices: Prices,
    recorded: Sequence[Finished] | None = None,
    left_out: Sequence[str] = (),
) -> tuple[Study, list[str]]:
    """Return the study of a folder, and a line for each unusable record.

    Raises `ConfigurationError` if the folder has no usable record.
    """
    unusable = list(left_out)
    if recorded is None:
        recorded = read_experiment(folder, prices, unusable.append)
    begun = [each for each in recorded if each.record.started]
    empty = [each.events_file.parent.name for each in recorded if not each.record.started]
    unusable += [f"{name} is left out because its record is still empty" for name in empty]
    if not begun:
        raise ConfigurationError(
            f"{folder}: no trial has been recorded here. Run the experiment first: dps run CONFIG"
        )
    labels = labels_of(folder)
    begun.sort(key=lambda each: each.record.events[0].t)
    begun.sort(key=lambda each: place(each.outcome, labels))
    # An unfinished record that has grown since the current command started has not failed.
    owner = at_work(folder)
    outcomes = tuple(
        replace(each.outcome, status="running", reason="")
        if owner is not None
        and not each.record.ended
        and each.events_file.stat().st_mtime >= owner.since
        else each.outcome
        for each in begun
    )
    records, asked = tuple(each.record for each in begun), read_questions(folder)
    return Study(outcomes, records, asked.claims, asked.comparison), unusable


def render(study: Study, folder: Path, prices: Prices, unusable: Sequence[str] = ()) -> str:
    """Return the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("flows", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawn = [(each, style.for_page(each.figure, each.name)) for each in figures.draw(study)]
    configuration = read_configuration(folder)
    return environment.get_template(TEMPLATE).render(
        study=study,
        experiment=study.outcomes[0].identity.experiment or "experiment",
        question=comment_of(configuration),
        facts=study.facts,
        unusable=list(unusable),
        claims=[(each, in_words.TONES[each.decision.verdict]) for each in study.judged],
        in_words=in_words,
        glance=tables.to_html(tables.glance(study)) if len(study.valid) else "",
        effect_defined=tables.effect_defined(study),
        faults=tables.to_html(tables.faults(study)) if study.faulty else "",
        strategies=strategy_settings(study),
        losses=remarks.losses(study),
        cautions=remarks.cautions(study, folder),
        checks=remarks.checks(study),
        figures=drawn,
        figures_shown=FIGURES_SHOWN,
        comparisons=[
            (condition, tables.to_html(table))
            for condition in study.conditions
            if len(table := tables.comparison(study, condition))
        ],
        metrics=[
            (condition, tables.to_html(table), zeros)
            for condition in study.conditions
            for table, zeros in [tables.metrics(study, condition)]
        ],
        trials=tables.to_html(tables.trials(study)),
        definitions=[
            study.metric(key)
            for key in NUMBERS
            if key != study.score.same_as and study.frame[key].notna().any()
        ],
        configuration=configuration,
        versions=versions(study.records),
        prices=tables.to_html(tables.prices(prices)),
    )


def strategy_settings(study: Study) -> list[tuple[str, str]]:
    """Return the parts of each recovery strategy, from the settings of its first trial."""
    found: dict[str, str] = {}
    for record, outcome in zip(study.records, study.outcomes, strict=True):
        recovery = record.config.get("recovery")
        if "recovery" in outcome.identity.labels and isinstance(recovery, Mapping):
            keys = (key for key in ("durability", "outage") if key in recovery)
            parts = (f"{key}: {_plain(recovery[key])}" for key in keys)
            found.setdefault(outcome.identity.strategy, "; ".join(parts))
    return [(name, found[name]) for name in study.strategies if found.get(name)]


def _plain(value: Any) -> str:
    """Return a setting in a line: its kind, then what belongs to it."""
    if isinstance(value, Mapping):
        rest = [f"{key} {_plain(v)}" for key, v in value.items() if key != "kind" and v is not None]
        kind = str(value.get("kind", ""))
        return f"{kind} ({', '.join(rest)})" if kind and rest else kind or ", ".join(rest)
    return str(value)


def versions(records: Sequence[Record]) -> dict[str, str]:
    """Return the software that trials ran on; several versions of one are listed together."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for name, version in (record.started.versions if record.started else {}).items():
            found.setdefault(name, {})[version] = None
    return {name: ", ".join(seen) for name, seen in found.items()}
