"""Filters and delay compensation on real nodes: what is saved, what arrives, what is recorded."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from distributed import Client

import dps
from dps import Worker
from dps.errors import ConfigurationError
from dps.events import Filtered, ResourceSampled
from tests.support.training import COUNTING, Events, audited, patient_server, results

pytestmark = pytest.mark.cluster

SIZE = 40_000
STEPS = 10
INITIAL = {"w": np.zeros((200, SIZE // 200), np.float32), "b": np.zeros(50)}


def steps(worker: Worker) -> None:
    """Push gradients of whole numbers, a few of them large, and read the weights each time."""
    random = np.random.default_rng(worker.index)
    worker.pull()
    for _ in range(STEPS):
        worker.push_pull(gradients(random))


def gradients(random: np.random.Generator) -> dict[str, np.ndarray]:
    return {n: random.integers(-9, 10, a.shape).astype(a.dtype) for n, a in INITIAL.items()}


def total(workers: int) -> Mapping[str, np.ndarray]:
    """What the gradients of all workers come to under `COUNTING`."""
    found = {name: np.zeros(a.shape) for name, a in INITIAL.items()}
    for index in range(workers):
        random = np.random.default_rng(index)
        for _ in range(STEPS):
            for name, gradient in gradients(random).items():
                found[name] -= gradient
    return found


def sent_by_workers(events: Events) -> int:
    last = {e.pid: e for e in events.of(ResourceSampled) if e.role == "worker"}
    return sum(sample.sent["train"] for sample in last.values())


@pytest.mark.slow
def test_filters_send_less_and_in_the_end_all_of_it(with_roles: Client) -> None:
    chain = [dps.TopK(0.05), dps.Quantise("bf16"), dps.Lossless()]
    sent = {}
    for name, filters in (("none", None), ("filters", {"w": chain})):
        events = Events()
        choices: dict[str, Any] = {"optimizer": COUNTING, "recovery": "chain", "shards": 2}
        with patient_server(with_roles, INITIAL, on_event=events, filters=filters, **choices) as ps:
            results(ps.run(steps, workers=2))
            found, expected = ps.pull(), total(2)
            updates = STEPS if filters is None else STEPS + 1
            for reply in audited(ps):
                assert reply.applied == {"worker-0": updates, "worker-1": updates}
        for array in INITIAL:
            assert found[array].dtype == INITIAL[array].dtype
            assert (found[array] == expected[array]).all()
        sent[name] = sent_by_workers(events)
        last = {event.worker: event for event in events.of(Filtered)}
        assert len(last) == (0 if filters is None else 2)
        for event in last.values():
            assert event.raw_bytes == STEPS * (4 * SIZE + 8 * 50)
            assert event.entries == STEPS * (SIZE + 50)
            assert event.withheld >= STEPS * 0.94 * SIZE
            assert event.residual_norm == 0
            # What was withheld until the end is sent whole.
            assert event.sent_bytes < STEPS * 0.1 * 4 * SIZE + 4 * SIZE
    assert sent["filters"] < 0.3 * sent["none"]


def read_and_check(worker: Worker) -> int:
    """Push to a few entries at a time; return how often what was read was not what was pushed."""
    expected, wrong = worker.pull()["w"].copy(), 0
    for step in range(STEPS):
        gradient = {"w": np.zeros_like(expected)}
        gradient["w"][:, step] = -1.0
        expected[:, step] += 1.0
        wrong += not np.array_equal(worker.push_pull(gradient)["w"], expected)
    return wrong


def test_filtered_pulls_send_what_has_changed_and_exactly_that(with_roles: Client) -> None:
    sent = {}
    for name, filters in (("none", None), ("filters", {"*": [dps.SignificantlyModified(0.0)]})):
        events = Events()
        choices: dict[str, Any] = {"optimizer": COUNTING, "recovery": "chain", "shards": 2}
        with patient_server(
            with_roles, INITIAL, on_event=events, pull_filters=filters, **choices
        ) as ps:
            assert results(ps.run(read_and_check, workers=1)) == [0]
            found = ps.pull()["w"]
            assert (found[:, :STEPS] == 1).all()
            assert not found[:, STEPS:].any()
        last = {event.pid: event for event in events.of(ResourceSampled)}
        servers = [e for e in last.values() if e.role in ("server", "replica")]
        sent[name] = sum(event.sent.get("train", 0) for event in servers)
    assert sent["filters"] < 0.5 * sent["none"]


def test_what_cannot_work_is_refused_before_anything_starts(with_roles: Client) -> None:
    with pytest.raises(ConfigurationError, match="no such array; expected one of w, b"):
        patient_server(with_roles, INITIAL, filters={"v": [dps.TopK(0.1)]})
    chain, recovery = {"w": [dps.TopK(0.1)]}, dps.Recovery(dps.WorkerCache())
    with pytest.raises(ConfigurationError, match="worker_cache restores a shard"):
        patient_server(with_roles, INITIAL, recovery=recovery, pull_filters=chain)


@dataclass(frozen=True)
class Own:
    feedback: ClassVar[bool] = True

    def selected(self, gradient: np.ndarray, sending: dps.Sending) -> np.ndarray:
        return np.ones(gradient.size, bool)


def test_a_filter_that_could_not_be_read_back_is_refused(
    with_roles: Client, tmp_path: Path
) -> None:
    recovery = dps.Recovery(dps.Checkpoint(path=str(tmp_path)))
    with pytest.raises(ConfigurationError, match=r"filters=.*Own is not registered"):
        patient_server(with_roles, INITIAL, recovery=recovery, filters={"w": [Own()]})


@pytest.mark.slow
def test_the_examples_of_the_page_about_filters_run(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "filters.md").read_text()
    training, own = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "examples.py"
    script.write_text(own + training.replace("[TopK(0.05)", "[EverySecondPush(), TopK(0.05)"))
    ran = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout.rpartition(" ")[2]) < 0.05
