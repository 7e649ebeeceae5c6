"""What every kind of disturbance must do: have an effect on real processes, prove it, and end."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dps.cluster.backends.local import LocalCluster
from dps.cluster.driver.parameter_server import ParameterServer
from dps.cluster.names import NodeSpec
from dps.cluster.node.worker import Worker
from dps.core.rules.rule import SGD
from dps.errors import ConfigurationError
from dps.events import Disturbed, Event, FaultMissed, Undisturbed
from dps.faults import AtUpdates, Lasting
from dps.faults.injector import Injector
from dps.recovery.chain import Chain
from dps.recovery.strategy import Recovery

NODES = (
    NodeSpec("server-0", "server"),
    NodeSpec("replica-0-1", "server"),
    NodeSpec("worker-0", "worker"),
)
PRELOAD = ("dps.cluster.driver.parameter_server", __name__)
SECONDS = 60.0  # until something that happens for sure counts as not happening


class FaultContract:
    """The contract of faults that last (`dps.faults.Lasting`).

    Override the fixture `fault`; with `params`, for several of them.
    """

    @pytest.fixture
    def fault(self) -> Lasting:
        """The fault that is tested, on server-0, replica-0-1 or worker-0; when does not count."""
        raise NotImplementedError("override the fixture `fault` to return the one to be tested")

    @pytest.fixture
    def recovery(self) -> Recovery:
        """The recovery strategy of the group that is disturbed."""
        return Recovery(Chain())

    def test_it_is_a_value_that_can_be_aimed_elsewhere(self, fault: Lasting) -> None:
        other = replace(fault, target=("server-0", "worker-0"), when=AtUpdates(7))
        assert other != fault
        assert replace(other, target=fault.target, when=fault.when) == fault
        assert hash(other) == hash(replace(other))
        assert type(other) is type(fault)

    def test_it_lasts_for_a_time(self, fault: Lasting) -> None:
        for seconds in (0.0, -1.0, float("inf")):
            with pytest.raises(ConfigurationError):
                replace(fault, seconds=seconds)

    def test_its_text_says_what_it_hits_and_when(self, fault: Lasting) -> None:
        assert fault.describe().startswith(f"{fault.action} {fault.whom} {fault.when}")

    def test_it_has_an_effect_that_is_proven_and_taken_back(
        self, fault: Lasting, recovery: Recovery, tmp_path: Path
    ) -> None:
        """A worker counts meanwhile, and goes on after; no update is lost or applied twice."""
        plan = (replace(fault, when=AtUpdates(20)),)
        events, flag = _Events(), tmp_path / "stop"
        with (
            LocalCluster(NODES, PRELOAD) as cluster,
            ParameterServer(
                cluster.client,
                {"w": np.zeros(30)},
                optimizer=SGD(1.0),
                recovery=recovery,
                on_event=events,
            ) as ps,
        ):
            with Injector(plan, cluster, ps, events) as injector:
                events.also = injector.note
                futures = ps.run(partial(count_until, str(flag)))
                told = events.wait_for((Undisturbed, FaultMissed))
                flag.touch()
                pushed = sum(future.result(timeout=SECONDS) for future in futures)
            weights = ps.pull()["w"]
        assert not [event for event in events.all if isinstance(event, FaultMissed)]
        (disturbed,) = [event for event in events.all if isinstance(event, Disturbed)]
        assert (disturbed.fault, disturbed.kind, disturbed.node) == (0, fault.kind, fault.target)
        assert disturbed.effective
        assert disturbed.evidence
        assert isinstance(told, Undisturbed)
        assert told.evidence
        assert (weights == pushed).all()


class _Events:
    """Collects events, and waits for one of some kinds. Thread-safe."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self.also: Callable[[Event], None] | None = None
        self._more = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._more:
            self.all.append(event)
            self._more.notify_all()
        if self.also is not None:
            self.also(event)

    def wait_for(self, kinds: tuple[type[Event], ...]) -> Event:
        """Return the first event of these kinds, which must come in time."""

        def found() -> Any:
            return next((event for event in self.all if isinstance(event, kinds)), None)

        with self._more:
            event: Event | None = self._more.wait_for(found, SECONDS)
        assert event is not None, f"none of {[kind.__name__ for kind in kinds]} came"
        return event


def count_until(flag: str, worker: Worker) -> int:
    """Push until there is a file `flag`, and a few times more; return how often."""
    gradients = {name: np.full_like(array, -1.0) for name, array in worker.pull().items()}
    for step in itertools.count(1):
        worker.push_pull(gradients)
        if os.path.exists(flag):
            for _ in range(5):
                worker.push(gradients)
            return step + 5
    raise AssertionError
