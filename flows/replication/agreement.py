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
from flows.replication.verdicts import NO_FIGURE, ClaimVerdict, Verdicts

Agreement = Literal[
    "same", "apart", "resolution", "direction", "contradiction", "unknown", "nothing"
]

MEANING: Final[dict[Agreement, str]] = {
    "same": "with the same verdict",
    "apart": "with the same verdict and effects that are further apart than their intervals allow",
    "resolution": "with verdicts that differ in what could be resolved (effects no further apart "
    "than their intervals allow, in the same direction)",
    "direction": "undecided (effects no further apart than their intervals allow, in opposite "
    "directions)",
    "contradiction": "with verdicts that disagree (effects further apart than their intervals "
    "allow, or opposite verdicts)",
    "unknown": "with verdicts that differ, and no effect with an interval on one side to tell by",
    "nothing": "without a figure on one side, so that there is nothing to agree on",
}
SHORT: Final[dict[Agreement, str]] = {
    "same": "same",
    "apart": "same verdict, sizes apart",
    "resolution": "differ in resolution",
    "direction": "undecided",
    "contradiction": "disagree",
    "unknown": "differ, cannot be told",
    "nothing": "no figure to compare",
}
TITLE = "Agreement with real processes"
HEADINGS = ("claim", "real processes", "verdict")
OPEN: Final[frozenset[Agreement]] = frozenset(("apart", "contradiction"))


def agreement(real: ClaimVerdict, virtual: ClaimVerdict) -> Agreement:
    """Return how the verdicts on one claim stand to each other."""
    if not (real.has_figure and virtual.has_figure):
        return "nothing"
    one, other = real.effect, virtual.effect
    apart = one is not None and other is not None and are_apart(one, other)
    if real.verdict == virtual.verdict:
        return "apart" if apart else "same"
    if apart or {real.verdict, virtual.verdict} == {"holds", "does not hold"}:
        return "contradiction"
    if one is None or other is None or None in (one.low, other.low):
        return "unknown"
    turn = virtual.turn
    return "direction" if (one.mean - turn) * (other.mean - turn) < 0 else "resolution"


def compared(
    real: Verdicts | None, virtual: Verdicts, alike: Verdicts | None = None
) -> tuple[list[str], Table]:
    """Return how claims were judged on either time: paragraphs, and a row for each claim.

    Parameters
    ----------
    real
        None: no verdicts of real processes are known here.
    virtual
        All claims that are judged on virtual time; those that only `real` has are named.
    alike
        The same claims by those trials alone that `real` has too, cell by cell and seed by seed:
        what differs between these two is the time. None: there are no others in `virtual`.
    """
    theirs = {} if real is None else {each.key: each for each in real.claims}
    sides = [side for side in (alike, virtual) if side is not None]
    headings = [*HEADINGS]
    for name in ("virtual time, the same cells and seeds", "virtual time, all")[-len(sides) :]:
        headings += [name if alike else "virtual time", "verdict", "beside real"]
    by_key = [{each.key: each for each in side.claims} for side in sides]
    rows = []
    for key, name in ((each.key, _name(each)) for each in virtual.claims):
        other = theirs.get(key)
        row = [name, *((other.found, other.told) if other else (NO_FIGURE, NO_FIGURE))]
        for mine in (side.get(key) for side in by_key):
            told = (mine.found, mine.told) if mine else (NO_FIGURE, NO_FIGURE)
            row += [*told, SHORT[agreement(other, mine)] if mine and other else NO_FIGURE]
        rows.append(row)
    table = Table(TITLE, headings, rows)
    if real is None:
        nothing = (
            "No verdicts of real processes are recorded here, so there is nothing to compare: run "
            f"`dps replicate {virtual.paper}` first, or name its verdicts by `--beside`."
        )
        return [nothing], table
    said = [_sources(real, virtual)]
    names = ("By the same cells and seeds, of", "By all of them, of") if alike else ("Of",)
    said += [f"{name} {_told(real, side)}" for name, side in zip(names, sides, strict=True)]
    return [*said, *_only_real(real, virtual)], table


# -- parts -------------------------------------------------------------------------------------


def _name(each: ClaimVerdict) -> str:
    """The claim, by its number where a statement stands for it."""
    number = each.claim.partition(" ")[0]
    what = f"{number} {each.measured}" if each.measured else each.claim
    return f"{each.study}: {what}" if each.study else what


def _sources(real: Verdicts, virtual: Verdicts) -> str:
    source = f" ({real.source})" if real.source else ""
    return (
        f"`{real.command}`{source} beside `{virtual.command}`. Each interval is at the level at "
        "which its claim was judged. On virtual time seeds differ in what is drawn and not in what "
        "a machine does, so that it shows smaller effects."
    )


def _told(real: Verdicts, virtual: Verdicts) -> str:
    """Count how the verdicts stand to each other, and name those that disagree."""
    theirs = {each.key: each for each in real.claims}
    pairs = [(theirs[each.key], each) for each in virtual.claims if each.key in theirs]
    found = Counter(agreement(other, mine) for other, mine in pairs)
    without = found.pop("nothing", 0)
    counts = "; ".join(f"{found[kind]} {words}" for kind, words in MEANING.items() if found[kind])
    named = [_name(mine) for other, mine in pairs if agreement(other, mine) in OPEN]
    disputed = f" Apart or in disagreement: {'; '.join(named)}." if named else ""
    told = f"{_claims(len(pairs) - without)} that both have judged: {counts or 'none'}.{disputed}"
    return f"{told}{_without(pairs)}" if without else told


def _without(pairs: Sequence[tuple[ClaimVerdict, ClaimVerdict]]) -> str:
    """Say how many claims are not counted, as they have no figure on one side."""
    real = sum(not other.has_figure for other, _ in pairs)
    virtual = sum(other.has_figure and not mine.has_figure for other, mine in pairs)
    sides = ((real, "real processes"), (virtual, "virtual time"))
    told = " and ".join(f"{n} without a figure on {where}" for n, where in sides if n)
    return f" Not counted: {told}, where there is nothing to agree on."


def _only_real(real: Verdicts, virtual: Verdicts) -> list[str]:
    mine, theirs = ({each.key for each in side.claims} for side in (virtual, real))
    alone = Counter(each.study for each in real.claims if each.key not in mine)
    asked = len(mine - theirs)
    said = []
    if asked:
        said.append(f"No verdict by real processes has {_claims(asked)}: asked later.")
    if alone:
        told = ", ".join(f"{n} of {study}" if study else f"{n}" for study, n in alone.items())
        said.append(
            f"By real processes alone were judged {told}: there are no such trials on virtual "
            "time, or the claim is asked otherwise since."
        )
    return [" ".join(said)] if said else []


def _claims(n: int) -> str:
    return "1 claim" if n == 1 else f"{n} claims"
