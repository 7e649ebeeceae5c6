"""What is shown of a parameter server, as text and as HTML that is whole and escaped."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from dps import L1, SSP, Chain, Continue, Proximal, Recovery
from dps.core.ranges import brief
from dps.observe.views import (
    Listing,
    ShardView,
    TrainingView,
    WorkerView,
    missing_copies,
    overview_html,
    overview_line,
    size,
)

SHARDS = Listing(
    [
        ShardView(0, "server-0", ("server-0", "replica-0-1"), 1204, 2, 3_400_000, "tcp://h:1", 2),
        ShardView(1, "", (), None, 3, 3_400_000, wanted=1),
    ]
)
WORKERS = Listing(
    [
        WorkerView("worker-0", "running", 1204, 1204, 41.27, {"loss": 0.34}),
        WorkerView("worker-1", "waiting", 0, None, None),
    ]
)
TRAINING = TrainingView("3f9c12aa", "running", 0.0, 1204, shards=SHARDS, workers=WORKERS)
FACTS = {"arrays": "3", "recovery": "Checkpoint(path='/data/<b>&')"}


class Checked(HTMLParser):
    """Reads HTML whose tags must all be closed, in order; collects its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_listing_is_a_tuple_that_shows_as_a_table() -> None:
    assert SHARDS[0].node == "server-0"
    lines = repr(SHARDS).splitlines()
    heads = "shard node version epoch copies other replicas size address"
    assert " ".join(lines[0].split()) == heads
    assert " ".join(lines[1].split()) == "0 server-0 1,204 2 2 of 2 replica-0-1 3.4 MB tcp://h:1"
    assert lines[2].split() == ["1", "down", "–", "3", *["0", "of", "1", "–", "3.4", "MB", "–"]]
    assert "rate" not in lines[0], "no shard has one"
    assert [shard.serving for shard in SHARDS] == [True, False]
    text = [text.strip() for text in Checked(WORKERS._repr_html_()).text if text.strip()]
    names = ["worker", "status", "gradients", "clock", "gradients/s", "loss"]
    assert text[:6] == repr(WORKERS).splitlines()[0].split() == names
    assert text[6:12] == ["worker-0", "running", "1,204", "1,204", "41.3", "0.34"]
    assert repr(Listing[ShardView]()) == "()"


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [
        *((0, "0 bytes"), (999, "999 bytes"), (1_000, "1.0 kB"), (12_345, "12.3 kB")),
        *((999_949, "999.9 kB"), (999_950, "1.0 MB"), (999_950_000, "1.0 GB")),
    ],
)
def test_a_size_has_the_unit_of_the_number_that_is_shown(nbytes: int, shown: str) -> None:
    assert size(nbytes) == shown


def test_one_line_says_what_it_is() -> None:
    line = overview_line(TRAINING, FACTS)
    assert line == (
        "<ParameterServer 3f9c12aa: arrays=3, recovery=Checkpoint(path='/data/<b>&'), "
        "workers=2 (1 running)>"
    )
    notes = ("12 updates were lost", "shard 1 is down")
    noted = overview_line(replace(TRAINING, notes=notes, state="closed"), FACTS)
    assert noted.startswith("<ParameterServer 3f9c12aa (closed): ")
    assert noted.endswith("(1 running); 12 updates were lost; shard 1 is down>")


def test_shards_that_lack_copies_are_named_unless_they_are_many() -> None:
    lacking = replace(SHARDS[0], wanted=3)
    assert missing_copies(SHARDS) == ["shard 1 is down"]
    assert missing_copies([lacking, SHARDS[1]]) == ["shard 0 has 2 of 3 copies", "shard 1 is down"]
    assert missing_copies([lacking] * 4) == ["4 shards lack copies: see ps.shards"]
    assert "2 of 3" in repr(Listing([lacking]))


def test_html_is_whole_escaped_and_without_scripts() -> None:
    noted = replace(TRAINING, notes=("175 updates were lost",))
    found = Checked(overview_html(noted, FACTS))
    assert FACTS["recovery"] in "|".join(found.text)
    assert "⚠ 175 updates were lost" in found.text
    assert found.tags.isdisjoint({"script", "style", "img", "link", "b>"})
    assert {"worker-0", "server-0", "down"} <= set(found.text)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (SSP(4), "SSP(4)"),
        (
            Recovery(Chain(3), Continue()),
            "Recovery(durability=Chain(replicas=3), outage=Continue())",
        ),
        (Proximal(0.1, L1(0.01)), "Proximal(0.1, L1(0.01))"),
    ],
)
def test_in_brief_only_what_was_chosen_is_said(choice: object, said: str) -> None:
    assert brief(choice) == said
