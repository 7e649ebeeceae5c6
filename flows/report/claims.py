"""Claims and their verdicts in words: what is claimed, what was found, and what that shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from flows.analysis.comparison import p_text, uneven_told
from flows.analysis.statistics import CONFIDENCE, FEWEST_SEEDS
from flows.analysis.statistics.claims import JudgedClaim, PlannedClaim, is_count
from flows.analysis.statistics.power import POWER, fewest_seeds
from flows.config.claims import ClaimSection
from flows.metrics.metric import SHARES
from flows.metrics.score import ACCURACY, Score
from flows.quoting import first_few

if TYPE_CHECKING:
    from rich.console import Console

TONES = {"holds": "good", "does not hold": "bad", "not resolved": "open"}
STYLES = {"good": "bold green", "bad": "bold red", "open": "bold yellow"}
_UNITS = {"%": " points", "points": " points", "s": " s", "MB": " MB", "USD": " USD"}
SHORT = 0.005  # half a percentage point
_EFFECTS = {
    f"effect_{over}_{when}": f"effect on accuracy, {how}{', at the end' if when == 'end' else ''},"
    for over, how in (
        ("time", "at the same times"),
        ("gradients", "after as many gradients"),
        ("money", "for as much money"),
    )
    for when in ("mean", "end")
}
MOST_NAMED = 4  # claims with one verdict, in the sentences at the top
HEADING = "Claims, fixed beforehand"
NO_CLAIMS = (
    "No claims were fixed beforehand (claims: in the configuration), so there are no verdicts: all "
    "that follows is exploratory."
)
EXPLORATORY = "Exploratory"


def smallest(claim: ClaimSection, score: Score = ACCURACY) -> str:
    """Return the smallest difference of interest, without zeros that nobody has written."""
    column = score.of(claim.column)
    shares = column.unit in SHARES
    text = f"{100 * claim.smallest:.3g}" if shares else column.text(claim.smallest)
    text = text.rstrip("0").rstrip(".") if "." in text else text
    unit = _UNITS.get(column.unit, "")
    return text + (" point" if (text, unit) == ("1", " points") else unit)


def claimed(claim: ClaimSection, score: Score = ACCURACY) -> str:
    """Return which way a difference was to go, and how far, in as few words as a table has."""
    if claim.direction == "equivalent":
        return f"within {smallest(claim, score)}"
    return f"{claim.direction}, by {smallest(claim, score)}"


def subject(claim: ClaimSection, score: Score = ACCURACY) -> str:
    """Return the figure and the strategy that a claim is about."""
    label = score.said(_EFFECTS.get(claim.metric, claim.column.label))
    if claim.metric.startswith("updates_"):
        label = f"updates {label}"
    return f"{label} with {claim.strategy}"


def statement(claim: ClaimSection, score: Score = ACCURACY) -> str:
    """Return what is claimed, said from its parts."""
    under = ", ".join(claim.condition.values())
    about = subject(claim, score) + (f" ({under})" if under else "")
    if claim.direction == "equivalent":
        other = "0" if claim.one_sample else f"what it is with {claim.baseline}"
        return f"{about}: within {smallest(claim, score)} of {other}"
    other = "0" if claim.one_sample else f"with {claim.baseline}"
    interest = f"of interest: {smallest(claim, score)} or more"
    return f"{about}: {claim.direction} than {other} ({interest})"


def title(claim: ClaimSection, score: Score = ACCURACY) -> str:
    """Return the sentence of a claim, its own or the one from its parts, as a heading."""
    said = claim.claim or statement(claim, score)
    return said[:1].upper() + said[1:]


def effect(judged: JudgedClaim) -> str:
    """Say the difference that was found, with its interval at the level of the verdict."""
    claim, found = judged.claim, judged.difference
    if found is None:
        return "no seed has the figure" if judged.uneven is None else ""
    about = subject(claim, judged.score)
    if claim.one_sample:
        value = f"{about}: {_amount(judged, 1)}{_interval(judged, 1)}"
    elif found.mean == 0:
        value = f"{about}: the same as with {claim.baseline}{_interval(judged, 1)}"
    else:
        sign = 1 if found.mean > 0 else -1
        way = "more" if sign > 0 else "less"
        by = f"{_amount(judged, sign)} {way}"
        value = f"{about}: {by} than with {claim.baseline}{_interval(judged, sign)}"
    seeds = f"{found.n} seed" + ("s" if found.n != 1 else "")
    return ", ".join(filter(None, (value, seeds, tested(judged))))


def tested(judged: JudgedClaim) -> str:
    """Return the p-value of the test that decides, corrected where there are several claims."""
    if judged.decision.corrected is None:
        return ""
    said = p_text(judged.decision.corrected)
    text = f"p {said[0]} {said[1:]}" if said.startswith("<") else f"p = {said}"
    return f"{text} after correction" if judged.claims > 1 else text


def reason(judged: JudgedClaim) -> str:
    """Say what the verdict means for the size of the difference, or why there is none yet."""
    claim, verdict = judged.claim, judged.decision.verdict
    least = smallest(claim, judged.score)
    if verdict == "not resolved":
        return _unresolved(judged)
    if claim.direction == "equivalent":
        return f"within {least}" if verdict == "holds" else f"apart by more than {least}"
    if verdict == "holds":
        if judged.size == "beyond":
            return f"by {least} or more"
        return f"whether by {least} or more is open"
    if _opposite(judged):
        return "it goes the other way"
    shown = judged.bounds is not None and not judged.bounds[0] <= 0 <= judged.bounds[1]
    return f"it is there, but less than {least}" if shown else f"by less than {least}, if at all"


def warnings(judged: JudgedClaim) -> tuple[str, ...]:
    """Say which seeds do not count, and what speaks against a claim fixed beforehand."""
    told = []
    if judged.unusable:
        told.append(f"seeds of these trials do not count: {first_few(judged.unusable)}")
    if judged.late:
        told.append(
            f"fixed after the data: {judged.late} of its {judged.trials} trials had begun before"
        )
    if len(judged.planned) > 1:
        grew = ", then ".join(map(str, judged.planned))
        told.append(
            f"seeds were added on the way ({grew}): to look and go on makes errors likelier than 5%"
        )
    return tuple(told)


def verdict_sentence(judged: JudgedClaim) -> str:
    """Say effect, verdict and reason in one sentence."""
    because = reason(judged)
    said = f"{judged.decision.verdict}{f' ({because})' if because else ''}"
    found = effect(judged)
    whole = f"{found}: {said}" if found else said
    return f"{whole[:1].upper()}{whole[1:]}."


def in_short(judged: Sequence[JudgedClaim]) -> tuple[str, ...]:
    """Say of all claims together which hold and which do not, with what was found of each.

    Up to three sentences; of very many claims with one verdict, the first are named.
    """
    by_verdict = {verdict: [each for each in judged if _is(each, verdict)] for verdict in TONES}
    found = {verdict: those for verdict, those in by_verdict.items() if those}
    late = sum(bool(each.late) for each in judged)
    fixed = "fixed beforehand" if not late else f"{late} of them fixed after the data"
    counts = [f"{len(those)} {_verb(v, len(those))}" for v, those in found.items()]
    opening = f"Of {len(judged)} claims, {fixed}, {_and(counts)}." if len(judged) > 1 else ""
    told = [
        f"{verdict[:1].upper()}{verdict[1:]}: {_listed([_in_short(each) for each in those])}."
        for verdict, those in found.items()
    ]
    if opening and len(told) > 2:
        told = [told[0], " ".join(told[1:])]
    return tuple(filter(None, (opening, *told)))


def legend(judged: Sequence[JudgedClaim]) -> str:
    """Explain once how claims are judged and at which level their intervals are."""
    claims = len(judged)
    family = "one claim" if claims == 1 else f"{claims} claims together (Holm's correction)"
    return (
        f"Judged at the 5% level for {family}, seed by seed: measures by the paired t-test, counts "
        "by the exact sign-flip test. An interval is at the level at which its claim was judged, "
        f"{CONFIDENCE:.0%} or more, so that the two agree. Holds: the direction is shown. Does not "
        "hold: it is shown to be smaller than what would matter, or the other way round."
    )


def print_claims(judged: Sequence[JudgedClaim], console: Console) -> None:
    """Print each claim with its verdict; say so where there are none."""
    console.print()
    if not judged:
        console.print(Text(NO_CLAIMS, style="dim"))
        return
    console.print(Text(HEADING, style="bold underline"))
    for number, each in enumerate(judged, 1):
        tone = STYLES[TONES[each.decision.verdict]]
        head = Text(f"{number}. {title(each.claim, each.score)}: ")
        console.print(head.append(each.decision.verdict, style=tone))
        console.print(Padding(Text(verdict_sentence(each)), (0, 0, 0, 3)))
        for said in warnings(each):
            console.print(Padding(Text(said, style="yellow"), (0, 0, 0, 3)))
    console.print(Text(legend(judged), style="dim"))


# -- before anything runs ------------------------------------------------------------------------


def print_plan(planned: Sequence[PlannedClaim], seeds: int, pilot: str, console: Console) -> None:
    """Print what a number of seeds can resolve of each claim, by the spread in a `pilot`."""
    if not planned:
        console.print(Text(NO_CLAIMS, style="dim"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(Text("claim"), overflow="fold")
    for heading in (
        "sd",
        f"power, {seeds} seed{'s' if seeds != 1 else ''}",
        f"seeds for {POWER:.0%}",
    ):
        table.add_column(Text(heading), justify="right")
    for number, each in enumerate(planned, 1):
        told = f"{number}. {title(each.claim, each.score)}"
        if each.claim.claim:
            told += f"\n   {statement(each.claim, each.score)}"
        table.add_row(*map(Text, (told, *_resolved(each))))
    console.print(table)
    console.print(Text(plan_legend(planned, seeds, pilot), style="dim"))


def plan_legend(planned: Sequence[PlannedClaim], seeds: int, pilot: str) -> str:
    """Explain once what power is told, at which level, and what the spread is known from."""
    level = f"5% / {len(planned)}" if len(planned) > 1 else "5%"
    said = (
        "Power: the probability that a claim is found to hold if the difference is the smallest "
        f"of interest (of an equivalence: if there is none), at the level of {level}."
    )
    known = [each for each in planned if each.sd is not None]
    counts = [each for each in planned if is_count(each.claim)]
    if counts:
        fewest = fewest_seeds(planned[0].level, exact=True)
        said += f" Counts take {fewest} seeds at least, whatever they are."
    if not known:
        return (
            f"{said} How much seeds differ is not known yet: run a few, or name an earlier run by "
            "--pilot, or run a few on virtual time by --pilot virtual."
        )
    of = sorted({each.pilot_seeds for each in known})
    number = f"{of[0]}" if len(of) == 1 else f"{of[0]} to {of[-1]}"
    return (
        f"{said} sd: of the differences between trials of one seed, from {number} seeds of "
        f"{pilot}; it is as rough as so few seeds tell."
    )


# -- parts -------------------------------------------------------------------------------------


def _is(judged: JudgedClaim, verdict: str) -> bool:
    return judged.decision.verdict == verdict


def _verb(verdict: str, count: int) -> str:
    if count == 1:
        return "is not resolved" if verdict == "not resolved" else verdict
    return {"holds": "hold", "does not hold": "do not hold"}.get(verdict, f"are {verdict}")


def _and(parts: Sequence[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def _listed(told: Sequence[str]) -> str:
    more = len(told) - MOST_NAMED
    return "; ".join([*told[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])])


def _in_short(judged: JudgedClaim) -> str:
    """A claim in the words of its configuration, and in brackets what was found."""
    found = judged.difference
    if found is None:
        return f"{title(judged.claim, judged.score)} (not comparable)"
    if judged.claim.one_sample:
        value = _amount(judged, 1) + _interval(judged, 1)
    elif found.mean == 0:
        value = f"the same{_interval(judged, 1)}"
    else:
        sign = 1 if found.mean > 0 else -1
        value = f"{_amount(judged, sign)} {'more' if sign > 0 else 'less'}{_interval(judged, sign)}"
    return f"{title(judged.claim, judged.score)} ({_quantity(judged)}: {value})"


def _quantity(judged: JudgedClaim) -> str:
    """The figure of a claim, without the strategy."""
    about = subject(judged.claim, judged.score)
    return about.removesuffix(f" with {judged.claim.strategy}").rstrip(",")


def _amount(judged: JudgedClaim, sign: int) -> str:
    """The mean difference, or its opposite, with its unit."""
    column, found = judged.column, judged.difference
    assert found is not None, "there is a difference wherever one is told"
    return column.text(sign * found.mean, _finer(judged)) + _UNITS.get(column.unit, "")


def _finer(judged: JudgedClaim) -> bool:
    """Whether the interval is so short that one decimal of a point would tell little of it."""
    return judged.bounds is not None and 0 < judged.bounds[1] - judged.bounds[0] < SHORT


def _interval(judged: JudgedClaim, sign: int) -> str:
    found = judged.difference
    if judged.bounds is None or found is None or found.n < FEWEST_SEEDS:
        return ""
    low, high = sorted(sign * bound for bound in judged.bounds)
    column, level, finer = judged.column, judged.decision.confidence, _finer(judged)
    at = "" if judged.claims == 1 else f" at {100 * level:.3g}%"
    return f" [{column.text(low, finer)}, {column.text(high, finer)}{at}]"


def _opposite(judged: JudgedClaim) -> bool:
    """Whether the interval of a claim with a direction lies wholly on the other side of 0."""
    if judged.bounds is None:
        return False
    low, high = judged.bounds
    return high < 0 if judged.claim.direction == "more" else low > 0


def _unresolved(judged: JudgedClaim) -> str:
    found, needed, claim = judged.difference, judged.needed, judged.claim
    if judged.uneven is not None:
        return uneven_told(judged.uneven)
    if found is None or found.n < FEWEST_SEEDS:
        return f"a verdict takes {FEWEST_SEEDS} seeds at least"
    level = (1 - CONFIDENCE) / judged.claims
    exact = found.subset_means is not None
    if exact and found.n < (fewest := fewest_seeds(level, exact=True)):
        same = "the same in all of them, but " if found.constant else ""
        chance = f"chance alone gives {found.n} of one sign with p = {2.0 ** (1 - found.n):.2g}"
        return f"{same}{chance}: it takes {max(fewest, needed or 0)} seeds"
    what = f"a difference of {smallest(claim, judged.score)}"
    if claim.direction == "equivalent":
        what = f"that a difference of 0 is within {smallest(claim, judged.score)}"
    if needed is None:
        return f"a million seeds would not show {what}"
    if needed > found.n:
        return f"about {needed:,} seeds would show {what} with a probability of {POWER:.0%}"
    return (
        f"{needed:,} seeds show {what} with a probability of {POWER:.0%}, so it may be smaller; "
        "more seeds would narrow the interval"
    )


def _resolved(each: PlannedClaim) -> tuple[str, str, str]:
    if each.sd is None or each.power is None:
        return "?", "?", "?"
    power = f"{each.power:.0%}" if each.power < 0.995 else ">99%"
    needed = "over a million" if each.needed is None else f"{each.needed:,}"
    return each.score.of(each.claim.column).text(each.sd, finer=True), power, needed
