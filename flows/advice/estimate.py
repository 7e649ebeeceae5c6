"""What each strategy is expected to cost a training, and which costs the least under what failures.

Setbacks are measured by trials; how often they come follows from the mean time between failures, so
that the same trials answer for others as well. What trials cannot show is added: outages longer
than theirs, intervals of checkpoints longer than theirs, and both nodes of a pair lost at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, variance

from dps.core.checkpoint_interval import Estimate
from flows.advice.emulation import STEADY_EVERY, simulated_outage
from flows.advice.goodput import Setbacks, goodput, lost_share, twice_within
from flows.advice.situation import CONTINUE_LIMIT, Situation
from flows.advice.trials import Trialled, between_restores, interval

SECONDS_PER_HOUR = 3600.0
MILLION = 1e6
# From where on a second failure within what the first one cost is no exception any more.
NO_EXCEPTION = 0.1
# Mean times between failures at which another strategy is looked for: ten to a decade.
SHORTEST, LONGEST, STEPS = 1.0, 3e8, 10
HALVINGS = 12  # of a tenth of a decade: to far less than a percent


@dataclass(frozen=True, slots=True)
class Expected:
    """What a strategy is expected to cost.

    Attributes
    ----------
    label
        The strategy's name.
    every
        Updates between two checkpoints at most; None: it writes none.
    layered
        Whether they lie below a chain or a store, where `every: auto` is refused.
    extra
        Server-side nodes beyond one for each shard.
    pace
        Gradients a second without failures, over those without recovery.
    kept
        The share of gradients that is kept, of a training without failures and without recovery.
    half_width
        Of the 95% interval of `kept`, by how the trials differ; None: too few of them.
    at_risk
        Acked updates of a shard that a failure of a server-side node loses, on the average.
    stale
        Gradients that were buffered during an outage and applied after it, for each failure.
    setback
        Seconds by which a failure sets the training back, on the average; infinite where it may
        have to begin again by it.
    usd
        For a million gradients that are kept.
    relative
        That over what it is under the cheapest strategy.
    fatal
        Mean seconds until all of a shard is lost; infinite: nothing does that by itself.
    lost_time
        By how many seconds failures set it back, for each second of progress.
    """

    label: str
    every: int | None
    layered: bool
    extra: int
    pace: float
    kept: float
    half_width: float | None
    at_risk: float
    stale: float
    setback: float
    usd: float
    relative: float
    fatal: float
    lost_time: float


def expected(
    situation: Situation, trialled: Sequence[Trialled], mtbf: float | None = None
) -> list[Expected]:
    """Return what each strategy is expected to cost; the first is that without recovery.

    Parameters
    ----------
    mtbf
        Mean time between failures of a server-side node, in seconds, if not the situation's.
    """
    mtbf = situation.mtbf if mtbf is None else mtbf
    plain = trialled[0].rate
    found = [_expected(situation, each, plain, mtbf) for each in trialled]
    least = min(each.usd for each in found)
    return [replace(each, relative=each.usd / least) for each in found]


def cheapest(found: Sequence[Expected]) -> Expected:
    """Return the strategy that costs the least for each gradient that is kept."""
    return min(found, key=lambda each: (each.usd, each.at_risk))


@dataclass(frozen=True, slots=True)
class Flip:
    """A mean time between failures at which another strategy becomes the one to use."""

    mtbf: float
    label: str


def flips(situation: Situation, trialled: Sequence[Trialled]) -> tuple[Flip | None, Flip | None]:
    """Return the next flip below the situation's mean time between failures, and above it."""
    here = _best(situation, trialled, situation.mtbf)
    factor = 10 ** (1 / STEPS)

    def looked_for(factor: float) -> Flip | None:
        near = situation.mtbf
        while SHORTEST <= near <= LONGEST:
            far = near * factor
            if _best(situation, trialled, far) != here:
                return _between(situation, trialled, near, far, here)
            near = far
        return None

    return looked_for(1 / factor), looked_for(factor)


# -- parts -------------------------------------------------------------------------------------


def _expected(situation: Situation, each: Trialled, plain: float, mtbf: float) -> Expected:
    every = None
    if each.write is not None:
        every = interval(each.write, between_restores(situation, each.strategy, mtbf))
    setbacks = _setbacks(situation, each, plain, every, mtbf)
    kept, lost_time = goodput(setbacks, mtbf, situation.training), lost_share(setbacks, mtbf)
    count = sum(setbacks.nodes.values())
    hourly = count * situation.server_price + situation.workers * situation.worker_price
    return Expected(
        label=each.strategy.label,
        every=every,
        layered=each.strategy.layered,
        extra=count - situation.servers,
        pace=setbacks.pace,
        kept=kept,
        half_width=_half_width(each, kept, mtbf, lost_time),
        at_risk=_at_risk(each, every, setbacks.pair_losses * mtbf / count),
        stale=_mean_by_nodes(each, {role: s.stale for role, s in each.strikes.items()}),
        setback=math.inf if _fatal_roles(each) else lost_time * mtbf / count,
        usd=hourly / SECONDS_PER_HOUR / (kept * plain) * MILLION if kept else math.inf,
        relative=math.nan,
        fatal=1 / setbacks.fatal if setbacks.fatal else math.inf,
        lost_time=lost_time,
    )


def _setbacks(
    situation: Situation, each: Trialled, plain: float, every: int | None, mtbf: float
) -> Setbacks:
    """What failures cost under a strategy, if checkpoints are so many updates apart."""
    nodes, fatal_roles = each.layout.nodes, _fatal_roles(each)
    fatal = sum(nodes[role] for role in fatal_roles) / mtbf
    pair_losses = 0.0
    if each.strategy.twins is not None:
        pairs = max(nodes[role] for role in each.strategy.twins)
        pair_losses = twice_within(pairs, mtbf, situation.again)
    rate = 1 / (1 / each.rate + _writing(each, every))
    seconds = {
        role: 0.0 if role in fatal_roles else _setback(situation, each, role, every, rate)
        for role in nodes
    }
    pace, again = rate / plain, situation.again
    if not each.strategy.layered:
        return Setbacks(pace, nodes, seconds, fatal + pair_losses, again)
    read = situation.profile.disk.seconds(round(situation.nbytes / situation.servers))
    restored = again + read + _since_checkpoint(each, every) / rate
    return Setbacks(pace, nodes, seconds, fatal, again, pair_losses, restored)


def _fatal_roles(each: Trialled) -> set[str]:
    """The roles of which the loss of one node leaves nothing of a shard, or ends the training."""
    ended = {role for role, strikes in each.strikes.items() if strikes.failure}
    return ended | ({"server"} if each.strategy.restarts else set())


def _setback(
    situation: Situation, each: Trialled, role: str, every: int | None, rate: float
) -> float:
    """By how many seconds the loss of a node of this role sets the training back."""
    strikes = each.strikes[role]
    seconds = fmean(strikes.setbacks)
    short = simulated_outage(situation)
    buffers = each.strategy.buffers and role == "server"
    if buffers or seconds > short / 2:  # the training waited for the fresh node, or will
        free = CONTINUE_LIMIT * situation.gradient if buffers else 0.0
        seconds += max(0.0, situation.outage - max(short, free))
    if role == "server":
        seconds += _further(each, every) / rate
    return max(0.0, seconds)


def _writing(each: Trialled, every: int | None) -> float:
    """Seconds that checkpoints hold up each gradient beyond what they did in the trial's pace."""
    if each.write is None or every is None:
        return 0.0
    return each.write.cost * (1 / _due(each.write, every) - 1 / _due(each.write, STEADY_EVERY))


def _due(write: Estimate, every: int) -> float:
    """Updates from the begin of a write to that of the next."""
    return max(every / 2, write.during, 1.0)


def _further(each: Trialled, every: int | None) -> float:
    """How many updates a loss costs beyond those of the trials, whose interval was shorter.

    A write begins when half of the interval is over, so that what is not yet in one grows from 0 to
    that: by a quarter of the interval on the average. What is layered goes back to none by itself.
    """
    return 0.0 if every is None or each.strategy.layered else (every - each.every) / 4


def _since_checkpoint(each: Trialled, every: int | None) -> float:
    """How many updates came since the newest complete checkpoint began, on the average."""
    if each.write is None or every is None:
        return 0.0
    return _due(each.write, every) / 2 + each.write.during


def _at_risk(each: Trialled, every: int | None, pair_share: float) -> float:
    """Acked updates that a failure loses; `pair_share` of them take both nodes of a pair."""
    if _fatal_roles(each):
        return math.inf
    lost = {
        role: [n + (_further(each, every) if role == "server" else 0.0) for n in strikes.lost]
        for role, strikes in each.strikes.items()
    }
    below = pair_share * _since_checkpoint(each, every) if each.strategy.layered else 0.0
    return max(0.0, _mean_by_nodes(each, lost)) + below


def _mean_by_nodes(each: Trialled, figures: Mapping[str, Sequence[float]]) -> float:
    """The mean over all nodes, each of which is lost as often."""
    nodes = each.layout.nodes
    means = {role: fmean(values) for role, values in figures.items() if values}
    count = sum(nodes[role] for role in means)
    return sum(nodes[role] * mean for role, mean in means.items()) / count if count else 0.0


def _half_width(each: Trialled, kept: float, mtbf: float, lost_time: float) -> float | None:
    """By Student's t, from the variance of the setbacks of each role."""
    from scipy.stats import t

    freedom, total = 0, 0.0
    for role, strikes in each.strikes.items():
        trials = len(strikes.setbacks)
        if role in _fatal_roles(each):
            continue
        if trials < 2:
            return None
        freedom += trials - 1
        total += (each.layout.nodes[role] / mtbf) ** 2 * variance(strikes.setbacks) / trials
    if not freedom:
        return None
    return kept * float(t.ppf(0.975, freedom)) * math.sqrt(total) / (1 + lost_time)


def _best(situation: Situation, trialled: Sequence[Trialled], mtbf: float) -> str:
    return cheapest(expected(situation, trialled, mtbf)).label


def _between(
    situation: Situation, trialled: Sequence[Trialled], near: float, far: float, here: str
) -> Flip:
    """Where between two mean times another strategy than the one near becomes the one to use."""
    label = ""
    for _ in range(HALVINGS):
        middle = math.sqrt(near * far)
        if (found := _best(situation, trialled, middle)) == here:
            near = middle
        else:
            far, label = middle, found
    return Flip(far, label or _best(situation, trialled, far))
