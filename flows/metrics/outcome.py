"""The outcome of a trial: all its metrics, and other facts about it.

An outcome holds no record, so that those of a whole experiment fit into memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dps.events import Connected
from flows.metrics import METRICS
from flows.metrics.effects import Effects
from flows.metrics.faults import FaultTimes
from flows.metrics.metric import Value
from flows.metrics.prices import Prices
from flows.metrics.processes import is_overloaded
from flows.metrics.score import ACCURACY, Score
from flows.metrics.trial import Identity, Trial
from flows.records.record import Record

REAL = ""


@dataclass(frozen=True)
class Outcome:
    """One trial in figures.

    Attributes
    ----------
    status, reason
        "valid", "invalid" (a planned fault did not happen, or a node that no fault had struck was
        evicted) or "failed", and why.
    values
        The metrics by key; see `row` for all of them.
    effects
        Effects of the faults, against the trial's control; known only together with other trials,
        see `flows.statistics.finished.with_effects`.
    whole
        Whether the record is of the whole training; False for a trial that was resumed after an
        interruption, whose record begins there.
    transports
        Transports of arrays between its nodes, with the number of pairs that used each, most first.
    virtual
        The profile of its virtual time; "": it ran on real nodes.
    overloaded
        Whether the machine that drove it had more load than cores and processes of the trial.
    circumstances
        Conditions that its results do not depend on: the number of concurrent trials and of planned
        seeds, and the claims that were fixed when it began.
    """

    identity: Identity
    status: str
    reason: str
    values: Mapping[str, Value]
    faults: tuple[FaultTimes, ...] = ()
    effects: Effects = Effects()  # noqa: RUF009
    score: Score = ACCURACY
    whole: bool = True
    transports: Mapping[str, int] = field(default_factory=dict)
    virtual: str = REAL
    overloaded: bool = False
    circumstances: Mapping[str, int] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """Whether the trial may enter statistics."""
        return self.status == "valid"

    def row(self) -> Mapping[str, Any]:
        """Return every metric by its key, JSON-ready, with the same keys for all trials.

        The record of a resumed trial lacks the start of the training, so its metrics of the whole
        training are None.
        """
        return self._row

    @cached_property
    def _row(self) -> dict[str, Value]:
        # The status of a running trial differs from the one that follows from its record.
        known = {**self.values, "status": self.status, "reason": self.reason}
        return {
            metric.key: None
            if metric.whole and not self.whole
            else metric.compute(self.effects)
            if metric.of_effects
            else known[metric.key]
            for metric in METRICS
        }


def outcome(record: Record, prices: Prices, folder: str = "") -> Outcome:
    """Return the metrics of one trial, from its events and the price table alone.

    `folder` names the trial if its record has no start.
    """
    trial = Trial(record, prices, folder)
    judged, reason = trial.status
    cluster = record.config.get("cluster", {}) if record.started is not None else {}
    virtual = cluster.get("kind") == "virtual"
    return Outcome(
        identity=trial.identity,
        status=judged,
        reason=reason,
        values={m.key: m.compute(trial) for m in METRICS if not m.of_effects},
        faults=trial.faults,
        score=trial.score,
        whole=trial.whole,
        transports=dict(Counter(e.transport for e in record.of(Connected)).most_common()),
        virtual=str(cluster.get("profile", "?")) if virtual else REAL,
        overloaded=is_overloaded(record),
        circumstances=record.circumstances,
    )
