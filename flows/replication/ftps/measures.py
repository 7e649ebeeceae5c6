"""What the replication of Pampari and Patel reads out of a trial's record.

An iteration is one gradient of each worker, so with w workers a shard is at iteration version / w.
Every accuracy is that of the evaluator's snapshots.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from dps.events import Evaluated, Reported, Restored, WorkerLeft
from flows.analysis.faults import FaultTimes
from flows.analysis.learning import evaluations
from flows.analysis.outcome import Outcome
from flows.records.record import Record

NEAR = 3  # iterations that an evaluation may be old to count as that before a failure


@dataclass(frozen=True)
class Measured:
    """One trial, as this replication looks at it."""

    record: Record
    outcome: Outcome

    @property
    def seed(self) -> int:
        """Trials with the same seed are compared with one another."""
        return self.outcome.identity.seed or 0

    @property
    def workers(self) -> int:
        """How many workers it has, which is how many updates make an iteration."""
        return int(self.record.config["training"]["workers"])

    @property
    def servers(self) -> int:
        """How many shards, each on a server of its own."""
        return int(self.record.config["server"]["shards"])

    @property
    def batch_size(self) -> int:
        """Examples per gradient."""
        return int(self.record.config["training"]["batch_size"])

    @property
    def failure_at(self) -> int | None:
        """The iteration at which a server is to be lost; None: never."""
        faults = self.record.config["faults"]
        return int(faults[0]["at_updates"]) // self.workers if faults else None

    @property
    def comparable(self) -> bool:
        """Whether it is valid and whole, and no worker was given up, as on a busy machine."""
        lost = (event for event in self.record.of(WorkerLeft) if event.was_lost)
        return self.outcome.valid and self.outcome.whole and not any(lost)

    @property
    def iteration_seconds(self) -> float:
        """How long an iteration takes: the median over iterations, the mean over workers."""
        each = self._spans().values()
        return fmean(median(end - start for start, end in spans) for spans in each)

    @property
    def samples_per_second(self) -> float:
        """Examples that are differentiated in a second."""
        return self.batch_size * self.workers / self.iteration_seconds

    @property
    def failing_iteration_seconds(self) -> float | None:
        """How long the iteration takes in which the server is lost; None without a failure."""
        fault = self.fault
        if fault is None or fault.first_applied is None:
            return None
        # The barrier holds the others up as well, some of them one iteration later.
        longest = [
            max((end - start for start, end in spans if _meet(start, end, fault)), default=0.0)
            for spans in self._spans().values()
        ]
        return fmean(longest)

    @property
    def fault(self) -> FaultTimes | None:
        """The moments of its failure."""
        return self.outcome.faults[0] if self.outcome.faults else None

    @property
    def before(self) -> float | None:
        """The last accuracy before the failure; None where the evaluator had fallen behind."""
        fault = self.fault
        if fault is None:
            return None
        scores = [s for s in evaluations(self.record) if s.t < fault.began]
        return self._last(scores, fault.updates / self.workers)

    def drop(self, at: int | None = None) -> float | None:
        """Return how far accuracy fell at the failure.

        That is the last evaluation before it minus the first after all serve again. With `at`,
        for a trial without a failure: minus the next evaluation after iteration `at`.
        """
        if at is None:
            after, before = self.outcome.accuracy.after, self.before
        else:
            scores = evaluations(self.record)
            before = self._last([s for s in scores if self.iteration(s) < at], at)
            after = next((s.accuracy for s in scores if self.iteration(s) >= at), None)
        return None if before is None or after is None else before - after

    @property
    def iterations_to_regain(self) -> float | None:
        """How many iterations after the failure its accuracy was what it had been before.

        Where it never was, how many iterations there were after the failure: a lower bound.
        """
        fault, before = self.fault, self.before
        if fault is None or fault.serving is None or before is None:
            return None
        after = [s for s in evaluations(self.record) if s.t >= fault.serving]
        if not after:
            return None
        restored = min(e.version for e in self.record.of(Restored) if e.t >= fault.began)
        regained = next((s for s in after if s.accuracy >= before), after[-1])
        return max(0.0, self.iteration(regained) - restored / self.workers)

    def _last(self, scores: Sequence[Evaluated], iteration: float) -> float | None:
        """The accuracy of the last of some snapshots, if it is near enough to an iteration."""
        near = bool(scores) and self.iteration(scores[-1]) >= iteration - NEAR
        return scores[-1].accuracy if near else None

    def iteration(self, score: Evaluated) -> float:
        """Return the iteration of a snapshot."""
        return score.updates / self.workers

    def accuracy_by_iteration(self, last: int) -> dict[int, float]:
        """Return accuracy by whole iteration up to `last`; what a failure took back is replaced."""
        found = {round(self.iteration(s)): s.accuracy for s in evaluations(self.record)}
        return {iteration: found[iteration] for iteration in sorted(found) if iteration <= last}

    def _spans(self) -> dict[str, list[tuple[float, float]]]:
        times: defaultdict[str, list[float]] = defaultdict(list)
        for event in self.record.of(Reported):
            if event.name == "loss":
                times[event.worker].extend(event.times)
        return {worker: list(pairwise(sorted(ts))) for worker, ts in times.items()}


def _meet(start: float, end: float, fault: FaultTimes) -> bool:
    """Whether a span of time meets that from the failure to the first update after it."""
    assert fault.first_applied is not None
    return start <= fault.first_applied and fault.began <= end
