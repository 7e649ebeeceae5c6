"""What Pampari and Patel claim, and what was measured here to judge each claim by."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean

from dps.core.placement.hash_ring import hashes
from flows.replication.charts import Chart, Dot
from flows.replication.claims import Measurement, mean_of, told
from flows.replication.findings import Table
from flows.replication.ftps.balance import dps_balance, lose_first, ring_balance
from flows.replication.ftps.measures import Measured
from flows.report.figures.style import count_told

VIRTUAL_NODES = (1, 5, 10, 50, 100)
PARAMETERS = (785, 7_850, 78_500)
SERVERS, NAMINGS = 5, 50

# Servers × workers of each → time of an iteration at 1 × 1 over that of the row, and samples/s.
PUBLISHED_SCALING = {
    (1, 1): (1.00, 411),
    (1, 2): (0.83, 682),
    (1, 4): (0.65, 1075),
    (1, 8): (0.43, 1410),
    (2, 1): (0.94, 769),
    (2, 4): (0.48, 1571),
    (4, 1): (0.78, 1279),
    (4, 2): (0.54, 1777),
}
PUBLISHED_DROPS = {40: 2.0, 50: 2.9, 60: 1.3, 100: 0.6}  # points of accuracy
NEVER = "no failure"
FIRST_SHOWN = 10  # before, accuracy rises so steeply that nothing else is seen

Cell = tuple[int, int]
BySeed = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Part:
    """What one part of the replication adds to its findings."""

    claims: Sequence[Measurement]
    tables: Sequence[Table]
    charts: Sequence[Chart]


# -- the ring ------------------------------------------------------------------------------------


def ring_findings() -> Part:
    """Balance the ring under many names of its servers, which are what its luck depends on."""
    keys = {n: hashes([f"w{i}" for i in range(n)]) for n in PARAMETERS}
    balance = {
        n: {
            v: [ring_balance(keys[n], _servers(i), v) for i in range(NAMINGS)]
            for v in VIRTUAL_NODES
        }
        for n in PARAMETERS
    }
    blocks = {n: [dps_balance(f"w{i}", n, SERVERS) for i in range(NAMINGS)] for n in PARAMETERS}
    first, last = VIRTUAL_NODES[0], VIRTUAL_NODES[-1]
    few = balance[PARAMETERS[0]]
    gain = [one - many for one, many in zip(few[first], few[last], strict=True)]
    moves = [lose_first(keys[PARAMETERS[0]], _servers(i), last) for i in range(NAMINGS)]
    moved = [100 * move.own / move.keys for move in moves]
    others = sum(move.others for move in moves)
    claims = [
        Measurement(
            f"More virtual nodes balance the ring: largest load over the mean, at {first} minus at "
            f"{last} of them",
            "falls",
            gain,
            least=0,
            over="namings",
        ),
        Measurement(
            "The loss of one of five servers moves its keys, about a fifth, and no others",
            "154 of 785 (19.6%)",
            moved,
            least=15,
            most=25,
            unit="%",
            digits=1,
            over="namings",
            note=f"; {others} other keys",
            refuted=others > 0,
        ),
    ]
    return Part(claims, [_ring_table(balance, blocks)], [_ring_chart(balance, blocks)])


def _servers(naming: int) -> list[str]:
    return [f"{naming}/server-{i}" for i in range(SERVERS)]


def _ring_table(
    balance: Mapping[int, Mapping[int, Sequence[float]]], blocks: Mapping[int, Sequence[float]]
) -> Table:
    rows = [
        (f"{n:,}", *(_range(balance[n][v]) for v in VIRTUAL_NODES), _range(blocks[n]))
        for n in PARAMETERS
    ]
    title = f"Largest load over the mean of {SERVERS} servers: mean and worst of {NAMINGS} namings"
    return Table(title, ("parameters", *(f"{v} virtual" for v in VIRTUAL_NODES), "dps"), rows)


def _range(values: Sequence[float]) -> str:
    return f"{fmean(values):.2f}, {max(values):.2f}"


def _ring_chart(
    balance: Mapping[int, Mapping[int, Sequence[float]]], blocks: Mapping[int, Sequence[float]]
) -> Chart:
    lines = {
        f"consistent hashing, {n:,} keys": [_dot(v, balance[n][v]) for v in VIRTUAL_NODES]
        for n in PARAMETERS
    }
    ours = {
        f"blocks of dps, {n:,} parameters": [_dot(v, blocks[n]) for v in VIRTUAL_NODES]
        for n in PARAMETERS
    }
    return Chart(
        "ring-balance",
        f"Largest load over the mean of {SERVERS} servers; bars are 95% intervals of the mean.",
        "virtual nodes per server",
        "largest load / mean load",
        {**lines, **ours},
        f"n = {NAMINGS} namings; point: mean, bar: 95% interval of the mean; points of one number "
        "of virtual nodes stand side by side",
        dashed=frozenset(ours),
        logarithmic=True,
        beside=True,
    )


# -- servers × workers ---------------------------------------------------------------------------


def scaling_findings(trials: Sequence[Measured]) -> Part:
    """Compare the time of an iteration with that of one server and one worker, seed by seed."""
    seconds: defaultdict[Cell, dict[int, float]] = defaultdict(dict)
    samples: defaultdict[Cell, dict[int, float]] = defaultdict(dict)
    for trial in trials:
        cell = (trial.servers, trial.workers // trial.servers)
        if cell[1]:
            seconds[cell][trial.seed] = trial.iteration_seconds
            samples[cell][trial.seed] = trial.samples_per_second
    rates = {cell: _ratio(seconds[1, 1], found) for cell, found in sorted(seconds.items())}
    more = _ratio(samples[1, 4], samples[1, 1])
    servers = _ratio(seconds[1, 4], seconds[4, 1])
    claims = [
        Measurement(
            "More workers differentiate more samples a second: 1 × 4 over 1 × 1",
            "2.62",
            list(more.values()),
            least=1,
        ),
        Measurement(
            "Iterations take longer with more workers: speed of 1 × 4 over that of 1 × 1",
            "0.65",
            list(rates.get((1, 4), {}).values()),
            most=1,
        ),
        Measurement(
            "The same workers are faster with more servers: speed of 4 × 1 over that of 1 × 4",
            "1.19",
            list(servers.values()),
            least=1,
        ),
    ]
    return Part(claims, [_scaling_table(seconds, samples, rates)], [_scaling_chart(rates)])


def _scaling_table(
    seconds: Mapping[Cell, BySeed], samples: Mapping[Cell, BySeed], rates: Mapping[Cell, BySeed]
) -> Table:
    rows = []
    for cell, rate in rates.items():
        published = PUBLISHED_SCALING.get(cell)
        rows.append(
            (
                f"{cell[0]}\u00a0×\u00a0{cell[1]}",  # on one line
                f"{published[0]:.2f}" if published else "–",
                _told(rate),
                f"{published[1]:,}" if published else "–",
                _mean(samples[cell], ",.0f"),
                _mean({k: 1000 * v for k, v in seconds[cell].items()}, ".0f"),
            )
        )
    return Table(
        "Servers × workers of each: speed of an iteration over that of 1 × 1",
        ("", "published", "here", "published samples/s", "samples/s here", "ms per iteration here"),
        rows,
    )


def _scaling_chart(rates: Mapping[Cell, BySeed]) -> Chart:
    here: defaultdict[str, list[Dot]] = defaultdict(list)
    published: defaultdict[str, list[Dot]] = defaultdict(list)
    for (servers, each), rate in rates.items():
        name = "1 server" if servers == 1 else f"{servers} servers"
        if rate:
            here[name].append(_dot(servers * each, list(rate.values())))
        if (servers, each) in PUBLISHED_SCALING:
            dot = Dot(servers * each, PUBLISHED_SCALING[servers, each][0])
            published[f"{name}, published"].append(dot)
    return Chart(
        "servers-workers",
        "Speed of an iteration over that with one server and one worker; bands are 95% intervals.",
        "workers in all",
        "relative speed of an iteration",
        {**here, **published},
        f"{_seeds_told(rates.values())}; line: mean, band: 95% interval of the mean; published "
        "without any",
        dashed=frozenset(published),
        logarithmic=True,
    )


# -- the loss of a server ------------------------------------------------------------------------


@dataclass(frozen=True)
class Losses:
    """What the loss of a server did, by the iteration at which it was lost, then by seed."""

    lost: Mapping[int, Mapping[int, Measured]]
    quiet: Mapping[int, Measured]

    @cached_property
    def drops(self) -> dict[int, BySeed]:
        """Points of accuracy lost at once, less what the same moment costs without a loss."""
        lost = self.each(Measured.drop)
        return {
            at: _points_above(lost[at], _of(self.quiet, partial(Measured.drop, at=at)))
            for at in lost
        }

    @cached_property
    def finals(self) -> dict[int, BySeed]:
        """Final accuracy minus that without a loss, in points."""
        quiet = _of(self.quiet, _final)
        return {at: _points_above(lost, quiet) for at, lost in self.each(_final).items()}

    def each(self, measure: Callable[[Measured], float | None]) -> dict[int, BySeed]:
        """Return a measure of the trials that lost a server."""
        return {at: _of(trials, measure) for at, trials in self.lost.items()}


def failure_findings(trials: Sequence[Measured]) -> Part:
    """Compare trials that lose a server with those of the same seed that lose none."""
    lost: defaultdict[int, dict[int, Measured]] = defaultdict(dict)
    quiet: dict[int, Measured] = {}
    for trial in trials:
        at = trial.failure_at
        (quiet if at is None else lost[at])[trial.seed] = trial
    found = Losses({at: lost[at] for at in sorted(lost)}, quiet)
    return Part(_failure_claims(found), [_failure_table(found)], [_failure_chart(found)])


def _failure_claims(found: Losses) -> list[Measurement]:
    return [
        Measurement(
            "The loss costs accuracy at once: points lost, minus those without a failure",
            "0.6 to 2.9",
            _pooled(found.drops),
            least=0,
            unit=" points",
        ),
        Measurement(
            "A later loss costs less: points at the earliest iteration minus at the latest",
            "1.4",
            list(_first_minus_last(found.drops).values()),
            least=0,
            unit=" points",
        ),
        Measurement(
            "Accuracy is regained within 5 iterations",
            "2 to 5",
            _pooled(found.each(_regain)),
            most=5,
            unit=" iterations",
        ),
        Measurement(
            "The failing iteration takes longer: its time over that of a normal one",
            "3.8 (1.7 s, 0.45 s)",
            _pooled(found.each(_times_longer)),
            least=1,
        ),
        Measurement(
            "The final accuracy is lower than without a failure: points of difference",
            "−0.5 to −0.8",
            _pooled(found.finals),
            most=0,
            unit=" points",
        ),
    ]


def _failure_table(found: Losses) -> Table:
    headings = (
        "failure at iteration",
        "points lost, published",
        "points lost, minus those without a failure",
        "iterations to regain",
        "failing iteration, ms",
        "normal iteration, ms",
        "final accuracy minus that without a failure, points",
    )
    regains, failing, normal = map(found.each, (_regain, _failing_ms, _normal_ms))
    rows = [
        (
            str(at),
            f"{PUBLISHED_DROPS[at]:.1f}" if at in PUBLISHED_DROPS else "–",
            _told(found.drops[at]),
            _told(regains[at], 1),
            _told(failing[at], 0),
            _told(normal[at], 0),
            _told(found.finals[at]),
        )
        for at in found.lost
    ]
    return Table("The loss of one of five servers", headings, rows)


def _points_above(lost: BySeed, quiet: BySeed) -> BySeed:
    """By how many percentage points each value is above that of the same seed without a loss."""
    return {seed: 100 * (lost[seed] - quiet[seed]) for seed in lost.keys() & quiet.keys()}


def _first_minus_last(drops: Mapping[int, BySeed]) -> BySeed:
    """The drop at the earliest moment minus that at the latest, seed by seed."""
    if len(drops) < 2:
        return {}
    first, last = drops[min(drops)], drops[max(drops)]
    return {seed: first[seed] - last[seed] for seed in first.keys() & last.keys()}


def _final(trial: Measured) -> float | None:
    return trial.outcome.accuracy.final


def _regain(trial: Measured) -> float | None:
    return trial.iterations_to_regain


def _times_longer(trial: Measured) -> float | None:
    failing = trial.failing_iteration_seconds
    return None if failing is None else failing / trial.iteration_seconds


def _failing_ms(trial: Measured) -> float | None:
    failing = trial.failing_iteration_seconds
    return None if failing is None else 1000 * failing


def _normal_ms(trial: Measured) -> float:
    return 1000 * trial.iteration_seconds


def _failure_chart(found: Losses) -> Chart:
    shown = {f"failure at {at}": each for at, each in found.lost.items()}
    lines = {name: _accuracy_line(trials, found.quiet) for name, trials in shown.items()}
    lows = [dot.y if dot.low is None else dot.low for dots in lines.values() for dot in dots]
    return Chart(
        "accuracy-failure",
        "Test accuracy minus that of the same seed without a failure, from iteration "
        f"{FIRST_SHOWN} on, mean over seeds with 95% intervals.",
        "iteration",
        "difference of accuracy, points",
        lines,
        f"{_seeds_told(shown.values())}; line: mean, band: 95% interval of the mean",
        lowest=1.06 * min(lows, default=0.0),
        width="double",
    )


def _accuracy_line(
    trials: Mapping[int, Measured], quiet: Mapping[int, Measured], last: int = 120
) -> list[Dot]:
    values: defaultdict[int, list[float]] = defaultdict(list)
    for seed in trials.keys() & quiet.keys():
        without = quiet[seed].accuracy_by_iteration(last)
        for iteration, accuracy in trials[seed].accuracy_by_iteration(last).items():
            if iteration in without:
                values[iteration].append(100 * (accuracy - without[iteration]))
    return [
        _dot(iteration, values[iteration])
        for iteration in sorted(values)
        if iteration >= FIRST_SHOWN
    ]


# -- parts -------------------------------------------------------------------------------------


def _dot(x: float, values: Sequence[float]) -> Dot:
    found = mean_of(values)
    return Dot(x, found.mean, found.low, found.high)


def _seeds_told(found: Iterable[Mapping[int, object]]) -> str:
    return count_told([len(by_seed) for by_seed in found if by_seed] or [0])


def _ratio(values: BySeed, others: BySeed) -> BySeed:
    """Each value over the other one with the same seed."""
    return {seed: values[seed] / others[seed] for seed in values.keys() & others.keys()}


def _of(trials: Mapping[int, Measured], measure: Callable[[Measured], float | None]) -> BySeed:
    found = {seed: measure(trial) for seed, trial in trials.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _pooled(parts: Mapping[int, BySeed]) -> list[float]:
    """The mean over parts of each seed that all of them have, so that each seed counts once."""
    found = list(parts.values())
    seeds = set.intersection(*map(set, found)) if found else set()
    return [fmean(part[seed] for part in found) for seed in sorted(seeds)]


def _told(by_seed: BySeed, digits: int = 2) -> str:
    return told(mean_of(list(by_seed.values())), "", digits) if by_seed else "–"


def _mean(by_seed: BySeed, form: str) -> str:
    return format(fmean(by_seed.values()), form) if by_seed else "–"
