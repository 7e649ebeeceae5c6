"""The page of Dask's dashboard: what a browser gets of it, from a real scheduler."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from distributed import Scheduler

from dps import Chain, Recovery
from dps.cluster.backends.local import LocalCluster
from dps.cluster.scheduler.dashboard import offer_page
from dps.cluster.scheduler.overview import GroupOverview, ShardState
from tests.support.training import (
    COUNTING,
    PRELOAD,
    SECONDS,
    count_until,
    nodes,
    params,
    patient_server,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

needs_bokeh = pytest.mark.skipif(
    find_spec("bokeh") is None,
    reason="the extra `dashboard` is not installed",
)


def modules_of_dashboards(dask_scheduler: Scheduler) -> list[str]:
    return [n for n in sys.modules if n.startswith(("bokeh", "dps.cluster.scheduler.dashboard_"))]


def read(url: str) -> str:
    with urlopen(url, timeout=SECONDS) as answer:
        return str(answer.read().decode())


async def look(dask_scheduler: Any) -> dict[str, Any]:
    """What a page that stays open shows now, by part: text without HTML, or curves."""
    from bokeh.models import ColumnDataSource, Div

    from dps.cluster.scheduler.dashboard_page import DpsPage

    if not hasattr(dask_scheduler, "page_of_test"):
        dask_scheduler.page_of_test = DpsPage(dask_scheduler)
    page = dask_scheduler.page_of_test
    await page.update()
    divs, sources = page.root.select({"type": Div}), page.root.select({"type": ColumnDataSource})
    texts = {div.name: re.sub(r"<[^>]*>", " ", div.text) for div in divs}
    return texts | {source.name: dict(source.data) for source in sources}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    specs = nodes(replicas=1)
    with LocalCluster(specs, PRELOAD, dashboard=True, security="off", tell=str) as cluster:
        yield cluster


def test_without_a_dashboard_nothing_of_it_is_imported() -> None:
    with (
        LocalCluster(nodes(), PRELOAD) as cluster,
        patient_server(cluster.client, params(), shards=2),
    ):
        assert cluster.client.run_on_scheduler(modules_of_dashboards) == []


@needs_bokeh
def test_the_page_shows_a_training_and_a_loss(cluster: LocalCluster, tmp_path: Path) -> None:
    assert cluster.dashboard is not None
    status = cluster.dashboard
    flag = tmp_path / "flag"
    with ExitStack() as stack:
        ps = stack.enter_context(
            patient_server(
                cluster.client, params(), shards=2, optimizer=COUNTING, recovery=Recovery(Chain(2))
            )
        )
        assert re.search(r'href="dps"', read(status)), "a link in the bar of Dask's own pages"
        assert re.search(r'href="individual-dps"', read(status))
        assert "Parameter Servers" in read(status.replace("status", "individual-dps"))
        assert "Parameter Servers" in read(status.replace("status", "dps"))
        looked = partial(cluster.client.run_on_scheduler, look)
        assert f"{ps.name} : running" in looked()["dps-head"]
        futures = ps.run(partial(count_until, str(flag)), workers=2)

        def trains() -> bool:
            page = looked()
            shards, workers = page["dps-shards"], page["dps-workers"]
            rows = re.findall(r"(\d) +serving +(server-\d) +([\d,]+) +([\d.]+) +[\d.]+ ", shards)
            speeds = page["dps-speeds"]
            return (
                [row[:2] for row in rows] == [("0", "server-0"), ("1", "server-1")]
                and all(float(row[3]) > 0 for row in rows)
                and workers.count("running") == 2
                and "gradients/s" in workers
                and speeds["name"] == ["shard 0", "shard 1"]
                and all(any(y > 0 for y in ys) for ys in speeds["ys"])
            )

        eventually(trains, SECONDS)
        cluster.kill("server-0")

        def told() -> bool:
            page = looked()
            recent, marks = page["dps-recent"], page["dps-speeds-marks"]["x"]
            return (
                "node replica-0-1 took over after" in recent
                and "server-0 found lost" in recent
                and len(marks) == 1
                and re.search(r"0 +serving +replica-0-1 ", page["dps-shards"]) is not None
            )

        eventually(told, SECONDS)
        flag.touch()
        for future in futures:
            future.result(timeout=SECONDS)
        ps.close()
        page = looked()
        assert f"{ps.name} : closed at" in page["dps-head"]
        assert page["dps-workers"].count("ended") == 2


@needs_bokeh
@pytest.mark.parametrize("where", ["initialize", "start", "add_application"])
def test_a_dashboard_that_takes_no_page_is_left_as_it_was(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bokeh.server.tornado import BokehTornado
    from distributed.dashboard.scheduler import template_variables
    from distributed.http.routing import RoutingApplication

    def refuse(*_: object) -> None:
        raise RuntimeError("Dask takes no more")

    async def offer() -> None:
        address = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}
        async with Scheduler(dashboard=True, **address) as scheduler:
            links = deepcopy(template_variables(scheduler))
            apps = list(scheduler.http_application.applications)
            of = RoutingApplication if where == "add_application" else BokehTornado
            with monkeypatch.context() as patched:
                patched.setattr(of, where, refuse)
                offer_page(scheduler)
            assert scheduler.http_application.applications == apps
            assert template_variables(scheduler) == links
            offer_page(scheduler)
            assert len(scheduler.http_application.applications) == len(apps) + 1

    asyncio.run(offer())
    [warned] = [each for each in caplog.records if "no page of dps" in each.getMessage()]
    assert "Dask takes no more" in warned.getMessage()


@needs_bokeh
def test_the_headline_has_the_updates_of_a_shard_that_does_not_answer() -> None:
    from dps.cluster.scheduler.dashboard_page import _headline, _Watched

    def overview(t: float, version: int | None, replicas: tuple[str, ...]) -> GroupOverview:
        first = ShardState(0, 1, ("server-0",), 800, 100, 800, 0)
        second = ShardState(1, 2, replicas, version, None, None, None)
        return GroupOverview("group", t, (first, second), (), 0)

    watched = _Watched(late := overview(1.0, None, ("server-1",)))
    watched.look(late, [])
    assert "running · – updates" in _headline(watched)
    watched.look(overview(2.0, 790, ("server-1",)), [])
    watched.look(overview(3.0, None, ()), [])
    said = _headline(watched)
    assert "running · 790 updates" in said
    assert "1 of 2 shards down" in said


@needs_bokeh
def test_names_of_users_are_text_and_losses_go_back_to_the_beginning() -> None:
    from dps.cluster.scheduler.dashboard_page import _Table, reported_losses

    table = _Table("table", ("group", "shard", "node"))
    table.show([{"group": "g", "shard": "0", "node": "<b>&</b>"}], several=False)
    assert "<td>&lt;b&gt;&amp;&lt;/b&gt;</td>" in table.root.text
    assert "group" not in table.root.text

    def batch(step: int) -> list[dict[str, Any]]:
        reported = {"event": "Reported", "worker": "w", "name": "loss", "times": [float(step)]}
        return [{"event": "Applied"}, {**reported, "values": [1.0 / step]}]

    batches = [(float(step), batch(step)) for step in range(1, 1000)]
    assert reported_losses(batches, 0.0) == [(t, "w", 1.0 / t) for t, _ in batches]
    assert reported_losses(batches, batches[-3][0]) == [
        (t, "w", 1.0 / t) for t in (batches[-2][0], batches[-1][0])
    ]
    assert reported_losses(batches, batches[-1][0]) == []
    scored = [(1.0, [{"event": "Evaluated", "t": 3.0, "loss": 0.5, "accuracy": 0.9}])]
    assert reported_losses(scored, 0.0) == [(3.0, "evaluator", 0.5)]


@needs_bokeh
def test_no_curve_of_losses_is_left_out_when_others_have_many() -> None:
    from dps.cluster.scheduler.dashboard_page import MOST_POINTS, _Watched

    def batch(step: int) -> list[dict[str, Any]]:
        if step % 1000 == 500:
            return [{"event": "Evaluated", "t": float(step), "loss": 0.5, "accuracy": 0.9}]
        who, times = f"worker-{step % 4}", [float(step)]
        return [
            {"event": "Reported", "worker": who, "name": "loss", "times": times, "values": [1.0]}
        ]

    last = 10 * MOST_POINTS
    batches = [(float(step), batch(step)) for step in range(last)]
    overview = GroupOverview("group", float(last), (), (), 0)
    watched = _Watched(overview)
    watched.look(overview, batches)
    assert set(watched.losses) == {"evaluator", *(f"worker-{n}" for n in range(4))}
    assert len(watched.losses.pop("evaluator")) == last // 1000
    for points in watched.losses.values():
        assert MOST_POINTS // 2 <= len(points) <= MOST_POINTS
        assert points[0][0] < 20
        assert points[-1][0] > last - 5
