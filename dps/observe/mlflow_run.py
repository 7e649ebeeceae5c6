"""A training as a run of MLflow: what was chosen, and the history as it comes.

Numbers are sent by a thread of their own, in batches, so a tracking server that is slow or away
holds up nothing. What it does not take is left out, and that is said once.
"""

from __future__ import annotations

import queue
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dps.errors import ConfigurationError, StoreUnavailable
from dps.observe.history import History, Number

BATCH = 1000  # the most that MLflow takes at once
WAITING = 2000  # batches of the history
CLOSE_SECONDS = 30.0
_TEXT = 500  # the most that every tracking server takes as a parameter

_Item = Sequence[Number] | None  # None: that was all


class MlflowRun:
    """One run, which is written to until it is closed. Thread-safe.

    Parameters
    ----------
    history
        What is logged: all of it, also what was there before.
    experiment
        The name of MLflow's experiment, which is made if there is none.
    name
        That of the run.
    tracking_uri
        Where it goes; None: where MLflow is told to, by `mlflow.set_tracking_uri` or the
        environment.
    params, tags
        What is kept of the training besides numbers.

    Attributes
    ----------
    id
        The run's id.

    Raises
    ------
    ConfigurationError
        MLflow is not installed.
    StoreUnavailable
        The tracking server does not make the run.
    """

    def __init__(
        self,
        history: History,
        experiment: str,
        name: str,
        tracking_uri: str | None,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param, RunTag
        except ImportError as error:
            raise ConfigurationError(
                "log_to_mlflow needs MLflow, which is not installed: pip install mlflow"
            ) from error
        self._client = MlflowClient(tracking_uri)
        self._metric = Metric
        try:
            self.id = self._made(experiment, name)
            given = [Param(key, str(value)[:_TEXT]) for key, value in params.items()]
            said = [RunTag(key, value) for key, value in tags.items()]
            self._client.log_batch(self.id, params=given, tags=said)
        except Exception as error:
            raise StoreUnavailable(f"MLflow's experiment {experiment!r}: {error}") from error
        self._queue: queue.Queue[_Item] = queue.Queue(WAITING)
        self._warned = False
        self._thread = threading.Thread(target=self._send_all, name="dps-mlflow", daemon=True)
        self._thread.start()
        self._history = history
        history.listen(self._take)

    def close(self, numbers: Mapping[str, float], succeeded: bool) -> None:
        """End the run, with some last numbers, once it has all that was to be logged."""
        self._history.unlisten(self._take)
        try:
            self._queue.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            self._say("it does not keep up")
            return
        self._thread.join(CLOSE_SECONDS)
        try:
            for name, number in numbers.items():
                self._client.log_metric(self.id, name, number)
            self._client.set_terminated(self.id, "FINISHED" if succeeded else "FAILED")
        except Exception as error:  # noqa: BLE001 - whatever a tracking server may answer
            self._say(str(error))

    def _made(self, experiment: str, name: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        number = (
            self._client.create_experiment(experiment) if found is None else found.experiment_id
        )
        run_id: str = self._client.create_run(number, run_name=name).info.run_id
        return run_id

    def _take(self, numbers: Sequence[Number]) -> None:
        try:
            self._queue.put_nowait(numbers)
        except queue.Full:
            self._say("it does not keep up")

    def _send_all(self) -> None:
        ended = False
        while not ended:
            numbers = self._queue.get()
            pending: list[Number] = []
            while numbers is not None:
                pending += numbers
                if len(pending) >= BATCH or self._queue.empty():
                    break
                numbers = self._queue.get()
            ended = numbers is None
            for start in range(0, len(pending), BATCH):
                self._send(pending[start : start + BATCH])

    def _send(self, numbers: Sequence[Number]) -> None:
        metrics = [
            self._metric(f"{n.source}/{n.metric}", n.value, round(1000 * n.t), n.step)
            for n in numbers
        ]
        try:
            self._client.log_batch(self.id, metrics=metrics)
        except Exception as error:  # noqa: BLE001 - whatever a tracking server may answer
            self._say(str(error))

    def _say(self, reason: str) -> None:
        """Warn that numbers are missing in the run, once."""
        if not self._warned:
            self._warned = True
            text = f"dps: MLflow's run {self.id} lacks some of the history: {reason}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
