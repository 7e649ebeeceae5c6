"""What filters did, as figures of a trial."""

from __future__ import annotations

import pytest

from dps.events import Event, Filtered
from flows.analysis.outcome import outcome
from flows.analysis.resources import Filtering, filtering
from flows.metrics import BY_KEY
from flows.records.record import Record
from tests.support.records import PRICES


def filtered(worker: str, incarnation: int, *counts: int, norm: float = 0.0) -> Event:
    raw, sent, entries, withheld = counts
    return Filtered(50.0, worker, incarnation, raw, sent, entries, withheld, norm)


def test_the_last_event_of_each_start_of_a_worker_counts() -> None:
    record = Record(
        (
            filtered("worker-0", 1, 400, 100, 100, 80, norm=9.0),
            filtered("worker-1", 1, 800, 600, 200, 100),
            filtered("worker-0", 1, 800, 200, 200, 160, norm=3.0),
            filtered("worker-0", 3, 400, 200, 100, 40),
        )
    )
    assert filtering(record) == Filtering(2000, 1000, 0.5, 0.6, 3.0)
    row = outcome(record, PRICES).row()
    assert (row["filter_saved"], row["filter_lost"]) == (0.5, 3.0)
    assert BY_KEY["filter_saved"].text(row["filter_saved"]) == "50.0"


def test_a_trial_without_filters_has_no_such_figures() -> None:
    row = outcome(Record(()), PRICES).row()
    assert all(row[key] is None for key in row if key.startswith("filter_"))
    assert filtering(Record(())).saved is None


def test_what_is_kept_never_makes_more_of_a_share_than_it_is() -> None:
    record = Record((filtered("worker-0", 1, 8, 12, 2, 0),))
    assert filtering(record).saved == pytest.approx(-0.5), "indices may cost more than they save"
