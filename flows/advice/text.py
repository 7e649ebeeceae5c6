"""An advice as people read it: a table, one sentence of recommendation, and what to mind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dps.protocol.timings import Timings
from flows.advice.estimate import NO_EXCEPTION, Expected, Flip, cheapest
from flows.advice.quantities import duration_text, size_text
from flows.advice.situation import Situation

if TYPE_CHECKING:
    from rich.table import Table

SATURATED = 0.5  # from this share of their time on, workers wait for servers rather than compute
MOST_RELATIVE = 100.0  # what costs more than so many times the least is out of the question
RARELY = 100  # trainings: what happens less than once in so many is not told


def table(found: Sequence[Expected]) -> Table:
    """Return the strategies with what each is expected to cost, the cheapest first."""
    from rich.table import Table

    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    shown.add_column("\nstrategy", no_wrap=True)
    for heading in (
        "checkpoint\nevery",
        "nodes\nmore",
        "pace\n%",
        "kept\n%",
        "setback\nper failure",
        "acked lost\nper failure",
        "late\nper failure",
        "cost,\nrelative",
        "USD per\nmillion",
    ):
        shown.add_column(heading, justify="right")
    for each in sorted(found, key=lambda each: each.usd):
        shown.add_row(
            each.label,
            "–" if each.every is None else f"{each.every:,}",
            f"{each.extra:+d}" if each.extra else "0",
            f"{each.pace:.1%}".removesuffix("%"),
            _kept(each),
            "begins again" if math.isinf(each.setback) else duration_text(each.setback),
            "all" if math.isinf(each.at_risk) else _count(each.at_risk),
            _count(each.stale),
            f"{each.relative:.3f}" if each.relative < MOST_RELATIVE else f"> {MOST_RELATIVE:g}",
            f"{each.usd:.3g}" if each.relative < MOST_RELATIVE else "–",
        )
    return shown


def recommendation(
    situation: Situation, found: Sequence[Expected], flips: tuple[Flip | None, Flip | None]
) -> str:
    """Return which strategy to use, what it costs, and from where on it would be another one."""
    best = cheapest(found)
    if math.isinf(best.usd):
        return (
            "None of them: at this mean time between failures the training is never expected to "
            "end."
        )
    written = f", written every {best.every:,} updates" if best.every else ""
    written += " or `every: auto`" if written and not best.layered else ""
    below, above = flips
    until = [
        f"{side} an MTBF of {duration_text(flip.mtbf)} {flip.label} costs less"
        for side, flip in (("below", below), ("above", above))
        if flip is not None
    ]
    turns = " and ".join(until)
    return (
        f"Use {best.label}{written}: it keeps {best.kept:.2%} of the gradients, for the least "
        f"money each; {turns or 'so it is at any MTBF from seconds to years'}."
    )


def warnings(situation: Situation, found: Sequence[Expected], idle: float) -> Iterator[str]:
    """Yield what limits the estimate, or should be changed before any of it."""
    if idle > SATURATED:
        yield (
            f"The servers are the bottleneck: workers wait for {idle:.0%} of their time. More "
            "servers (--servers), filters or fewer workers help more than any recovery."
        )
    if situation.lease > Timings().lease:
        yield (
            "A server is busy for so long with the gradients of all workers that a lease of "
            f"{duration_text(situation.lease)} was assumed; set server.lease to it, or more."
        )
    if situation.outage > Timings().unavailable:
        yield (
            f"Workers give up a shard that is down for {Timings().unavailable:g} s, which the "
            "outage is longer than: let it be restarted by hand, or keep spares."
        )
    for each in found:
        if each.lost_time > NO_EXCEPTION:
            yield (
                f"{each.label}: failures set it back by {each.lost_time:.0%} of the time between "
                "them, so that many fall into what is left of another; take its figures for an "
                "upper bound."
            )
    pairs = [
        f"{each.label} once in {duration_text(each.fatal)}"
        for each in found
        if math.isfinite(each.setback) and each.fatal < RARELY * situation.training
    ]
    if pairs:
        yield (
            "Both nodes that have a shard are lost within one outage, and the training begins "
            f"again, which is in the figures: {', '.join(pairs)}."
        )


def situation_text(situation: Situation) -> str:
    """Return in a line what was asked."""
    return (
        f"A model of {size_text(situation.nbytes)} on {situation.servers} servers, "
        f"{situation.workers} workers, {duration_text(situation.gradient)} for a gradient, profile "
        f"{situation.profile.name}. Each server-side node fails once in "
        f"{duration_text(situation.mtbf)}, and another one is started after "
        f"{duration_text(situation.outage)}. Without failures the training takes "
        f"{duration_text(situation.training)}."
    )


def as_data(
    situation: Situation,
    found: Sequence[Expected],
    flips: tuple[Flip | None, Flip | None],
    rate: float,
    told: Sequence[str],
) -> dict[str, Any]:
    """Return all of it for JSON: times in s, sizes in bytes, prices in USD; null: without end.

    Parameters
    ----------
    rate
        Gradients a second without failures and without recovery.
    told
        The warnings.
    """
    asked = {k: v for k, v in asdict(situation).items() if k != "profile"}
    below, above = (None if flip is None else asdict(flip) for flip in flips)
    strategies = [{k: _finite(v) for k, v in asdict(each).items()} for each in found]
    return {
        "situation": {**asked, "profile": situation.profile.name, "lease": situation.lease},
        "gradients_per_second": rate,
        "strategies": strategies,
        "cheapest": cheapest(found).label,
        "cheapest_changes_at": {"below": below, "above": above},
        "recommendation": recommendation(situation, found, flips),
        "warnings": list(told),
    }


# -- parts -------------------------------------------------------------------------------------


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _kept(each: Expected) -> str:
    width = each.half_width
    if width is None:
        return f"{100 * each.kept:.2f}"
    return f"{100 * each.kept:.2f} ±{100 * width:.2f}"


def _count(amount: float) -> str:
    return f"{amount:,.1f}" if 0 < amount < 10 else f"{amount:,.0f}"
