"""The delivery of finished trials to the tracking store, also across outages of the store.

The records on disk are the truth; here is kept only which trials the store may lack. A store that
fails does not hold up the experiment: that is told once, and what it lacks is delivered when it is
back, at the latest when the experiment ends. What it refuses while it is well holds up nothing: it
is told, and not tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dps.errors import StoreUnavailable
from flows.analysis.finished import Finished
from flows.analysis.outcome import Outcome
from flows.records.record import Record
from flows.tracking.store import Refused
from flows.tracking.tracker import Tracker

# How many times as long as the last attempt took the store is left alone after it: one that does
# not answer at all makes an experiment a tenth longer at most.
REST = 9


Entry = tuple[Finished, str]  # a trial, and the digest of its data set


class Delivery:
    """Delivers the trials of one experiment, each once and whole.

    Parameters
    ----------
    connect
        Connects to the store; called again after each outage.
    say
        Is told when an outage begins, when it is over, and what is refused.
    now
        A clock in seconds that never goes back.

    Attributes
    ----------
    refused
        What the store does not take: names of trials, or the report.

    Raises
    ------
    StoreUnavailable
        The store cannot be used to begin with.
    """

    def __init__(
        self,
        connect: Callable[[], Tracker],
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._say = say
        self._now = now
        self._tracker: Tracker | None = connect()
        self._known: dict[str, Entry] = {}
        self._lacking: dict[str, Entry] = {}
        self.refused: list[str] = []
        self._out = False
        self._rests_until = now()

    def trial(self, done: Finished, dataset_digest: str) -> None:
        """Deliver a trial, and what was not delivered before; or later, if the store is out."""
        name = done.outcome.identity.trial
        self._known[name] = self._lacking[name] = done, dataset_digest
        if self._now() >= self._rests_until:
            self._attempt(lambda tracker: None)

    def experiment(
        self, trials: Sequence[tuple[Record, Outcome]], report: Path, figures: Path
    ) -> bool:
        """Deliver what is left, and the experiment as a whole.

        Return whether the store has all of it, but for what it refuses.
        """

        def finish(tracker: Tracker) -> None:
            try:
                tracker.track_experiment(trials, report, figures)
            except Refused as error:
                self._leave_out("the report", error)

        return self._attempt(finish)

    def _attempt(self, finish: Callable[[Tracker], None]) -> bool:
        began = self._now()
        failure = self._fails(finish)
        if failure is not None and not self._out:
            # It may have been just a connection that was closed, and there is no need to say so.
            failure = self._fails(finish)
        if failure is None:
            if self._out:
                self._say("the tracking store is back, and has what was kept for it")
            self._out = False
            return True
        if not self._out:
            self._say(f"{failure} The trials go on: they are kept on disk, and delivered later.")
        self._out = True
        self._rests_until = self._now() + REST * (self._now() - began)
        return False

    def _fails(self, finish: Callable[[Tracker], None]) -> StoreUnavailable | None:
        try:
            self._deliver(finish)
        except StoreUnavailable as error:
            self._tracker = None
            return error
        return None

    def _deliver(self, finish: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            self._tracker = self._connect()
            # Nobody knows what has become of the store: whatever is there whole stays as it is.
            self._lacking = {n: e for n, e in self._known.items() if n not in self.refused}
        for name, entry in list(self._lacking.items()):
            # Whichever fails is the last to be tried again: it keeps no other from the store.
            del self._lacking[name], self._known[name]
            self._lacking[name] = self._known[name] = entry
            self._enter(self._tracker, name, entry)
            del self._lacking[name]
        finish(self._tracker)

    def _enter(self, tracker: Tracker, name: str, entry: Entry) -> None:
        done, dataset_digest = entry
        try:
            tracker.track_trial(done.record, done.outcome, done.events_file, dataset_digest)
        except Refused as error:
            self._leave_out(name, error)

    def _leave_out(self, what: str, error: Refused) -> None:
        self.refused.append(what)
        self._say(f"{error} It is kept on disk.")
