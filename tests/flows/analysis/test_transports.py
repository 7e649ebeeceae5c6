"""By what arrays were sent, as records tell and reports say."""

from __future__ import annotations

from dps.events import Connected
from flows.analysis.transports import described, transports
from tests.support.records import fault


def connected(*by: str) -> dict[str, int]:
    return transports(fault(*(Connected(1.0, "worker-0", "tcp://a:1", name, "") for name in by)))


def test_the_most_frequent_comes_first() -> None:
    found = connected("stream", "shared_memory", "shared_memory")
    assert list(found.items()) == [("shared_memory", 2), ("stream", 1)]
    assert described([found, connected("stream", "stream")]) == "streams, shared memory"


def test_an_older_record_says_nothing() -> None:
    assert connected() == {}
    assert described([connected()]) == ""
