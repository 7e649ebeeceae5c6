"""What is shown of a parameter server, as text and as HTML that is whole and escaped."""

from __future__ import annotations

from dataclasses import fields, replace
from html.parser import HTMLParser
from typing import Any

import pytest

from dps import ASP, BSP, L1, SSP, Adam, Chain, Checkpoint, Continue, Proximal, Recovery
from dps.observe.views import Listing, Overview, ShardView, WorkerView, missing_copies, size
from dps.shown import brief

SHARDS = Listing(
    [
        ShardView(0, "server-0", ("server-0", "replica-0-1"), 1204, 2, 3_400_000, "tcp://h:1", 2),
        ShardView(1, "", (), None, 3, 3_400_000),
    ]
)
WORKERS = Listing(
    [
        WorkerView("worker-0", "running", 1204, 1204, 41.27, {"loss": 0.34}),
        WorkerView("worker-1", "waiting", 0, None, None),
    ]
)
OVERVIEW = Overview(
    "3f9c12aa",
    False,
    3,
    1,
    12_345_678,
    49_000_000,
    {"optimizer": Adam(0.01), "recovery": Recovery(Checkpoint(path="/data/<b>&"))},
    SHARDS,
    WORKERS,
)


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
    assert lines[0].split() == [
        "shard",
        "node",
        "version",
        "epoch",
        "copies",
        "other",
        "replicas",
        "size",
        "address",
    ]
    assert lines[1].split() == [
        "0",
        "server-0",
        "1,204",
        "2",
        "2",
        "of",
        "2",
        "replica-0-1",
        "3.4",
        "MB",
        "tcp://h:1",
    ]
    assert lines[2].split() == ["1", "down", "–", "3", *["0", "of", "1", "–", "3.4", "MB", "–"]]
    assert [shard.serving for shard in SHARDS] == [True, False]
    found = Checked(WORKERS._repr_html_())
    names = ["worker", "status", "gradients", "clock", "gradients/s", "loss"]
    assert found.text[:6] == repr(WORKERS).splitlines()[0].split() == names
    assert found.text[6:12] == ["worker-0", "running", "1,204", "1,204", "41.3", "0.34"]
    assert repr(Listing[ShardView]()) == "()"


def test_one_line_says_what_it_is() -> None:
    line = OVERVIEW.line()
    assert line.startswith(
        "<ParameterServer 3f9c12aa: 3 arrays and 1 table, 12,345,678 parameters in arrays, "
    )
    assert "2 shards, " in line
    assert "optimizer=Adam(learning_rate=0.01)" in line
    assert line.endswith("2 workers (1 running)>")
    noted = replace(OVERVIEW, notes=("12 updates were lost", "shard 1 is down"))
    assert noted.line().endswith("2 workers (1 running); 12 updates were lost; shard 1 is down>")
    assert "3f9c12aa closed:" in replace(OVERVIEW, closed=True).line()


def test_shards_that_lack_copies_are_named_unless_they_are_many() -> None:
    lacking = replace(SHARDS[0], wanted=3)
    assert missing_copies(SHARDS) == ["shard 1 is down"]
    assert missing_copies([lacking, SHARDS[1]]) == ["shard 0 has 2 of 3 copies", "shard 1 is down"]
    assert missing_copies([lacking] * 4) == ["4 shards lack copies: see ps.shards"]
    assert "2 of 3" in repr(Listing([lacking]))


def test_html_is_whole_escaped_and_without_scripts() -> None:
    found = Checked(replace(OVERVIEW, notes=("175 updates were lost",)).html())
    assert "Recovery(durability=Checkpoint(every=100, path='/data/<b>&'))" in "|".join(found.text)
    assert "⚠ 175 updates were lost" in found.text
    assert found.tags.isdisjoint({"script", "style", "img", "link", "b>"})
    assert {"worker-0", "server-0", "down"} <= set(found.text)


def test_html_takes_the_colours_of_the_page() -> None:
    html = OVERVIEW.html()
    assert "#" not in html.replace("&#x27;", "")
    assert "color:" not in html


def test_many_shards_are_folded() -> None:
    many = Listing([replace(SHARDS[0], shard=n) for n in range(30)])
    assert "<details open>" in OVERVIEW.html()
    assert OVERVIEW.html().count("<details>") == 0
    assert replace(OVERVIEW, shards=many).html().count("<details>") == 1
    for count, is_open in ((8, True), (9, False)):
        some = replace(OVERVIEW, shards=Listing(many[:count]), workers=Listing())
        assert ("<details open>" in some.html()) == is_open


@pytest.mark.parametrize("choice", [BSP(), SSP(4), ASP(), Recovery(), Chain(2), Checkpoint()])
def test_a_choice_shows_all_of_its_settings_in_a_notebook(choice: Any) -> None:
    found = Checked(choice._repr_html_())
    assert found.text[0] == type(choice).__name__
    assert {field.name for field in fields(choice)} <= set(found.text)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (SSP(4), "SSP(4)"),
        (Recovery(), "Recovery()"),
        (
            Recovery(Chain(3), Continue()),
            "Recovery(durability=Chain(replicas=3), outage=Continue())",
        ),
        (Proximal(0.1, L1(0.01)), "Proximal(0.1, L1(0.01))"),
        ({"w": 1}, "{'w': 1}"),
    ],
)
def test_in_brief_only_what_was_chosen_is_said(choice: object, said: str) -> None:
    assert brief(choice) == said


@pytest.mark.parametrize(
    ("nbytes", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (123_456, "123 kB"), (5 * 10**15, "5000 TB")],
)
def test_sizes_are_those_people_write(nbytes: int, said: str) -> None:
    assert size(nbytes) == said
