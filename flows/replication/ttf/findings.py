"""The text of the replication: claims of both studies side by side, tables, and the figures.

It is ready-made Markdown for `docs/findings.md`. Every number in it is computed from the records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from dps.errors import ConfigurationError
from flows.analysis.finished import Finished
from flows.analysis.outcome import Outcome
from flows.analysis.statistics import FEWEST_SEEDS
from flows.analysis.virtual_time import told
from flows.config.claims import ClaimSection
from flows.files import write_whole
from flows.replication.agreement import compared
from flows.replication.cells import cells_compared
from flows.replication.claims import markdown_table
from flows.replication.ttf.by_design import EFFECTS, kills_table, sections
from flows.replication.ttf.claims import (
    BY_CONSTRUCTION,
    LATE,
    NODES,
    NOT_JUDGED,
    SEEDS_ONLY,
    Judged,
    judge,
)
from flows.replication.ttf.figures import (
    Curve,
    Panel,
    accuracy_figure,
    accuracy_panel,
    published_panel,
    read_published,
    recorded_panel,
    use_figure,
)
from flows.replication.ttf.measures import (
    Measured,
    ends_down,
    is_control,
    measure,
    strategy_of,
    twin,
    why_not,
)
from flows.replication.verdicts import CellFigure, ClaimVerdict, Verdicts
from flows.replication.version import Version
from flows.report.figures.figure import Drawing, Table, write_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AS_PUBLISHED, CORRECTED, CNN = "(a) as published", "(b) corrected", "(b) corrected, CNN"
TEXT = "findings.md"

ENDS_DOWN = " (ended with a shard down; value from before)"

# A disk on virtual time is in memory and never full.
NO_SPACE = "no space, then kill"
NOT_VIRTUAL = (
    "(a) as published: it is not the protocol of dps but an emulation of the paper's own processes",
    f"(c) the path of checkpoints is damaged, “{NO_SPACE}”: a disk is in memory and never full",
    "(e) by design, on real processes: on virtual time these are the trials of (e) by design",
    "(e) by design: it is on virtual time whatever is asked for, and told with the real processes",
)

# Before→after for each kill, and accuracy at 165 to 175 s, as recorded by the paper's authors.
PUBLISHED = {
    ("sync checkpoint", 1): (".546→.473", ".748"),
    ("sync checkpoint", 2): (".370→.108; .445→.475", ".715"),
    ("async checkpoint", 1): (".354→.294", ".739"),
    ("async checkpoint", 2): (".328→.101; .397→.418", ".721"),
    ("sync chain", 1): (".405→.352", ".744"),
    ("sync chain", 2): (".453→.438; .564→.521", ".735"),
    ("async chain", 1): (".360→.376", ".692"),
    ("async chain", 2): (".519→.502; .641→.596", ".729"),
    ("stateless", 1): (".302→.426", ".650"),
    ("stateless", 2): (".476→.589; .606→.689", ".725"),
}


@dataclass(frozen=True, slots=True)
class Study:
    """The recorded ones of the `planned` trials of one part of the replication.

    Those that cannot be measured are `left_out`.
    """

    title: str
    finished: tuple[Finished, ...]
    trials: tuple[Measured, ...]
    left_out: tuple[Outcome, ...]
    planned: int


@dataclass(frozen=True, slots=True)
class Designed:
    """A part whose `claims` stand in its configuration, and are judged by effects of faults."""

    study: Study
    claims: tuple[ClaimSection, ...]


def study(title: str, finished: Iterable[Finished], planned: int) -> Study:
    """Measure the trials of one part, those with a fault beside their controls."""
    done = tuple(finished)
    named = [(twin(each.record, each.outcome), each) for each in done]
    controls = {name: each.record for name, each in named if is_control(each.record, each.outcome)}
    found = [(each, measure(each.record, each.outcome, controls.get(name))) for name, each in named]
    return Study(
        title,
        done,
        tuple(measured for _, measured in found if measured is not None),
        tuple(each.outcome for each, measured in found if measured is None),
        planned,
    )


def write(
    judged: Mapping[str, Study],
    others: Sequence[Study],
    designed: Sequence[Designed],
    folder: Path,
    csv: Path | None,
    version: Version,
    beside: Verdicts | None = None,
    alike: Mapping[str, Study] | None = None,
) -> str:
    """Write figures and text into `folder`, and return the text.

    Parameters
    ----------
    judged
        What the claims are judged on, by title.
    others
        Parts of which only tables are shown.
    designed
        Parts with claims of their own, which come first.
    csv
        The published curves.
    version
        The version of the replication that all these are of.
    beside
        Verdicts of real processes, which those of virtual time are compared with.
    alike
        What of `judged` real processes have as well in their short version.

    Raises
    ------
    ConfigurationError
        Nothing is recorded, or the published curves cannot be read.
    StoreUnavailable
        The folder cannot be written.
    """
    studies = {title: each for title, each in judged.items() if each.trials}
    every = [*judged.values(), *others, *(each.study for each in designed)]
    shown = [each for each in (*judged.values(), *others) if each.finished]
    found = [each for each in designed if each.study.finished]
    command = version.command("ttf")
    if not (shown or found):
        raise ConfigurationError(
            f"nothing of this replication is recorded beside {folder}; run `{command}` there first"
        )
    verdicts = _verdicts(studies, version, [each for each in shown if each.trials])
    parts = [*_head(version, every), *_agreement(version, beside, verdicts, alike or {})]
    for number, part in enumerate(found):
        name = EFFECTS if number == 0 else f"{EFFECTS}-{number + 1}"
        parts += sections(part.study.title, part.study.finished, part.claims, folder, name)
    parts += [
        "### Claims as they were published",
        *(
            (claims_table(studies), _reading(version))
            if studies
            else ("No trial could be measured.",)
        ),
        *_figures(studies, folder, csv),
    ]
    for each in shown:
        table = [cells_table(each)] if each.trials else []
        parts += [f"### {each.title}", *table, *_effects_of_kills(each), *_left_out(each)]
    text = "\n\n".join(parts) + "\n"
    write_whole(folder / TEXT, text, "the findings")
    verdicts.write(folder)
    return text


# -- tables ------------------------------------------------------------------------------------


def claims_table(studies: Mapping[str, Study]) -> str:
    """Return the claims as Markdown, with effect, interval and verdict for each study."""
    judged = _judged(studies)
    headings = ["claim", "measured as", *(h for title in judged for h in (title, "verdict"))]
    rows = []
    for places in zip(*judged.values(), strict=True):
        statement = places[0].statement
        cells = [cell for place in places for cell in (place.effect(), _verdict(place))]
        rows.append([statement.title, statement.text, *cells])
    return markdown_table(headings, rows)


def _verdict(judged: Judged) -> str:
    told = f"**{judged.verdict}**"
    return f"{told} ({'; '.join(judged.notes)})" if judged.notes else told


def _judged(studies: Mapping[str, Study]) -> dict[str, tuple[Judged, ...]]:
    return {
        title: judge(each.trials, timed=title == AS_PUBLISHED) for title, each in studies.items()
    }


def _verdicts(
    studies: Mapping[str, Study], version: Version, shown: Sequence[Study] = ()
) -> Verdicts:
    """The verdicts of all studies, and the cells of what is shown; what is not judged has none."""
    found = tuple(
        ClaimVerdict.of(
            each.statement.title,
            each.effect(),
            each.verdict,
            each.interval,
            study=title,
            measured=each.statement.text,
            note="; ".join(each.notes),
        )
        for title, judged in _judged(studies).items()
        for each in judged
        if each.verdict != NOT_JUDGED and each.verdict != BY_CONSTRUCTION
    )
    return Verdicts(
        paper="ttf",
        command=version.command("ttf"),
        virtual=version.virtual,
        claims=found,
        cells=tuple(figure for each in shown for figure in cell_figures(each)),
    )


def cell_figures(each: Study) -> list[CellFigure]:
    """Return the figures of each cell that those of another version can be set beside."""
    found = []
    for cell in _cells(each):
        gaps = {t.seed: fmean(c.gap for c in t.changes) for t in cell if t.changes}
        values = {
            "final accuracy": {t.seed: t.final for t in cell},
            "gap": gaps,
            "pace": {t.seed: t.pace for t in cell},
            "price": {t.seed: 1000 * t.fixed_usd for t in cell},
        }
        found += [
            CellFigure.of(each.title, cell[0].label, cell[0].condition, name, by_seed)
            for name, by_seed in values.items()
            if by_seed
        ]
    return found


def cells_table(each: Study) -> str:
    """Return one row for each cell of a study: means over its trials."""
    published = each.title == AS_PUBLISHED
    controlled = bool(_effects(each.trials))
    headings = [
        "configuration",
        "condition",
        "trials",
        "before→after",
        *(("1st kill, minus control: points",) if controlled else ()),
        "gap s",
        "final",
        "gradients",
        "per s",
        "lost" if published else "acked, lost",
        "s to target",
        "USD, fixed",
        *(("peak memory, MB: all, servers and store, workers",) if _has_memory(each) else ()),
        *(("published: before→after", "at 165–175 s") if published else ()),
    ]
    memory = _has_memory(each)
    rows = [_row(cell, published, controlled, memory) for cell in _cells(each)]
    return markdown_table(headings, rows)


def _effects_of_kills(each: Study) -> list[str]:
    measured = [done.outcome for done in each.finished if not why_not(done.outcome)]
    table = kills_table([outcome for outcome in measured if not ends_down(outcome)])
    if table is None:
        return []
    down = sum(ends_down(outcome) for outcome in measured)
    left_out = f" Left out are trials that ended with a shard down: {down}." if down else ""
    said = (
        "Effects of all kills of a trial together, against the control of its seed from the first "
        f"kill on: means over the span and, where it says so, at its end.{left_out}"
    )
    return [said, table]


def _has_memory(each: Study) -> bool:
    """Whether processes had memory of their own: not on virtual time."""
    return any(any(trial.peak_bytes.values()) for trial in each.trials)


def _cells(each: Study) -> list[list[Measured]]:
    found: dict[tuple[str, str], list[Measured]] = {}
    for trial in each.trials:
        found.setdefault((trial.label, trial.condition), []).append(trial)
    return [found[key] for key in sorted(found, key=lambda key: (key[1], key[0]))]


def _effects(trials: Iterable[Measured]) -> list[float]:
    """What the kills did that have a control."""
    of_kills = (change.effect for trial in trials for change in trial.changes)
    return [effect for effect in of_kills if effect is not None]


def _row(cell: Sequence[Measured], published: bool, controlled: bool, memory: bool) -> list[str]:
    first, effects = cell[0], _effects(cell)
    across = "; ".join(
        f"{fmean(t.changes[i].before for t in cell if len(t.changes) > i):.3f}→"
        f"{fmean(t.changes[i].after for t in cell if len(t.changes) > i):.3f}"
        for i in range(max(len(t.changes) for t in cell))
    )
    gaps = [change.gap for trial in cell for change in trial.changes]
    reached = sum(trial.reached for trial in cell)
    all_did = reached == len(cell)
    of_all = "" if all_did else f" ({reached} of {len(cell)} reached it)"
    row = [
        first.label,
        first.condition,
        str(len(cell)),
        across or "–",
        *((f"{100 * fmean(effects):+.1f}" if effects else "–",) if controlled else ()),
        f"{fmean(gaps):.2f}" if gaps else "–",
        f"{fmean(t.final for t in cell):.3f}{ENDS_DOWN if any(t.ends_down for t in cell) else ''}",
        f"{fmean(t.pushed for t in cell):.0f}",
        f"{fmean(t.pace for t in cell):.1f}",
        f"{fmean(t.lost for t in cell):.1f}",
        f"{'' if all_did else '≥'}{fmean(t.to_target for t in cell):.2f}{of_all}",
        f"{fmean(t.fixed_usd for t in cell):.2e}",
        *((_memory(cell),) if memory else ()),
    ]
    return [*row, *PUBLISHED.get((first.label, first.kills), ("–", "–"))] if published else row


def _memory(cell: Sequence[Measured]) -> str:
    roles = set().union(*(trial.peak_bytes for trial in cell))
    parts = (roles, ("server", "replica", "store"), ("worker",))
    told = (
        fmean(sum(trial.peak_bytes.get(role, 0) for role in part) for trial in cell) / 1e6
        for part in parts
    )
    return ", ".join(f"{value:,.0f}" for value in told)


# -- text --------------------------------------------------------------------------------------


def _head(version: Version, studies: Sequence[Study]) -> list[str]:
    title, records = (
        "## Training Through Failure",
        f"From the records of `{version.command('ttf')}`.",
    )
    if not version.virtual:
        return [title, f"{records} {_sizes(studies)}"]
    time = told([done.outcome.virtual for each in studies for done in each.finished])
    return [
        f"{title}, on virtual time",
        f"{records} Time: {time}. {_sizes(studies)}",
        "Not on virtual time:",
        "\n".join(f"- {reason}" for reason in NOT_VIRTUAL),
    ]


def _agreement(
    version: Version, beside: Verdicts | None, verdicts: Verdicts, alike: Mapping[str, Study]
) -> list[str]:
    if not version.virtual:
        return []
    same = {title: each for title, each in alike.items() if each.trials}
    said, table = compared(beside, verdicts, _verdicts(same, version) if same else None)
    told, tables = cells_compared(() if beside is None else beside.cells, verdicts.cells)
    title, rows = table.markdown()
    more = [part for each in tables for part in each.markdown()]
    return [title, *said, rows, *more[:1], *told, *more[1:]]


def _sizes(studies: Iterable[Study]) -> str:
    parts = list(studies)
    recorded, planned = (sum(n) for n in zip(*map(_counts, parts), strict=True))
    missing = f"**Only {recorded} of {planned} trials are recorded.** "
    return (missing if recorded < planned else "") + "; ".join(map(_size, parts)) + "."


def _counts(each: Study) -> tuple[int, int]:
    return len(each.finished), each.planned


def _size(each: Study) -> str:
    recorded, planned = _counts(each)
    left_out = f", {len(each.left_out)} left out" if each.left_out else ""
    return f"{each.title}: {recorded} of {planned} trials{left_out}"


def _reading(version: Version) -> str:
    time = (
        f" “{SEEDS_ONLY}”: times, and what follows from them, are the profile's, and how far that "
        "is from a real machine is not in the interval; such a verdict says what the model does."
        if version.virtual
        else ""
    )
    return (
        "Differences are means over seeds with intervals at the level of the verdict (paired "
        "t-test at 5%, corrected by Holm's method for the statements of a study); points are "
        "percentage points. A statement holds if its interval lies on the claimed side of 0; it "
        "does not hold if the interval excludes 1 point of accuracy, or 2% of "
        "time or pace; sameness is within ±10% with each number of workers. "
        f"Fewer than {FEWEST_SEEDS} seeds resolve nothing. "
        "The price counts every node for the whole time. Before against after a kill, as "
        "published, contains what would have been learnt anyway in that time, and is not judged. "
        "Judged is the same minus what the control gained, the trial of the same seed without a "
        "kill, over the same seconds, counted from when it had as many gradients; and of the first "
        "kill alone, for up to there the two are the same training. "
        "Judged is the direction of a claim; its "
        "size is to be compared with the published one. Not measured is that training converges "
        "(claims 1 and 2): a trial ends long before that. *Final* is the mean of the last 3 "
        f"evaluations. Beside a verdict: “{LATE}” where the statement was put so when trials of "
        "its study had been seen; "
        f"“{NODES}” where that settles the size."
        f"{time}"
    )


def _left_out(each: Study) -> list[str]:
    if not each.left_out:
        return []
    named = (f"{outcome.identity.trial} ({why_not(outcome)})" for outcome in each.left_out)
    of_all = f"{len(each.left_out)} of {len(each.finished)}"
    return [f"Left out, {of_all}: " + "; ".join(named)]


# -- figures -----------------------------------------------------------------------------------


def _figures(studies: Mapping[str, Study], folder: Path, csv: Path | None) -> list[str]:
    curves = read_published(csv) if csv is not None else {}
    parts = []
    for kills in (1, 2):
        published = any(k == kills for _, k in curves)
        panels = _published(curves, kills)
        for title, each in studies.items():
            if shown := _shown(each, kills):
                panels.append(accuracy_panel(title, shown))
        if not published and not any(_shown(each, kills) for each in studies.values()):
            continue
        _save(accuracy_figure(panels), folder, f"accuracy-{kills}")
        parts.append(
            f"![Test accuracy against time, k={kills}; thin each trial, thick the mean over seeds "
            "with its 95% interval (range, of two), upright lines at the median kill and recovery]"
            f"(accuracy-{kills}.svg)"
        )
    shown_once = {title: _shown(each, 1, one_seed=True) for title, each in studies.items()}
    columns = [(title, shown) for title, shown in shown_once.items() if shown]
    if not columns:
        return parts
    _save(use_figure(columns), folder, "use")
    drawn = "CPU, memory" if any(map(_has_memory, studies.values())) else "CPU"
    parts.append(f"![{drawn} and gradients processed against time, k=1, one seed](use.svg)")
    return parts


def _published(curves: Mapping[tuple[str, int], Curve], kills: int) -> list[Panel]:
    """The published curves for so many kills; without them, the published numbers."""
    if any(k == kills for _, k in curves):
        return [published_panel(curves, kills)]
    found = recorded_panel(PUBLISHED, kills)
    return [found] if found else []


def _save(figure: Figure, folder: Path, name: str) -> None:
    """Write a figure as SVG, PDF and PNG; what it shows is in the records."""
    drawing = Drawing(name, name, "", figure, Table((), ()), width="double")
    write_files([drawing], folder, ("svg", "pdf", "png"))


def _shown(each: Study, kills: int, one_seed: bool = False) -> list[tuple[Finished, str]]:
    """The trials with so many kills at two workers, each with its strategy.

    In the emulation the sync and the async configuration of a strategy are one algorithm.
    """
    chosen = [
        (done, done.outcome.identity)
        for done in each.finished
        if not why_not(done.outcome)
        and f"k={kills}" in done.outcome.identity.condition.split(" · ")
    ]
    seen: set[str] = set()
    shown = []
    for done, identity in chosen:
        workers = identity.labels.get("training.workers", "2")
        strategy = identity.strategy
        if each.title == AS_PUBLISHED:
            strategy = strategy_of(strategy)
        if workers != "2" or (one_seed and strategy in seen):
            continue
        seen.add(strategy)
        shown.append((done, strategy))
    return shown
