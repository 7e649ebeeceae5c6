"""The page of Dask's dashboard in a real browser: it also needs the extra `dashboard`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dps import Chain, Recovery
from dps.cluster.backends.local import LocalCluster
from tests.support.training import (
    COUNTING,
    PRELOAD,
    count_until,
    nodes,
    params,
    patient_server,
    versions,
)
from tests.support.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.cluster, pytest.mark.timeout(400)]

DEADLINE = 120.0
# What the page shows, through the roots that bokeh hides its parts in.
TEXT = """
function text(root) {
  let said = "";
  for (const each of root.querySelectorAll("*")) {
    if (each.shadowRoot) said += text(each.shadowRoot);
    else if (each.tagName === "TR") said += each.innerText + "\\n";
  }
  return said;
}
return text(document);
"""


def test_the_page_follows_a_training(browser: Any, tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="the extra `dashboard` is not installed")
    flag = tmp_path / "flag"
    specs = nodes(replicas=1)
    with (
        LocalCluster(specs, PRELOAD, dashboard=True, security="off", tell=str) as cluster,
        patient_server(
            cluster.client, params(), shards=2, optimizer=COUNTING, recovery=Recovery(Chain(2))
        ) as ps,
    ):
        assert cluster.dashboard is not None
        browser.get(cluster.dashboard.replace("status", "dps"))
        futures = ps.run(partial(count_until, str(flag)), workers=2)

        def row_of_shard(number: int) -> list[str]:
            lines = [line.split("\t") for line in browser.execute_script(TEXT).splitlines()]
            return next((line for line in lines if line[0] == str(number)), [])

        eventually(lambda: row_of_shard(0)[1:3] == ["serving", "server-0"], DEADLINE)
        cluster.kill("server-0")
        eventually(lambda: row_of_shard(0)[1:3] == ["serving", "replica-0-1"], DEADLINE)
        flag.touch()
        cluster.client.gather(futures)
        said = [f"{version:,}" for version in versions(ps)]
        eventually(lambda: [row_of_shard(n)[3] for n in (0, 1)] == said, DEADLINE)
        failed = [each for each in browser.get_log("browser") if each["level"] == "SEVERE"]
        assert failed == []
