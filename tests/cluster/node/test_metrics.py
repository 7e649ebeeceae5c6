"""The metrics of shards, fetched from the endpoint of a real Dask worker as Prometheus does."""

from __future__ import annotations

import ssl
from collections import defaultdict
from functools import partial
from urllib.request import urlopen

import pytest
from distributed import Client

from dps import Chain, ParameterServer, Recovery
from dps.cluster.backends.local import LocalCluster
from dps.errors import ConfigurationError
from dps.events import Promoted
from tests.support.training import (
    COUNTING,
    PRELOAD,
    SECONDS,
    Events,
    audited,
    count,
    nodes,
    params,
    results,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster
parser = pytest.importorskip(
    "prometheus_client.parser", reason="the extra `metrics` is not installed"
)

Metrics = dict[str, dict[str, float]]


def metrics(cluster: LocalCluster, node: str) -> Metrics:
    """The metrics of dps on a node: name → shard (and what else tells them apart) → value."""
    client = cluster.client
    workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
    (port,) = (w["services"]["dashboard"] for w in workers.values() if w["name"] == node)
    files = cluster.security.get_tls_config_for_role("client")
    context = ssl.create_default_context(cafile=files["ca_file"])
    context.load_cert_chain(files["cert"], files["key"])
    url = f"https://127.0.0.1:{port}/metrics"
    with urlopen(url, timeout=SECONDS, context=context) as reply:
        text = reply.read().decode()
    found: Metrics = defaultdict(dict)
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("dps_"):
                assert sample.labels["node"] == node
                assert sample.labels["model"] == "counter"
                key = sample.labels["shard"] + sample.labels.get("le", "")
                found[sample.name][key] = sample.value
    return found


def test_a_node_tells_how_it_stands_with_its_shards() -> None:
    events = Events()
    with LocalCluster(nodes(1, replicas=1), PRELOAD) as cluster:
        with ParameterServer(
            cluster.client,
            params(),
            optimizer=COUNTING,
            recovery=Recovery(Chain(2)),
            on_event=events,
            labels={"model": "counter"},
        ) as ps:
            results(ps.run(partial(count, 10), workers=2))
            epoch = float(ps.table().views[0].epoch)
            head, tail = metrics(cluster, "server-0"), metrics(cluster, "replica-0-1")
            for each in (head, tail):
                assert each["dps_shard_updates_total"] == {"0": 20.0}
                assert each["dps_shard_version"] == {"0": 20.0}
                assert each["dps_shard_epoch"] == {"0": epoch}
                assert each["dps_shard_waiting"] == each["dps_shard_uncommitted"] == {"0": 0.0}
                assert each["dps_shard_duplicates_total"] == {"0": 0.0}
                assert each["dps_shard_staleness_count"] == {"0": 20.0}
                assert each["dps_shard_staleness_bucket"]["0+Inf"] == 20.0
            assert (head["dps_shard_head"], tail["dps_shard_head"]) == ({"0": 1.0}, {"0": 0.0})

            cluster.kill("server-0")
            eventually(lambda: events.of(Promoted), SECONDS)
            audited(ps)
            tail = metrics(cluster, "replica-0-1")
            assert tail["dps_shard_head"] == {"0": 1.0}
            assert tail["dps_shard_epoch"]["0"] > epoch
        assert metrics(cluster, "replica-0-1") == {}, "the group is closed"


@pytest.mark.parametrize("labels", [{"shard": "x"}, {"trial": 3}])
def test_labels_that_cannot_be_are_refused(plain: Client, labels: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=r"labels\["):
        ParameterServer(plain, params(), labels=labels)
