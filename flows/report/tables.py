"""The tables of an experiment as DataFrames: plain numbers for programs, texts for readers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flows.metrics import BRIEF, NOT_APPLICABLE, TRACKED
from flows.metrics.prices import Prices
from flows.quoting import first_few
from flows.report import claims as in_words
from flows.report.study import NUMBERS, Study
from flows.statistics import MIN_SEEDS, Difference, Interval
from flows.statistics.claims import JudgedClaim
from flows.statistics.comparison import Compared
from flows.statistics.groups import conditions

if TYPE_CHECKING:
    import pandas as pd

MAX_NODES = 4
# What pdflatex lacks, as it is written after pandas has escaped the rest.
LATEX = {"−": "$-$", "–": "--", "·": r"$\cdot$", "×": r"$\times$", "…": r"\ldots{}", "²": "$^2$"}


# -- for readers -------------------------------------------------------------------------------


def glance(study: Study, brief: bool = False) -> pd.DataFrame:
    """Return the few metrics that most readers want, for each condition and strategy.

    The lowest and the highest value over seeds follow each mean. A column that is unknown or 0 for
    every strategy is left out. A `brief` table has only means.
    """
    rows = study.valid[study.valid["condition"].isin(study.shown)]
    table = _means(study, rows, BRIEF, ranges=not brief)
    if study.faulty:
        controls = study.valid.set_index("trial")
        owned = rows[rows["control"].isin(controls.index)]
        beside = controls.loc[owned["control"]].reset_index()
        beside[["condition", "strategy"]] = owned[["condition", "strategy"]].to_numpy()
        quiet = _means(study, beside, ["accuracy_final"], ranges=not brief)
        table = table.join(quiet.add_prefix("control: ")).fillna(NOT_APPLICABLE)
    return table.droplevel("condition") if len(study.shown) == 1 else table


def effect_defined(study: Study) -> str:
    """Return the definition of the effect in the short table."""
    return (
        f"Effect: {study.score.name} minus that of the control at the same times, on average from "
        "the first fault on. Control: the same trial without the faults."
    )


def metrics(study: Study, condition: str) -> tuple[pd.DataFrame, list[str]]:
    """Return all metrics under a condition, strategies side by side, and those that are all 0."""
    rows = study.valid[study.valid["condition"] == condition]
    known = [key for key in NUMBERS if key != study.score.same_as and rows[key].notna().any()]
    zeros = [key for key in known if not rows[key].any()]
    table = _means(study, rows, [key for key in known if key not in zeros], ranges=True)
    table.index = table.index.get_level_values("strategy")
    # Few roles send over each link.
    told = [study.metric(key).label for key in zeros if not key.startswith("sent_bytes_")]
    return table.T.rename_axis(index="metric", columns=None), told


def _means(study: Study, rows: pd.DataFrame, keys: Sequence[str], ranges: bool) -> pd.DataFrame:
    """Return means as text, a row for each condition and strategy; see `glance`."""
    import pandas as pd

    groups = rows.groupby(["condition", "strategy"], sort=False)
    columns = {}
    for key in keys:
        if not rows[key].any() or rows[key].isna().all():
            continue
        spread = groups[key].agg(["mean", "min", "max", "count", "size"])
        columns[study.label(key)] = [
            _mean(study, key, row, ranges) for row in spread.itertuples(index=False)
        ]
    table = pd.DataFrame(columns, index=groups.size().index)
    order = [
        (condition, strategy)
        for condition in study.conditions
        for strategy in study.strategies
        if (condition, strategy) in table.index
    ]
    return table.reindex(pd.MultiIndex.from_tuples(order, names=["condition", "strategy"]))


def _mean(study: Study, key: str, spread: Any, ranges: bool) -> str:
    mean, low, high = (study.text(key, value) for value in spread[:3])
    if 0 < spread.count < spread.size:  # those that have a value, as of a target, are the good ones
        mean += f" ({spread.count} of {spread.size} seeds)"
    return f"{mean} [{low}, {high}]" if ranges and low != high else mean


def trials(study: Study, brief: bool = False) -> pd.DataFrame:
    """Return the main metrics of every trial; columns that are unknown or 0 throughout are gone."""
    import pandas as pd

    order = {"condition": conditions(study.outcomes), "strategy": study.strategies}
    ranks = {key: pd.Categorical(study.frame[key], names) for key, names in order.items()}
    frame = study.frame.assign(**ranks).sort_values([*order, "seed"])
    columns: dict[str, list[Any]] = {"status": list(frame["status"])}
    for key in BRIEF if brief else TRACKED:
        if frame[key].any() and frame[key].notna().any():
            columns[study.label(key)] = [study.text(key, value) for value in frame[key]]
    return pd.DataFrame(columns, index=pd.Index(frame["trial"], name="trial"))


def faults(study: Study) -> pd.DataFrame:
    """Return which faults trials met, a row for each condition and kind of fault."""
    import pandas as pd

    rows = [
        (outcome.identity.condition, outcome.identity.trial, fault.kind, fault.node, fault.updates)
        for outcome in study.outcomes
        for fault in outcome.faults
    ]
    met = pd.DataFrame(rows, columns=["condition", "trial", "fault", "node", "updates"])
    table = met.groupby(["condition", "fault"], sort=False).agg(
        trials=("trial", "nunique"),
        faults=("updates", "size"),
        nodes=("node", lambda nodes: first_few(sorted(set(nodes)), MAX_NODES)),
        first=("updates", "min"),
        last=("updates", "max"),
    )
    return table.rename(columns={"first": "first, after updates", "last": "last, after updates"})


def comparison(
    study: Study, condition: str, compared: Sequence[Compared] | None = None
) -> pd.DataFrame:
    """Return the comparison under a condition, a row for each metric and strategy.

    `compared` is that of runs side by side; None: that of the strategies of one experiment.
    """
    import pandas as pd

    every = study.compared if compared is None else compared
    known = {row.metric for row in every if row.condition == condition and _says_more(row)}
    rows = [row for row in every if row.condition == condition and row.metric in known]
    order = list(dict.fromkeys(row.metric for row in rows))
    rows.sort(key=lambda row: order.index(row.metric))
    index = [(study.label(row.metric), row.strategy) for row in rows]
    return pd.DataFrame(
        [
            {
                "mean": _interval(study, row, row.interval),
                f"difference from {row.baseline}": _interval(study, row, row.difference),
                "p": row.p,
                "seeds": (row.difference or row.interval or Interval(0, None, None, 0)).n,
                "reading": row.sentence,
            }
            for row in rows
        ],
        index=pd.MultiIndex.from_tuples(index, names=["metric", "strategy"]) if rows else None,
    )


def _says_more(row: Compared) -> bool:
    """Return whether a value is not 0, or only some seeds have one."""
    return row.uneven is not None or (row.interval is not None and row.interval.mean != 0)


def _interval(study: Study, row: Compared, found: Interval | Difference | None) -> str:
    if found is None:
        return ""
    signed = isinstance(found, Difference)
    mean = study.text(row.metric, found.mean)
    if signed and found.mean > 0 and mean.strip("0."):
        mean = f"+{mean}"
    if found.low is None or found.high is None or found.n < MIN_SEEDS:
        return mean
    low, high = found.low, found.high
    if not signed:  # an interval of what is never negative ends at 0
        low, high = (study.metric(row.metric).cut(bound) for bound in (low, high))
    return f"{mean} [{study.text(row.metric, low)}, {study.text(row.metric, high)}]"


def prices(table: Prices) -> pd.DataFrame:
    """Return the billed items, with prices in USD and their sources."""
    import pandas as pd

    entries = [
        *((f"hour of a {role} node, on demand", hour) for role, hour in table.node_hour.items()),
        *((f"hour of a {role} node, fixed term", hour) for role, hour in table.fixed_hour.items()),
        ("GB moved", table.gb_moved),
        ("GB stored for a month", table.gb_month_stored),
    ]
    rows = [(what, f"{price.usd:g}", str(price)) for what, price in entries]
    return pd.DataFrame(rows, columns=["for", "USD", "source"]).set_index("for")


# -- for programs ------------------------------------------------------------------------------


def comparison_frame(rows: Sequence[Compared]) -> pd.DataFrame:
    """Return the comparison as plain numbers, a row for each condition, strategy and metric."""
    import pandas as pd

    own = {name: name for name in ("n", "mean", "low", "high")}
    differences = {
        "pairs": "n",
        "difference": "mean",
        "difference_low": "low",
        "difference_high": "high",
        "sd": "sd",
        "p": "p",
    }
    return pd.DataFrame(
        [
            {
                "condition": row.condition,
                "strategy": row.strategy,
                "baseline": row.baseline,
                "metric": row.metric,
                **{column: getattr(row.interval, name, None) for column, name in own.items()},
                **{
                    column: getattr(row.difference, name, None)
                    for column, name in differences.items()
                },
                "reading": row.reading,
                "sentence": row.sentence,
            }
            for row in rows
        ]
    ).convert_dtypes()


def claims_frame(judged: Sequence[JudgedClaim]) -> pd.DataFrame:
    """Return the claims as plain values, with verdicts and intervals at the level of these."""
    import pandas as pd

    found = []
    for each in judged:
        claim, difference = each.claim, each.difference
        low, high = each.bounds or (None, None)
        found.append(
            {
                **claim.model_dump(mode="json"),
                "claim": in_words.title(claim, each.score),
                "verdict": each.decision.verdict,
                "reason": in_words.reason(each),
                "found": in_words.found(each),
                "difference": difference.mean if difference else None,
                "low": low,
                "high": high,
                "confidence": each.decision.confidence,
                "n": difference.n if difference else 0,
                "p": each.decision.p,
                "p_corrected": each.decision.corrected,
                "seeds_needed": each.needed,
                "trials": each.trials,
                "trials_before_the_claim": each.late,
            }
        )
    return pd.DataFrame(found)


# -- forms -------------------------------------------------------------------------------------


def to_html(table: pd.DataFrame) -> str:
    """Return a table as HTML with escaped texts and headers for screen readers.

    Text in brackets after a value is put beneath it.
    """
    from markupsafe import escape

    names = [str(name or "") for name in table.index.names]
    shown = table.map(lambda value: re.sub(r" (\[.*\])$", r"<small>\1</small>", str(escape(value))))
    shown.columns = [str(escape(column)) for column in table.columns]
    shown.index = shown.index.map(
        lambda label: tuple(map(escape, label)) if isinstance(label, tuple) else escape(label)
    )
    shown.index.names = [None] * shown.index.nlevels
    html = shown.to_html(escape=False, border=0)
    head, body = html.split("</thead>")
    for name in names:
        head = head.replace("<th></th>", f'<th scope="col" class="name">{escape(name)}</th>', 1)
    head = head.replace("<th>", '<th scope="col">').replace(' style="text-align: right;"', "")
    return f"{head}</thead>{body.replace('<th', '<th scope=row')}"


def to_latex(table: pd.DataFrame, name: str, caption: str) -> str:
    r"""Return a table as LaTeX, to be read by `\input`; it needs the package booktabs."""
    levels = table.index.nlevels
    text = table.reset_index().to_latex(
        index=False,
        escape=True,
        caption=caption,
        label=f"tab:{name}",
        position="htbp",
        column_format="l" * levels + "r" * len(table.columns),
    )
    for character, command in LATEX.items():
        text = text.replace(character, command)
    return text
