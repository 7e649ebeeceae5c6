"""What an overview of a group takes from what shards say and what workers report."""

from __future__ import annotations

from dps.cluster.scheduler.overview import _last_losses, _most, is_news
from dps.events import Detected, WorkerLeft


def test_of_several_shards_the_one_counts_that_has_most_and_calls_are_no_updates() -> None:
    shards = [{"a": 3, "b": 7, "a/calls": 90}, {"a": 5}, {"b": 6}]
    assert _most(shards) == {"a": 5, "b": 7}


def test_the_loss_of_a_worker_is_the_last_that_it_has_reported() -> None:
    def report(worker: str, *values: float, name: str = "loss") -> dict[str, object]:
        return {"event": "Reported", "worker": worker, "name": name, "values": values}

    batches = [
        (1.0, [report("a", 0.9, 0.8), report("b", 0.7)]),
        (2.0, [report("a", 0.6), report("a", 0.5, 0.4), report("a", 0.99, name="accuracy")]),
        (3.0, [report("b"), {"event": "Acked", "worker": "a"}]),
    ]
    assert _last_losses(batches) == {"a": 0.4, "b": 0.7}


def test_who_has_finished_is_no_news_and_who_was_lost_is() -> None:
    assert not is_news(WorkerLeft(1.0, "a", 1, "finished"))
    assert is_news(WorkerLeft(1.0, "a", 1, "lost"))
    assert is_news(Detected(1.0, 0, 2, "server-0", False, "lease"))
