"""Claims and verdicts in words: the claim, the difference, and the reason of the verdict."""

from __future__ import annotations

from flows.config.claims import ClaimSection
from flows.metrics.metric import SHARES, Metric
from flows.metrics.score import ACCURACY, Score
from flows.quoting import first_few
from flows.statistics import CONFIDENCE, MIN_SEEDS
from flows.statistics.claims import JudgedClaim
from flows.statistics.comparison import p_text, uneven_text
from flows.statistics.power import POWER, fewest_seeds

TONES = {"holds": "good", "does not hold": "bad", "not resolved": "open"}
NO_CLAIMS = (
    "No claims were fixed beforehand (claims: in the configuration), so there are no verdicts: "
    "everything below is exploratory."
)
FINE = 0.005  # an interval of shares narrower than half a point is written with two decimals
MIN_USD = 0.1  # smaller amounts are written in µUSD


def title(claim: ClaimSection, score: Score = ACCURACY) -> str:
    """Return the sentence of a claim: its own, or one made of its parts."""
    text = claim.claim or statement(claim, score)
    return text[:1].upper() + text[1:]


def statement(claim: ClaimSection, score: Score = ACCURACY) -> str:
    """Return what is claimed, made of the parts of a claim."""
    under = "".join(f", {label}" for label in claim.condition.values())
    other = "0" if claim.one_sample else claim.baseline
    subject = f"{score.of(claim.column).label} of {claim.strategy}{under}"
    if claim.direction == "equivalent":
        return f"{subject}: within {smallest(claim, score)} of {other}"
    return f"{subject}: {claim.direction} than {other} (of interest from {smallest(claim, score)})"


def smallest(claim: ClaimSection, score: Score = ACCURACY) -> str:
    """Return the smallest difference of interest with its unit."""
    if claim.relative:
        return f"{100 * claim.smallest:g}% of {claim.baseline}"
    column = score.of(claim.column)
    if column.unit in SHARES:
        points = f"{100 * claim.smallest:.3g}"
        return f"{points} point{'s' * (points != '1')}"
    (number,), unit = amounts(column, claim.smallest)
    number = number.rstrip("0").rstrip(".") if "." in number else number
    return f"{number} {unit}".rstrip()


def amounts(column: Metric, *values: float, finer: bool = False) -> tuple[list[str], str]:
    """Return values of a metric as texts, and their unit."""
    scale, unit = 1.0, "points" if column.unit in SHARES else column.shown_unit
    if column.unit == "USD":
        scale, unit = money(max(map(abs, values)))
    return [column.format(scale * value, finer) for value in values], unit


def money(most: float) -> tuple[float, str]:
    """Return the scale and the unit for amounts of money of at most `most` USD."""
    return (1.0, "USD") if most >= MIN_USD else (1e6, "µUSD")


def found(judged: JudgedClaim) -> str:
    """Return the difference with its interval at the level of the verdict, seeds and p-value."""
    difference, column, bounds = judged.difference, judged.column, judged.bounds
    if difference is None:
        return ""
    finer = bounds is not None and 0 < bounds[1] - bounds[0] < FINE
    (mean, *interval), unit = amounts(column, difference.mean, *(bounds or ()), finer=finer)
    text = f"{'+' * (difference.mean > 0)}{mean} {unit}".rstrip()
    if interval and difference.n >= MIN_SEEDS:
        level = f" at {100 * judged.decision.confidence:.3g}%" if judged.claims > 1 else ""
        text += f" [{', '.join(interval)}{level}]"
    text += f", {difference.n} seed{'s' * (difference.n != 1)}"
    if judged.decision.corrected is not None:
        p = p_text(judged.decision.corrected)
        text += f", {'corrected ' * (judged.claims > 1)}p {'' if p.startswith('<') else '= '}{p}"
    return text


def reason(judged: JudgedClaim) -> str:
    """Return what the verdict means for the size of the difference, or why there is none yet."""
    claim, verdict, least = (
        judged.claim,
        judged.decision.verdict,
        smallest(judged.claim, judged.score),
    )
    if verdict == "not resolved":
        return _unresolved(judged)
    if claim.direction == "equivalent":
        return f"within {least}" if verdict == "holds" else f"apart by more than {least}"
    if verdict == "holds":
        beyond = judged.size == "beyond"
        return f"by {least} or more" if beyond else f"whether by {least} or more is open"
    low, high = judged.bounds or (0.0, 0.0)
    if high < 0 if claim.direction == "more" else low > 0:
        return "the difference goes the other way"
    return f"the difference is less than {least}, if there is any"


def _unresolved(judged: JudgedClaim) -> str:
    difference, needed = judged.difference, judged.needed
    if judged.uneven is not None:
        return uneven_text(judged.uneven)
    if difference is None or difference.n < MIN_SEEDS:
        return f"a verdict takes at least {MIN_SEEDS} seeds"
    least = smallest(judged.claim, judged.score)
    if difference.subset_means is not None:
        fewest = fewest_seeds((1 - CONFIDENCE) / judged.claims, exact=True)
        if difference.n < fewest:
            return f"the sign-flip test of counts takes at least {fewest} seeds"
    if needed is None:
        return f"a million seeds would not resolve a difference of {least}"
    if needed > difference.n:
        return f"about {needed:,} seeds would resolve a difference of {least} ({POWER:.0%} power)"
    return "more seeds would narrow the interval"


def warnings(judged: JudgedClaim) -> tuple[str, ...]:
    """Return which seeds do not count, and what speaks against a claim fixed beforehand."""
    texts = []
    if judged.unusable:
        texts.append(f"trials that do not count: {first_few(judged.unusable)}")
    if judged.late:
        texts.append(f"fixed after the data: {judged.late} of {judged.trials} trials began before")
    if len(judged.planned) > 1:
        grew = ", then ".join(map(str, judged.planned))
        texts.append(f"seeds were added after the first run ({grew}): errors are likelier than 5%")
    return tuple(texts)


def verdict_sentence(judged: JudgedClaim) -> str:
    """Return difference, verdict and reason in one sentence."""
    because = reason(judged)
    verdict = f"{judged.decision.verdict}{f' ({because})' if because else ''}"
    text = ": ".join(filter(None, [found(judged), verdict]))
    return f"{text[:1].upper()}{text[1:]}."


def legend(claims: int) -> str:
    """Return how claims are judged, and at which level intervals are."""
    family = "one claim" if claims == 1 else f"{claims} claims together (Holm's correction)"
    return (
        f"Judged at the 5% level for {family}, seed by seed: measures by the paired t-test, counts "
        "by the exact sign-flip test. Intervals are at the level of the verdict, "
        f"{CONFIDENCE:.0%} or more."
    )
