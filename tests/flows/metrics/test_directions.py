"""Of every figure it is said whether more or less of it is better, and not the wrong way round."""

from __future__ import annotations

import re

import pytest

from flows.metrics import BY_KEY, COLUMNS

HIGHER = {
    *("effect_time_mean", "effect_time_end", "effect_time_area"),
    *("effect_gradients_mean", "effect_gradients_end", "effect_money_mean", "effect_money_end"),
    *("accuracy_final", "accuracy_best", "accuracy_after", "accuracy_lowest_after"),
    *("accuracy_area_time", "accuracy_area_gradients"),
    *("updates_applied", "goodput", "filter_saved"),
    *("gradients_per_second", "gradients_together", "gradients_steady"),
}

# What tells how a trial was, and not how well it went.
NEITHER = {
    *("failed_before", "faults", "faults_skipped", "fault_updates", "effect_time_span"),
    *("accuracy_before", "accuracy_before_mean", "target_accuracy", "evaluations"),
    *("wait_capacity_seconds", "updates_attempted", "updates_acked", "updates_buffered"),
    *("updates_replayed", "updates_duplicates", "updates_unrecorded", "gradients_pushed"),
    *("filter_raw_bytes", "filter_withheld", "load_average"),
    # These must be 0, and make a trial invalid otherwise.
    *("updates_applied_twice", "updates_replica_conflicts", "updates_audit_mismatches"),
}

# What costs something, whatever it is called before and after that.
COSTS = re.compile(
    r"downtime|outages|recovery|regain|rto|detect_|restore_|deficit|drop|lost|missed|usd|staleness"
    r"|cpu_seconds|peak_bytes|_bytes_all|training_seconds|idle|loss|rmse|objective|stationarity"
)


@pytest.mark.parametrize("key", [column.key for column in COLUMNS if column.metric])
def test_more_of_a_figure_is_better_only_where_it_is_so(key: str) -> None:
    by_role_and_link = re.fullmatch(r"sent_bytes_(?!link|all)\w+_\w+", key)
    neither = key in NEITHER or by_role_and_link
    expected = "higher" if key in HIGHER else None if neither else "lower"
    assert BY_KEY[key].better == expected


@pytest.mark.parametrize("key", [key for key in BY_KEY if COSTS.search(key)])
def test_more_of_what_costs_something_is_never_better(key: str) -> None:
    assert key not in HIGHER
    assert BY_KEY[key].better != "higher"
