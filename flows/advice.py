"""The choice of a recovery strategy for a large training, predicted from a grid of small trials.

Failures are too rare to occur by chance, so the grid has trials without a failure and trials that
lose one node. The failure rate is applied afterwards: each server-side node fails once per mean
time between failures. Each failure sets the training back by D seconds, so by the renewal-reward
theorem the share of gradients that is kept is pace / (1 + λD). If a failure leaves no copy of a
shard, the training restarts.

The model is a perceptron. Its profile scales the times per byte to the size of the real model;
latencies, start times and detection times are unchanged.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

import numpy as np
from dask.utils import parse_bytes, parse_timedelta

from dps.core.names import role_of
from dps.errors import ConfigurationError
from dps.protocol.timings import Timings
from flows.quoting import quoted

if TYPE_CHECKING:
    import pandas as pd

    from dps.virtual.profile import Profile
    from flows.config.trials import Trial
    from flows.metrics.outcome import Outcome

HIDDEN, FEATURES, CLASSES = 128, 64, 10  # of the perceptron: hidden units for each server
LEASES = 4  # a lease, over the time in which servers take in a gradient of each worker
LONGEST_OUTAGE = 60.0  # workers give a shard up after two minutes; longer outages are computed
BUFFERED = 32  # gradients that a worker buffers at most, by default
SATURATED = 0.5  # from this share of their time on, workers wait for servers rather than compute
NO_EXCEPTION = 0.1  # from this λD on, a failure often falls into what is left of another
MAX_RESTARTS = 700.0  # e to this is nearly the largest float
NO_FAILURE = "no failure"
LOSSES = {"server": "a server lost", "replica": "a replica lost", "store": "the store lost"}
LAYERED = " + checkpoint"  # the end of the names of strategies with checkpoints below


@dataclass(frozen=True, slots=True)
class Situation:
    """A training, what it runs on, and how its servers fail; sizes in bytes, times in seconds.

    Attributes
    ----------
    nbytes
        Size of the model's parameters.
    workers, servers
        Number of workers, and of servers; each server has one shard.
    gradient
        Time that a worker needs to compute a gradient.
    mtbf
        Mean time between two failures of one server-side node.
    outage
        Time from the loss of a node until its replacement starts.
    training
        Duration of the training without failures and without recovery.
    every
        Updates between two checkpoints.
    server_price, worker_price
        USD for one hour of one node.
    profile
        Time costs of the nodes.
    """

    nbytes: int
    workers: int
    servers: int
    gradient: float
    mtbf: float
    outage: float
    training: float
    every: int
    server_price: float
    worker_price: float
    profile: Profile

    @property
    def round_seconds(self) -> float:
        """Minimum time that a server is busy with one gradient of each worker."""
        costs, shard = self.profile, self.nbytes / self.servers
        takes_in = costs.service.message + shard * (costs.service.byte + costs.service.update)
        return self.workers * max(takes_in, shard / costs.link.bandwidth)

    def check(self) -> None:
        """Refuse a training whose servers could not answer within the deadline of a call."""
        most = Timings().call / 2  # as much goes out as comes in
        if self.round_seconds > most:
            raise ConfigurationError(
                f"a server needs {self.round_seconds:.3g} s to receive one gradient from each of "
                f"{self.workers} workers, expected at most {most:g} s (calls have a deadline of "
                f"{Timings().call:g} s): use more --servers, fewer --workers or a smaller --model"
            )


def configuration(situation: Situation, seeds: int, name: str, profile: str) -> str:
    """Return the experiment `name`: each strategy without a failure, and with that of each role.

    `profile` is the file with what `scaled_profile` returns.
    """
    workers, outage = situation.workers, min(situation.outage, LONGEST_OUTAGE)
    begin = 2 * workers + 8  # every worker is at it
    plain = partial(np.format_float_positional, trim="0")  # YAML reads 1e-05 as a string
    after = workers * (4 + min(BUFFERED, math.ceil(outage / situation.gradient) + 1)) + 16
    return Template((files("flows") / "advice.yaml").read_text("utf-8")).substitute(
        name=json.dumps(name),
        profile=json.dumps(profile),
        seeds=seeds,
        hidden=HIDDEN * situation.servers,
        servers=situation.servers,
        workers=workers,
        gradient=plain(situation.gradient),
        lease=plain(max(Timings().lease, LEASES * situation.round_seconds)),
        updates=begin + situation.every + after,
        every=situation.every,
        phases=[begin, begin + situation.every],
        outage=plain(outage),
    )


def scaled_profile(situation: Situation) -> dict[str, Any]:
    """Return the profile with times per byte scaled up from the small model to the real one."""
    hidden, old = HIDDEN * situation.servers, situation.profile
    ratio = situation.nbytes / (4 * ((FEATURES + 1) * hidden + (hidden + 1) * CLASSES))
    service, disk = old.service, old.disk
    scaled = replace(
        old,
        name=f"{old.name}-scaled",
        link=replace(old.link, bandwidth=old.link.bandwidth / ratio),
        service=replace(service, byte=service.byte * ratio, update=service.update * ratio),
        disk=replace(disk, bandwidth=disk.bandwidth / ratio),
    )
    source = f"{old.name}, by dps advise: one byte takes the time of {ratio:.4g} bytes"
    return {"sources": [source], **asdict(scaled)}


def expected(
    situation: Situation, trials: Sequence[Trial], outcomes: Sequence[Outcome]
) -> pd.DataFrame:
    """Return what each strategy is expected to cost, the cheapest first.

    Raises `ConfigurationError` if no trial of a strategy without a failure went well.

    Returns
    -------
    table
        By strategy: server-side `nodes`; `pace`, gradients a second without failures over those
        without recovery; `kept`, the share of gradients that is kept; `setback`, the seconds by
        which a failure sets the training back on the average (infinite: it restarts); `lost`,
        updates that the loss of a server loses; `usd` for a million gradients that are kept;
        `lost_time`, seconds by which failures set it back for each second of progress.
    """
    import pandas as pd

    rows = pd.DataFrame([{**each.row(), **each.identity.labels} for each in outcomes if each.valid])
    columns = ["gradients_together", "effect_training_seconds", "updates_lost"]
    means = rows.groupby(["recovery", "faults"])[columns].mean()
    names = {trial.labels["recovery"]: trial.config.node_names for trial in trials}
    if any((strategy, NO_FAILURE) not in means.index for strategy in names):
        raise ConfigurationError("trials without a failure are invalid: see the comparison above")
    costs = {
        strategy: _expected(situation, strategy, Counter(map(role_of, nodes)), means)
        for strategy, nodes in names.items()
    }
    return pd.DataFrame(costs).T.sort_values(["usd", "lost"])


def recommendation(found: pd.DataFrame) -> str:
    """Return the recommended strategy, with the share of gradients that it keeps."""
    best, second = found.iloc[0], found.iloc[1]
    if math.isinf(best.usd):
        return "Use none of them: at this MTBF the training is never expected to end."
    return (
        f"Use {best.name}: it keeps {best.kept:.2%} of the gradients, at the lowest price per "
        f"gradient; {second.name} costs {second.usd / best.usd - 1:.1%} more."
    )


def warnings(
    situation: Situation, found: pd.DataFrame, outcomes: Sequence[Outcome]
) -> Iterator[str]:
    """Yield warnings: limits of the estimate, and what should be changed first."""
    undisturbed = {"recovery": "none", "faults": NO_FAILURE}
    idle = [o.row()["idle_share"] for o in outcomes if o.identity.labels == undisturbed]
    if max(idle) > SATURATED:
        yield (
            f"The servers are the bottleneck: workers wait for {max(idle):.0%} of their time. "
            "More servers (--servers), filters or fewer workers help more than any recovery."
        )
    if situation.outage > Timings().unavailable:
        yield (
            f"The outage is longer than {Timings().unavailable:g} s, after which workers give up "
            "a shard: restart it by hand, or keep spares."
        )
    if often := list(found.index[found.lost_time > NO_EXCEPTION]):
        yield (
            f"Failures set {', '.join(often)} back by more than {NO_EXCEPTION:.0%} of the time "
            "between them, so many of them overlap: the share of gradients kept is an upper bound."
        )


def seconds_of(text: str, option: str) -> float:
    """Return the seconds of a text such as "6h"; raise `ConfigurationError` naming `option`."""
    try:
        seconds = float(parse_timedelta(text))
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"{option} {quoted(text)}: expected a time above 0, in seconds or with ms, s, m, h or "
            "d, such as 0.2, 40m or 6h"
        )
    return seconds


def bytes_of(text: str, option: str) -> int:
    """Return the bytes of a text such as "400MB"; raise `ConfigurationError` naming `option`."""
    try:
        nbytes = int(parse_bytes(text)) if text.endswith("B") else 0
    except ValueError:
        nbytes = 0
    if nbytes < 1:
        raise ConfigurationError(
            f"{option} {quoted(text)}: expected a size with its unit, such as 400MB or 1.5GiB"
        )
    return nbytes


def _expected(
    situation: Situation, strategy: str, roles: Counter[str], means: pd.DataFrame
) -> dict[str, float]:
    mtbf, again = situation.mtbf, situation.outage + situation.profile.start
    rate = means.gradients_together[strategy, NO_FAILURE]
    plain = means.gradients_together["none", NO_FAILURE]
    lost_time, fatal, lost = 0.0, 0.0, math.inf
    lost_roles = [role for role in LOSSES if roles[role]]
    for role in lost_roles:
        struck = strategy, LOSSES[role]
        if struck in means.index:
            seconds = _whole_setback(situation, means.effect_training_seconds[struck])
            lost_time += roles[role] * seconds / mtbf
            lost = means.updates_lost[struck] if role == "server" else lost
        else:  # no training survived it
            fatal += roles[role] / mtbf
    setback = math.inf if fatal else lost_time
    if len(lost_roles) == 2:  # the second loss happens within the outage of the first
        both = max(roles[role] for role in lost_roles) * 2 / mtbf * -math.expm1(-again / mtbf)
        if strategy.endswith(LAYERED):
            lost_time += both * (again + situation.every / 2 / rate)
        else:
            fatal += both
    pace, work = rate / plain, situation.training
    steady = kept = pace / (1 + lost_time)
    if fatal:
        kept = work / _until_whole(work / steady, fatal, again)
    nodes = roles.total() - roles["worker"] - roles["evaluator"]
    hourly = nodes * situation.server_price + situation.workers * situation.worker_price
    return {
        "nodes": nodes,
        "pace": pace,
        "kept": kept,
        "setback": setback * mtbf / nodes,
        "lost": lost,
        "usd": hourly / 3600 / (kept * plain) * 1e6 if kept else math.inf,
        "lost_time": lost_time,
    }


def _whole_setback(situation: Situation, seconds: float) -> float:
    """A setback with the part of the outage that the trial has left out, if it waited for it."""
    tried = min(situation.outage, LONGEST_OUTAGE)
    return max(0.0, seconds + (situation.outage - tried if seconds > tried / 2 else 0.0))


def _until_whole(work: float, rate: float, down: float) -> float:
    """Return the expected time until `work` seconds pass without a failure.

    Each failure costs all progress and `down` seconds: (1/rate + down)·(e^(rate·work) - 1), as for
    work without checkpoints (Daly 2006). Infinity if it is too large for a float.
    """
    expected = rate * work
    return math.inf if expected > MAX_RESTARTS else (1 / rate + down) * math.expm1(expected)
