"""Reports for others: readable by everybody, and without what names the machine or its user."""

from __future__ import annotations

import base64
import getpass
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from dps.events import Event, NodeJoined, TrialEnded, TrialStarted
from flows.report.html import write_report
from flows.report.public import FREE_TEXT, LEFT_OUT, Redaction
from tests.support.synthetic import toy_events, write_events

HOST, USER, ADDRESS = "node17.cluster.example", "alice", "tcp://10.1.2.3:8786"
WHERE = f"/home/{USER}/fashion"
ELSEWHERE = "srun: error: tux-042: task 0: No such file: '/home/bob smith/My Data, 2/x.csv'"
REASON = (
    f"{ELSEWHERE}; server-0 (pid 4711) on {HOST}: {WHERE}/x.npz cannot be read; node17 is known to "
    f"the scheduler at {ADDRESS}, and as 10.1.2.3:40123 or fe80:0:0:0:1:2:3:4"
)


def elsewhere(events: list[Event]) -> list[Event]:
    """The record of a trial that ran on the nodes of a deployment, with data of a user's own."""
    found = list[Event]()
    for event in events:
        if isinstance(event, NodeJoined):
            event = replace(event, host=HOST)
        if isinstance(event, TrialStarted):
            config: dict[str, Any] = {
                **event.settings["config"],
                "dataset": {"kind": "fashion_mnist", "folder": WHERE},
                "cluster": {"kind": "existing", "address": ADDRESS, "patience": 60.0},
            }
            event = replace(event, settings={**event.settings, "config": config})
        found.append(event)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "demo"
    for strategy in ("none", "chain"):
        events = elsewhere(toy_events(strategy, "kill"))
        write_events(folder / f"{strategy}.kill.seed-0", events)
    failed = [*elsewhere(toy_events("chain", "kill", 1))[:-1], TrialEnded(2e9, "failed", REASON)]
    write_events(folder / "chain.kill.seed-1", failed)
    return folder


@pytest.fixture
def private_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def downloads(page: str) -> list[str]:
    svg = [
        base64.b64decode(each).decode() for each in re.findall(r"svg\+xml;base64,([^\"]+)", page)
    ]
    return svg + [unquote(each) for each in re.findall(r"text/csv;charset=utf-8,([^\"]+)", page)]


def test_a_public_page_names_neither_machine_nor_user(folder: Path, tmp_path: Path) -> None:
    warned = list[str]()
    path = write_report(folder, tmp_path / "public.html", warn=warned.append, public=True)
    page = path.read_text()
    assert len(downloads(page)) > 10
    told = [
        HOST,
        "node17",
        USER,
        "10.1.2.3",
        "4711",
        "fe80",
        WHERE,
        "tux-042",
        "My Data",
        str(tmp_path),
        str(Path.home()),
    ]
    for text in (page, *downloads(page)):
        for secret in (*told, socket.gethostname(), f"/{getpass.getuser()}/"):
            assert secret not in text
    assert f"failed: {FREE_TEXT}" in page
    assert warned == []
    private = write_report(folder, tmp_path / "private.html").read_text()
    assert all(secret in private for secret in (HOST, WHERE, ADDRESS)), "else nothing was left out"


def test_the_configuration_of_a_public_page_can_still_be_read(folder: Path, tmp_path: Path) -> None:
    page = write_report(folder, tmp_path / "public.html", public=True).read_text()
    part = page[page.index("<summary>Configuration") :]
    found = yaml.safe_load(part[part.index("<pre>") + 5 : part.index("</pre>")])
    assert found["cluster"] == {"kind": "existing", "patience": 60.0}
    assert found["dataset"] == {"kind": "fashion_mnist", "folder": LEFT_OUT}
    assert found["training"]["workers"] == 2


@pytest.mark.usefixtures("private_umask")
def test_only_a_public_page_is_for_everybody(folder: Path, tmp_path: Path) -> None:
    public = write_report(folder, tmp_path / "public.html", public=True)
    private = write_report(folder, tmp_path / "private.html")
    assert [path.stat().st_mode & 0o777 for path in (public, private)] == [0o644, 0o600]


def test_a_name_of_the_user_s_own_is_warned_of(folder: Path, tmp_path: Path) -> None:
    events = toy_events("chain", "kill")
    named = [replace(e, host="demo") if isinstance(e, NodeJoined) else e for e in events]
    write_events(tmp_path / "demo" / "chain.kill.seed-0", named)
    warned = list[str]()
    write_report(tmp_path / "demo", tmp_path / "r.html", warn=warned.append, public=True)
    assert any("still has the word 'demo'" in said for said in warned)


@pytest.mark.parametrize(
    "text",
    [
        "0.94 × the gradients per second",
        "time/grads/money, and 170/s or 3 and/or 4",
        "at 13:10:11, version 3.11.7",
        "server-0 was killed after 1,300 updates.",
        "recovery.durability.every: 100",
    ],
)
def test_what_names_nothing_stays(text: str) -> None:
    axes = ("recovery.durability.every",)
    assert Redaction(("node17", "alice"), axes).text(text) == text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("see ~/data and ../x/y.csv; then", f"see {LEFT_OUT}; then"),
        ("s3://alices-bucket/a?b=c failed", f"{LEFT_OUT} failed"),
        ("alice's node17, not node170", f"{LEFT_OUT}'s {LEFT_OUT}, not node170"),
        ("process 99 of [::1] ended", f"process {LEFT_OUT} of [{LEFT_OUT}] ended"),
        ("fe80::1 refused", f"{LEFT_OUT} refused"),
        ("on gpu01.hpc.uni-x.de", f"on {LEFT_OUT}"),
        ("NODE17 and node17-ib", f"{LEFT_OUT} and {LEFT_OUT}"),
        ("scheduler at login4:8786", f"scheduler at {LEFT_OUT}"),
        ("from nas01:/export/home", f"from {LEFT_OUT}"),
        ("ssh bob@cluster.example.org", f"ssh {LEFT_OUT}"),
        ("in /home/ann smith/My Data", f"in {LEFT_OUT}"),
        ("no '/home/b/a, b (1)/x y.csv' here", f"no {LEFT_OUT} here"),
        ("at //nas01/share", f"at {LEFT_OUT}"),
        ("home/bob/model.py failed", f"{LEFT_OUT} failed"),
        (r"C:\Users\ann\x", LEFT_OUT),
    ],
)
def test_what_names_something_is_left_out(text: str, left: str) -> None:
    assert Redaction(("node17", "alice")).text(text) == left
