"""A parameter server is brought up again from its checkpoints alone, after everything was lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from dps import Checkpoint, ParameterServer, Recovery
from dps.cluster.backends.local import LocalCluster
from dps.errors import StoreUnavailable
from dps.protocol.storage.manifest import find_saved
from tests.support.training import (
    COUNTING,
    PRELOAD,
    SECONDS,
    Events,
    audited,
    count_until,
    counts,
    nodes,
    params,
    results,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

DRIVER = """
import sys
from functools import partial
from dps import Checkpoint, ParameterServer, Recovery
from dps.cluster.backends.local import LocalCluster
from tests.support.training import COUNTING, PRELOAD, count_until, nodes, params

if __name__ == "__main__":
    path, scope, flag = sys.argv[1:]
    recovery = Recovery(Checkpoint(every=10, path=path, scope=scope))
    with LocalCluster(nodes(), PRELOAD) as cluster:
        with ParameterServer(
            cluster.client, params(), shards=2, optimizer=COUNTING, recovery=recovery
        ) as ps:
            for future in ps.run(partial(count_until, flag), workers=2):
                future.result()
"""


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["shard", "all"])
def test_a_run_whose_driver_was_killed_goes_on_from_the_path_alone(
    tmp_path: Path, scope: str
) -> None:
    path, flag, script = tmp_path / "checkpoints", tmp_path / "stop", tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    with subprocess.Popen(
        [sys.executable, str(script), str(path), scope, str(flag)],
        env=environment,
        start_new_session=True,
    ) as driver:

        def saved_updates() -> int:
            try:
                return find_saved(str(path)).updates
            except StoreUnavailable:
                return 0

        eventually(lambda: saved_updates() >= 40, SECONDS)
        os.kill(driver.pid, signal.SIGKILL)
    saved = find_saved(str(path))
    if scope == "all":
        assert len({state.version for state in saved.states}) == 1
    events = Events()
    with (
        LocalCluster(nodes(), PRELOAD) as cluster,
        ParameterServer.resume(cluster.client, str(path), on_event=events) as ps,
    ):
        assert ps.saved is not None
        assert ps.saved.updates >= 40
        before = [state.version for state in ps.saved.states]
        assert counts(ps) == before
        futures = ps.run(partial(count_until, str(flag)), workers=2)
        eventually(lambda: min(r.version for r in audited(ps)) >= max(before) + 30, SECONDS)
        flag.touch()
        pushed = sum(results(futures))
        assert counts(ps) == [version + pushed for version in before]
        for reply in audited(ps):
            assert reply.version == sum(reply.applied.values())
        assert ps.saved.run.rule == COUNTING
    again = find_saved(str(path))
    assert again.run.generation == saved.run.generation + 1
    assert again.updates > saved.updates


def test_without_whole_checkpoints_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"run\.json is neither"):
        find_saved(str(tmp_path / "nothing"))
    with (
        LocalCluster(nodes(), PRELOAD) as cluster,
        ParameterServer(
            cluster.client, params(), recovery=Recovery(Checkpoint(path=str(tmp_path)))
        ),
    ):
        pass
    assert find_saved(str(tmp_path)).updates == 0
    for data in tmp_path.rglob("*.safetensors"):
        data.write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="no whole checkpoint"):
        find_saved(str(tmp_path))
