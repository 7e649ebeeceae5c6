"""Writes the tables of docs/who-wins-when.md anew, from the records of its experiments.

    python -m flows.replication.frontier_page PAGE RESULTS [CONFIGS]

as in `make frontier`. RESULTS has a folder of records for each experiment; CONFIGS, where they are
configured, is that of dps if it is left out. A table stands between two lines, the first of which
names a section of `frontier_tables`:

    <!-- records of frontier: points -->
    <!-- end of records -->

What is between them is replaced, and nothing else. Where not all trials of an experiment are
recorded as they are configured, its tables stay as they are, and the command says so.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dps.errors import ConfigurationError
from flows.analysis.effects.course import course
from flows.analysis.effects.difference import Effect, over_common_span
from flows.analysis.finished import Finished, read_experiment
from flows.analysis.prices import Prices, load_prices
from flows.analysis.statistics.claims import read_claims
from flows.config.trials import Trial, load_trials
from flows.files import write_whole
from flows.replication.frontier_tables import OVER_COMMON_SPANS, SECTIONS, Study

CONFIGS = Path(__file__).parents[1] / "configs"
SERVES = ("server", "replica", "spare", "store")
_SECTION = re.compile(
    r"^<!-- records of (?P<name>[^\n]*) -->\n(?P<body>.*?)^<!-- end of records -->$", re.M | re.S
)


def with_tables(page: str, study_of: Callable[[str], Study | None]) -> str:
    """Return a page whose tables are made anew.

    Parameters
    ----------
    page
        In Markdown, with the marks of its tables.
    study_of
        Returns what is recorded of an experiment; None leaves its tables as they are.

    Raises
    ------
    ConfigurationError
        A table has no end, or there is none of its name.
    """
    begun = re.findall(r"^<!-- records of (.*) -->$", page, re.M)
    whole = [found["name"] for found in _SECTION.finditer(page)]
    if begun != whole:
        raise ConfigurationError(
            f"of {len(begun)} tables that the page begins by `<!-- records of … -->`, {len(whole)} "
            "end by a line `<!-- end of records -->`; expected one end for each, before the next"
        )
    for name in whole:
        if name not in SECTIONS:
            known = "; ".join(SECTIONS)
            raise ConfigurationError(f"the page has a table {name!r}; expected one of: {known}")

    def anew(found: re.Match[str]) -> str:
        section = SECTIONS[found["name"]]
        study = study_of(section.experiment)
        if study is None:
            return found[0]
        body = section.made(study)
        return f"<!-- records of {found['name']} -->\n\n{body}\n\n<!-- end of records -->"

    return _SECTION.sub(anew, page)


def read_study(
    experiment: str, results: Path, configs: Path, say: Callable[[str], None]
) -> Study | None:
    """Read what is recorded of an experiment; None, and say why, if that is not all of it.

    Raises
    ------
    ConfigurationError
        The configuration cannot be read, or what is kept beside the records.
    """
    trials = load_trials(str(configs / f"{experiment}.yaml"))[1]
    planned = {trial.digest: trial for trial in trials}
    folder = results / experiment
    prices = load_prices()
    found = [
        each
        for each in (read_experiment(folder, prices, say) if folder.is_dir() else [])
        if each.outcome.identity.digest in planned and each.outcome.status != "failed"
    ]
    outcomes = [each.outcome for each in found]
    if len(outcomes) < len(planned):
        say(
            f"{experiment}: {len(outcomes):,} of {len(planned):,} trials are recorded in {folder}, "
            f"so its tables stay as they are; `dps run {experiment}` runs the others"
        )
        return None
    say(f"{experiment}: tables of {len(outcomes):,} trials")
    common = common_spans(found, prices) if experiment in OVER_COMMON_SPANS else {}
    return Study(outcomes, read_claims(folder), _nodes(planned), common)


def common_spans(found: Sequence[Finished], prices: Prices) -> dict[str, Effect]:
    """Return by trial what its faults did over the span that all strategies of its seed share."""
    by_name = {each.outcome.identity.trial: each for each in found}
    groups = defaultdict[tuple[int | None, frozenset[tuple[str, str]]], list[Finished]](list)
    for each in found:
        identity = each.outcome.identity
        if each.outcome.effects.control is not None:
            rest = {(axis, label) for axis, label in identity.labels.items() if axis != "recovery"}
            groups[identity.seed, frozenset(rest)].append(each)
    spans = dict[str, Effect]()
    for group in groups.values():
        pairs = {}
        for each in group:
            control = by_name[each.outcome.effects.control or ""]
            mine, theirs = course(each.record, prices), course(control.record, prices)
            if mine is not None and theirs is not None:
                pairs[each.outcome.identity.trial] = mine, theirs
        spans |= over_common_span(pairs)
    return spans


def _nodes(planned: Mapping[str, Trial]) -> dict[str, int]:
    """Return for each strategy how many nodes it keeps beside workers and evaluator."""
    return {
        trial.labels["recovery"]: sum(name.startswith(SERVES) for name in trial.config.node_names)
        for trial in planned.values()
    }


def main(page: Path, results: Path, configs: Path) -> None:
    """Write the tables of a page anew."""
    known: dict[str, Study | None] = {}

    def study_of(experiment: str) -> Study | None:
        if experiment not in known:
            known[experiment] = read_study(experiment, results, configs, print)
        return known[experiment]

    write_whole(page, with_tables(page.read_text("utf-8"), study_of), "the page")


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        print("expected: PAGE RESULTS [CONFIGS]", file=sys.stderr)
        raise SystemExit(2)
    try:
        main(Path(sys.argv[1]), Path(sys.argv[2]), Path(*sys.argv[3:] or (CONFIGS,)))
    except (ConfigurationError, OSError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
