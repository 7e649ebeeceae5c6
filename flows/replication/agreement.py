"""What two versions of a replication say of the same claims, set beside each other.

One is on real processes and the other on virtual time, as a rule with more seeds and cells: so two
verdicts can differ though nothing speaks against the same effect. Those that differ are told apart
by their effects, as `dps validate` does it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from flows.analysis.statistics import are_apart
from flows.replication.findings import Table
from flows.replication.verdicts import ClaimVerdict, Verdicts

Agreement = Literal["same", "apart", "resolution", "direction", "contradiction", "unknown"]

MEANING: Final[dict[Agreement, str]] = {
    "same": "agree: the same verdict",
    "apart": "agree in the verdict and not in the size: the two effects are further apart than "
    "their intervals allow",
    "resolution": "differ in what could be resolved: no further apart than their intervals allow, "
    "in the same direction",
    "direction": "are undecided: no further apart than their intervals allow, in opposite "
    "directions",
    "contradiction": "disagree: further apart than their intervals allow, or opposite verdicts",
    "unknown": "differ, and one side has no effect with an interval to tell by",
}
SHORT: Final[dict[Agreement, str]] = {
    "same": "same",
    "apart": "same verdict, sizes apart",
    "resolution": "differ in resolution",
    "direction": "undecided",
    "contradiction": "disagree",
    "unknown": "differ, cannot be told",
}
TITLE = "Agreement with real processes"
HEADINGS = ("claim", "real processes", "verdict", "virtual time", "verdict", "the two")
OPEN: Final[frozenset[Agreement]] = frozenset(("apart", "contradiction"))
NO_SIDE = "–"


def agreement(real: ClaimVerdict, virtual: ClaimVerdict) -> Agreement:
    """Return how the verdicts on one claim stand to each other."""
    one, other = real.effect, virtual.effect
    known = one is not None and other is not None and None not in (one.low, other.low)
    apart = one is not None and other is not None and are_apart(one, other)
    if real.verdict == virtual.verdict:
        return "apart" if apart else "same"
    if apart or {real.verdict, virtual.verdict} == {"holds", "does not hold"}:
        return "contradiction"
    if one is None or other is None or not known:
        return "unknown"
    return "direction" if one.mean * other.mean < 0 else "resolution"


def compared(real: Verdicts | None, virtual: Verdicts) -> tuple[list[str], Table]:
    """Return how claims were judged on either time: paragraphs, and a row for each claim.

    Parameters
    ----------
    real
        None: no verdicts of real processes are known here.
    virtual
        All claims that are judged on virtual time; those that only `real` has are named.
    """
    theirs = {} if real is None else {each.key: each for each in real.claims}
    rows, found = [], Counter[Agreement]()
    for mine in virtual.claims:
        cells = [NO_SIDE, NO_SIDE, mine.found, mine.verdict, NO_SIDE]
        if (other := theirs.pop(mine.key, None)) is not None:
            relation = agreement(other, mine)
            found[relation] += 1
            cells = [other.found, other.verdict, mine.found, mine.verdict, SHORT[relation]]
        rows.append([_name(mine), *cells])
    table = Table(TITLE, HEADINGS, rows)
    if real is None:
        nothing = (
            "No verdicts of real processes are recorded here, so there is nothing to compare: run "
            f"`dps replicate {virtual.paper}` first, or name its verdicts by `--beside`."
        )
        return [nothing], table
    said = [_told(real, virtual, found), *_named(real, virtual)]
    return [*said, *([_only_real(list(theirs.values()))] if theirs else [])], table


# -- parts -------------------------------------------------------------------------------------


def _name(each: ClaimVerdict) -> str:
    """The claim, by its number where a statement stands for it."""
    number = each.claim.partition(" ")[0]
    what = f"{number} {each.measured}" if each.measured else each.claim
    return f"{each.study}: {what}" if each.study else what


def _told(real: Verdicts, virtual: Verdicts, found: Counter[Agreement]) -> str:
    both, all_of_it = sum(found.values()), len(virtual.claims)
    counts = "; ".join(f"{found[kind]} {words}" for kind, words in MEANING.items() if found[kind])
    source = f" ({real.source})" if real.source else ""
    alone = all_of_it - both
    missing = f" {alone} have no verdict by real processes." if alone else ""
    return (
        f"`{real.command}`{source} beside `{virtual.command}`: {both} claims were judged by both. "
        f"{counts}.{missing} Each interval is at the level at which its claim was judged. On "
        "virtual time seeds differ in what is drawn and not in what a machine does, so that it "
        "shows smaller effects."
    )


def _named(real: Verdicts, virtual: Verdicts) -> list[str]:
    """Name the claims on which the two disagree."""
    theirs = {each.key: each for each in real.claims}
    pairs = [(theirs[each.key], each) for each in virtual.claims if each.key in theirs]
    named = [_name(mine) for other, mine in pairs if agreement(other, mine) in OPEN]
    return [f"They disagree, or agree in the verdict alone: {'; '.join(named)}."] if named else []


def _only_real(claims: Sequence[ClaimVerdict]) -> str:
    counts = Counter(each.study for each in claims)
    told = ", ".join(f"{n} of {study}" if study else f"{n}" for study, n in counts.items())
    return f"Judged by real processes alone: {told}."
