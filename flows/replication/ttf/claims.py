"""The paper's five claims: what each means in numbers, and when it holds.

Each claim is statements about a difference, most of them two. Both sides of it are trials with the
same number of kills, of workers, and seed; a seed's value is the mean over the cells that both
sides have. A statement says which way the difference is to go and which size would matter to
anybody:

- it *holds* if the difference is shown to be on the claimed side of 0;
- it *does not hold* if it is shown to be smaller than the smallest difference that matters;
- else it is *not resolved*.

Both are shown by the same rule, that for the claims of an experiment: at the 5% level, corrected by
Holm's method for all statements of the study (`flows.analysis.statistics.decisions`).

Accuracy before against after a kill, which is what the paper tells of claims 1 and 2, contains what
would have been learnt anyway in that time: it is told as published and *not judged*. Judged is the
same minus what a control gained, the training of the same seed without a kill, over the same
seconds (`Change.effect`).

So a claim is judged by its direction; the size that was published is told beside what was found.
Of claims 1 and 2, that training *converges* is not judged: a trial ends long before it could be
said to have.

A claim of sameness holds if the difference is shown to be within the margin, and does not if it is
shown to be outside. That of the price is judged for each number of kills by itself, and of each
number of workers: what is dearer in one setting and cheaper in another can be the same on average,
and is the same in neither. For that reason there is a statement for each strategy that stateless is
compared with, too: checkpoint and chain lie on either side of it.

The statements stand in code, for no figure of a configuration's `claims:` measures them. So that it
can be told whether one was there before the data, each trial's record names a digest of every
statement that there was when it began (`fixed`); of one without it the verdict says so.

A trial that never reaches the target accuracy bounds its time from below: it would have taken
longer than its whole length. A ratio with such a trial on one side is a bound as well, and such
bounds may only support the verdict that they understate (`Reach`); a pair of two says nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from statistics import fmean
from typing import Final, Literal

import numpy as np

from flows.analysis.statistics import CONFIDENCE, Difference, Interval, paired
from flows.analysis.statistics.claims import FIXED
from flows.analysis.statistics.decisions import (
    Decision,
    Evidence,
    Verdict,
    decide_by,
    equivalent,
    evidence,
    evidence_of_each,
    more,
)
from flows.replication.ttf.measures import Cells, Change, Measured, by_cell, by_seed
from flows.replication.verdicts import NO_FIGURE

BASES = ("checkpoint", "chain")
HIT = (1, 2)  # numbers of kills
KILLS = {0: "no kill", 1: "one kill", 2: "two kills"}
POINT = 0.01  # a percentage point of accuracy
SHARE = 0.02  # of time or of pace
SAME_COST = 0.10
DIGEST_LENGTH = 12

BY_CONSTRUCTION: Final = "by construction"
NOT_JUDGED: Final = "not judged"

LATE: Final = "fixed after the data"
# What is beside the verdict of a statement, by what it is about.
NODES: Final = "by construction: two nodes against three"
SEEDS_ONLY: Final = "interval over seeds only"  # on virtual time, of times and what follows of them

CLAIMS = {
    1: "Stateless gains accuracy across a failure (published: up to 10 points; 15 in the text)",
    2: "Checkpoint and chain are set back by restarting from old state",
    3: "Continuing during downtime improves hardware utilisation",
    4: "Stateless costs about the same under fixed instance pricing",
    5: "Checkpointing takes longer to its target accuracy after two kills (published: about 10% "
    "longer, to 70%)",
}


@dataclass(frozen=True, slots=True)
class Reach:
    """Which trials of the pairs that a ratio of times is made of reached the target.

    A ratio is at least what was found where only its numerator never reached the target, and at
    most that where only its denominator did not.
    """

    pairs: int
    both: int
    mine: int
    others: int

    @property
    def at_least(self) -> bool:
        """Whether some ratio is a lower bound, which cannot show that there is no difference."""
        return self.others > self.both

    @property
    def at_most(self) -> bool:
        """Whether some ratio is an upper bound, which cannot show that there is a difference."""
        return self.mine > self.both

    def allow(self, found: Verdict) -> Verdict:
        """Return the verdict where the bounds support it, else "not resolved"."""
        hidden = (found == "holds" and self.at_most) or (found == "does not hold" and self.at_least)
        return "not resolved" if hidden else found

    def tell(self, effect: str) -> str:
        """Return an effect as the bound that it is, and how many trials reached the target."""
        if self.at_least and self.at_most:
            effect = NO_FIGURE
        elif self.at_least or self.at_most:
            effect = f"{'at least' if self.at_least else 'at most'} {effect}"
        return f"{effect}; target reached by {self.mine} and {self.others} of {self.pairs}"


@dataclass(frozen=True, slots=True)
class Statement:
    """One difference that a claim is about.

    `of` returns its value for each cell that both sides have. `margin` is the smallest difference
    that matters; with `same`, the largest that does not. `reach` tells which values are bounds.
    Not `judged` is what does not measure what the claim says, and is told because it was published.
    `timed` is what follows from times, which virtual time takes from a profile. `settled` tells
    what settles most of the value before anything runs. `reworded` is a statement that was put this
    way when trials of its study had been seen: on virtual time, where the same seed is the same
    data, running them again makes it no earlier.
    """

    claim: int
    text: str
    of: Callable[[Sequence[Measured]], Cells]
    margin: float = POINT
    unit: Literal["points", "%"] = "points"
    same: bool = False
    judged: bool = True
    reach: Callable[[Sequence[Measured]], Reach] | None = None
    timed: bool = False
    settled: str = ""
    reworded: bool = False

    @property
    def digest(self) -> str:
        """Digest of what is stated."""
        said = [self.claim, self.text, self.margin, self.unit, self.same]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:DIGEST_LENGTH]

    @property
    def title(self) -> str:
        """The claim that it is about, with its number."""
        return f"{self.claim}. {CLAIMS[self.claim]}"


@dataclass(frozen=True, slots=True)
class Judged:
    """A statement with what was found; `difference` is None where no seed could tell.

    `confidence` is the level of the interval that is told: that of the verdict, if there is one.

    `parts` are the differences by number of workers where the claim is about each of them.

    The verdict is "by construction" for what was settled before anything ran, "not judged" for a
    statement that is not.

    `notes` say what is to be known of the verdict: whether the statement was fixed beforehand, what
    settles it, and what its interval leaves out.
    """

    statement: Statement
    difference: Difference | None
    verdict: Verdict | Literal["by construction", "not judged"]
    reach: Reach | None = None
    confidence: float = CONFIDENCE
    parts: Mapping[int, Difference] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def effect(self) -> str:
        """Return the mean difference and its interval as text, and whether it is a bound."""
        return self.reach.tell(self._effect()) if self.reach else self._effect()

    @property
    def interval(self) -> Interval | None:
        """The effect with the interval that is told; None without any, or if it is only a bound."""
        found, reach = self.difference, self.reach
        if found is None or (reach is not None and (reach.at_least or reach.at_most)):
            return None
        low, high = found.bounds(self.confidence) or (None, None)
        return Interval(found.mean, low, high, found.n)

    def _effect(self) -> str:
        found = self.difference
        if found is None:
            return NO_FIGURE
        unit = " points" if self.statement.unit == "points" else "%"
        if self.verdict == BY_CONSTRUCTION:
            return f"{100 * found.mean:+.1f}{unit}"
        bounds = ""
        if (interval := found.bounds(self.confidence)) is not None:
            bounds = f" [{100 * interval[0]:+.1f}, {100 * interval[1]:+.1f}]"
        return f"{100 * found.mean:+.1f}{bounds}{unit}, n={found.n}{self._each(unit)}"

    def _each(self, unit: str) -> str:
        """The parts, where there are several."""
        if len(self.parts) < 2:
            return ""
        told = (
            f"{100 * part.mean:+.1f}{unit} with {workers}" for workers, part in self.parts.items()
        )
        return f"; by workers: {', '.join(told)}"


# -- what is measured --------------------------------------------------------------------------


def _select(
    trials: Iterable[Measured], strategies: Sequence[str], kills: Sequence[int]
) -> list[Measured]:
    return [t for t in trials if t.strategy in strategies and t.kills in kills]


def _change(trials: Sequence[Measured], *strategies: str) -> Cells:
    """Accuracy after the kills minus that before, as published."""
    return _of_kills(trials, strategies, lambda change: change.points)


def _effect(trials: Sequence[Measured], *strategies: str) -> Cells:
    """The same, minus what the controls gained; of the kills that have one."""
    return _of_kills(trials, strategies, lambda change: change.effect)


def _of_kills(
    trials: Sequence[Measured],
    strategies: Sequence[str],
    of: Callable[[Change], float | None],
) -> Cells:
    parts = []
    for strategy in strategies:
        hit = [
            (trial, [value for change in trial.changes if (value := of(change)) is not None])
            for trial in _select(trials, [strategy], HIT)
        ]
        parts.append(by_cell((trial, fmean(values)) for trial, values in hit if values))
    return _mean(parts)


def _lost(cells: Cells) -> Cells:
    return {cell: -value for cell, value in cells.items()}


def _minus(values: Cells, base: Cells) -> Cells:
    return {cell: values[cell] - base[cell] for cell in sorted(values.keys() & base.keys())}


def _more_than(of: Callable[..., Cells], trials: Sequence[Measured], base: str) -> Cells:
    """By how much stateless has more of something than another strategy."""
    return _minus(of(trials, "stateless"), of(trials, base))


def _less_than(of: Callable[..., Cells], trials: Sequence[Measured], base: str) -> Cells:
    return _minus(of(trials, base), of(trials, "stateless"))


def _kept_pace(trials: Sequence[Measured], *strategies: str) -> Cells:
    """Pace with kills over pace without, of the same configuration, workers and seed."""
    parts = []
    for strategy in strategies:
        calm = {(t.label, t.workers, t.seed): t.pace for t in _select(trials, [strategy], (0,))}
        hit = [
            (t, calm.get((t.label, t.workers, t.seed))) for t in _select(trials, [strategy], HIT)
        ]
        parts.append(by_cell((t, t.pace / base) for t, base in hit if base))
    return _mean(parts)


def _idle(trials: Sequence[Measured], *strategies: str) -> Cells:
    hit = [_select(trials, [name], HIT) for name in strategies]
    return _mean([by_cell((t, t.idle) for t in each if t.idle is not None) for each in hit])


def _mean(parts: Sequence[Cells]) -> Cells:
    """Mean over strategies, each with the same weight, for the cells that all have."""
    shared = set.intersection(*(set(part) for part in parts))
    return {cell: fmean(part[cell] for part in parts) for cell in sorted(shared)}


def _cost(trials: Sequence[Measured], base: str, kills: int) -> Cells:
    mine, others = (
        by_cell((t, t.fixed_usd) for t in _select(trials, [name], (kills,)))
        for name in ("stateless", base)
    )
    shared = sorted(cell for cell in mine.keys() & others.keys() if others[cell])
    return {cell: mine[cell] / others[cell] - 1 for cell in shared}


def _to_target(trials: Sequence[Measured], base: str, kills: int) -> Cells:
    return by_cell(
        (mine, mine.to_target / other.to_target - 1)
        for mine, other in _pairs(trials, base, kills)
        if (mine.reached or other.reached) and other.to_target
    )


def _reach(trials: Sequence[Measured], base: str, kills: int) -> Reach:
    reached = [(mine.reached, other.reached) for mine, other in _pairs(trials, base, kills)]
    return Reach(
        pairs=len(reached),
        both=sum(mine and other for mine, other in reached),
        mine=sum(mine for mine, _ in reached),
        others=sum(other for _, other in reached),
    )


def _pairs(trials: Sequence[Measured], base: str, kills: int) -> list[tuple[Measured, Measured]]:
    """Checkpoint with two kills beside the trials of `base` with as many workers and that seed."""
    return [
        (mine, other)
        for mine in _select(trials, ["checkpoint"], (2,))
        for other in _select(trials, [base], (kills,))
        if (mine.workers, mine.seed) == (other.workers, other.seed)
        and (base != "checkpoint" or mine.label == other.label)
    ]


STATEMENTS = (
    Statement(
        1,
        "stateless, as published: first accuracy after a kill minus mean of the last 3 before, "
        "ordinary learning included",
        lambda trials: _change(trials, "stateless"),
        judged=False,
    ),
    Statement(
        1,
        "as published, minus that of checkpoint and chain, each over its own time",
        lambda trials: _minus(_change(trials, "stateless"), _change(trials, *BASES)),
        judged=False,
    ),
    Statement(
        1,
        "stateless: change across the first kill minus the control's over the same seconds",
        lambda trials: _effect(trials, "stateless"),
    ),
    *(
        Statement(
            1,
            f"the same, minus that of {base}",
            partial(_more_than, _effect, base=base),
            reworded=True,
        )
        for base in BASES
    ),
    Statement(
        2,
        "checkpoint, as published: accuracy lost across a kill, ordinary learning included",
        lambda trials: _lost(_change(trials, "checkpoint")),
        judged=False,
    ),
    Statement(
        2,
        "chain, as published: accuracy lost across a kill, ordinary learning included",
        lambda trials: _lost(_change(trials, "chain")),
        judged=False,
    ),
    Statement(
        2,
        "checkpoint: lost across the first kill against the control over the same seconds",
        lambda trials: _lost(_effect(trials, "checkpoint")),
    ),
    Statement(
        2,
        "chain: lost across the first kill against the control over the same seconds",
        lambda trials: _lost(_effect(trials, "chain")),
    ),
    *(
        Statement(
            3,
            f"share of its own pace without kills that stateless keeps, minus that of {base}",
            partial(_more_than, _kept_pace, base=base),
            SHARE,
            timed=True,
            reworded=True,
        )
        for base in BASES
    ),
    *(
        Statement(
            3,
            f"idle share of workers' time with kills: {base} minus stateless",
            partial(_less_than, _idle, base=base),
            SHARE,
            timed=True,
            reworded=True,
        )
        for base in BASES
    ),
    *(
        Statement(
            4,
            f"{told}: price of stateless over {base}, minus 1",
            partial(_cost, base=base, kills=kills),
            SAME_COST,
            "%",
            same=True,
            timed=True,
            settled=NODES if base == "chain" else "",
            reworded=True,
        )
        for base in BASES
        for kills, told in KILLS.items()
    ),
    Statement(
        5,
        "time to the target of checkpoint over stateless, two kills each, minus 1",
        lambda trials: _to_target(trials, "stateless", 2),
        SHARE,
        "%",
        reach=lambda trials: _reach(trials, "stateless", 2),
        timed=True,
    ),
    Statement(
        5,
        "time to the target of checkpoint with two kills over without any, minus 1",
        lambda trials: _to_target(trials, "checkpoint", 0),
        SHARE,
        "%",
        reach=lambda trials: _reach(trials, "checkpoint", 0),
        timed=True,
    ),
)


# -- judging -----------------------------------------------------------------------------------


def fixed() -> dict[str, int]:
    """Return what a trial's record is to say of the statements that there are when it begins."""
    return {FIXED + each.digest: 1 for each in STATEMENTS if each.judged}


def judge(trials: Sequence[Measured], *, timed: bool = False) -> tuple[Judged, ...]:
    """Judge every statement that is to be judged on the trials of one study.

    Where trials are `timed`, all take as long as they were told to: what their nodes cost is known
    before they run, and there is nothing to judge.
    """
    rng = np.random.default_rng(0)
    found = [_found(statement, trials, rng) for statement in STATEMENTS]
    judged = [s.judged and not (timed and s.same) for s in STATEMENTS]
    decisions = iter(decide_by([each.evidence for each in compress(found, judged)]))
    return tuple(
        _judged(each, next(decisions), trials)
        if counts
        else Judged(
            each.statement,
            each.difference,
            BY_CONSTRUCTION if each.statement.judged else NOT_JUDGED,
        )
        for each, counts in zip(found, judged, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Found:
    """What was measured for a statement: over all cells, and by number of workers."""

    statement: Statement
    difference: Difference | None
    parts: Mapping[int, Difference]

    @property
    def evidence(self) -> Evidence:
        """Whether they support the statement, or oppose it."""
        if self.statement.same:
            return evidence_of_each(list(self.parts.values()), equivalent(self.statement.margin))
        return evidence(self.difference, more(self.statement.margin))


def _found(statement: Statement, trials: Sequence[Measured], rng: np.random.Generator) -> _Found:
    cells = statement.of(trials)
    parts = {
        workers: part
        for workers in sorted({workers for _, workers, _ in cells})
        if (part := _difference({c: v for c, v in cells.items() if c[1] == workers}, rng))
    }
    return _Found(statement, _difference(cells, rng), parts)


def _judged(found: _Found, decision: Decision, trials: Sequence[Measured]) -> Judged:
    statement = found.statement
    reach = None if statement.reach is None else statement.reach(trials)
    verdict = decision.verdict if reach is None else reach.allow(decision.verdict)
    parts, notes = found.parts if statement.same else {}, _notes(statement, trials)
    return Judged(statement, found.difference, verdict, reach, decision.confidence, parts, notes)


def _notes(statement: Statement, trials: Sequence[Measured]) -> tuple[str, ...]:
    virtual = any(trial.virtual for trial in trials)
    late = sum(statement.digest not in trial.fixed for trial in trials)
    told = []
    if statement.reworded and (late or virtual):
        told.append(LATE)
    elif late:
        told.append(f"{LATE}: {late} of {len(trials)} trials had begun before")
    told += [statement.settled] if statement.settled else []
    return (*told, SEEDS_ONLY) if statement.timed and virtual else tuple(told)


def _difference(cells: Cells, rng: np.random.Generator) -> Difference | None:
    values = by_seed(cells)
    return paired(values, dict.fromkeys(values, 0.0), rng)
