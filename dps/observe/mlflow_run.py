"""A training as a run of MLflow: what was chosen, and the history as it comes.

Numbers are sent by a thread of their own, in batches, so a tracking server that is slow or away
holds up nothing. What it does not take is left out, and that is said once; so is it of names that
it does not take, which are changed.

A training that goes on from checkpoints goes on with its run: that has the name of the parameter
server as a tag, from which the next one finds it. The steps of all numbers are versions of the
weights, which go on as well.
"""

from __future__ import annotations

import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields, is_dataclass
from itertools import chain, count
from os import PathLike, fspath
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dps.core.credentials import masked_for
from dps.core.ranges import refused, shown
from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import Failover
from dps.observe.history import History, Number

BATCH = 1000  # the most that MLflow takes at once
WAITING = 2000  # batches of the history
CLOSE_SECONDS = 30.0
CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 30.0  # MLflow itself asks a server again for minutes
_PORTS = {"http": 80, "https": 443}
_LONGEST = 250  # characters of a name
_REFUSED = re.compile(r"[^/\w.\- :]|(?<![^/])(\.{0,2})(?=/|$)")  # characters, and parts of a path
_TEXT = 500  # the most that every tracking server takes as a parameter

_GROUP = "dps.group"  # the tag with the name of the parameter server
_FAILOVER = "dps.failover."  # tags with a failover each, from 1

_Item = Sequence[Number] | Failover | None  # None: that was all


class MlflowRun:
    """One run, which is written to until it is closed. Thread-safe.

    Parameters
    ----------
    history
        What is logged: all of it, also what was there before.
    experiment
        The name of MLflow's experiment, which is made if there is none.
    name
        That of the run; None: one of its own.
    tracking_uri
        Where it goes; None: where MLflow is told to, by `mlflow.set_tracking_uri` or the
        environment.
    params, tags
        What is kept of the training besides numbers.
    group, before
        The name of the parameter server, and of that from whose checkpoints it goes on: the newest
        run of that one in the experiment, of this name, is written to; a new one if there is none.
    warn
        Called once, in any thread, if the run lacks something.

    Attributes
    ----------
    id
        The run's id.

    Raises
    ------
    ConfigurationError
        MLflow is not installed, or a name or the URI is no text.
    StoreUnavailable
        The tracking server does not make the run.
    """

    def __init__(
        self,
        history: History,
        experiment: str,
        name: str | None,
        tracking_uri: str | PathLike[str] | None,
        params: Mapping[str, Any],
        tags: Mapping[str, str],
        group: str,
        before: str | None,
        warn: Callable[[str], None],
    ) -> None:
        try:
            from mlflow import MlflowClient, get_tracking_uri
            from mlflow.entities import Metric, Param, RunTag
        except ImportError as error:
            raise ConfigurationError(
                "log_to_mlflow needs MLflow, which is not installed: pip install mlflow"
            ) from error
        except RuntimeError as error:  # of pathlib, where a user has no name and no home
            raise ConfigurationError(
                f"MLflow cannot be imported: {error} Set HOME to a folder that can be written"
            ) from error
        if not isinstance(experiment, str) or not experiment.strip():
            raise refused("experiment", experiment, "the name of an MLflow experiment")
        if not isinstance(name, str | None):
            raise refused("run_name", name, "a text or None")
        if not isinstance(tracking_uri, str | PathLike | None):
            raise refused("tracking_uri", tracking_uri, "a text such as sqlite:///mlflow.db")
        uri = fspath(tracking_uri) if tracking_uri is not None else None
        self._metric = Metric
        self._keys: dict[str, str] = {}  # the name in MLflow of each series
        self._warn = warn

        def begin() -> None:
            self._client = MlflowClient(uri)
            number = self._experiment(experiment)
            run = None if before is None else self._found(number, before, name)
            if run is None:
                run = self._client.create_run(number, run_name=name or f"dps-{group}")
            else:
                self._client.update_run(run.info.run_id, status="RUNNING")
            self.id: str = run.info.run_id
            self._failovers = sum(tag.startswith(_FAILOVER) for tag in run.data.tags)
            known = run.data.params  # immutable in MLflow
            chosen = dict(pair for name, choice in params.items() for pair in flat(name, choice))
            given = [Param(k, str(v)[:_TEXT]) for k, v in chosen.items() if k not in known]
            said = [RunTag(key, value) for key, value in {**tags, _GROUP: group}.items()]
            self._client.log_batch(self.id, params=given, tags=said)

        try:
            _in_time(uri or get_tracking_uri(), begin)
        except Exception as error:
            what, where = (masked_for(uri or "", text) for text in (str(error), uri or "MLflow"))
            raise StoreUnavailable(
                f"experiment {experiment!r} at {where}: {what}. Give the address of a "
                "tracking server that runs, or of a database: tracking_uri='sqlite:///mlflow.db'"
            ) from error
        self._queue: queue.Queue[_Item] = queue.Queue(WAITING)
        self._warned = self._renamed = False
        self._thread = threading.Thread(target=self._send_all, name="dps-mlflow", daemon=True)
        self._thread.start()
        self._history = history
        history.listen(self._put)

    def tell_of(self, failover: Failover) -> None:
        """Have the run say what became of a shard."""
        self._put(failover)

    def close(self, numbers: Mapping[str, float], succeeded: bool) -> None:
        """End the run, with some last numbers, once it has all that was to be logged."""
        self._history.unlisten(self._put)
        try:
            self._queue.put(None, timeout=CLOSE_SECONDS)
        except queue.Full:
            self._say("it does not keep up")
            return
        self._thread.join(CLOSE_SECONDS)

        def end() -> None:
            for name, number in numbers.items():
                self._client.log_metric(self.id, name, number)
            self._client.set_terminated(self.id, "FINISHED" if succeeded else "FAILED")

        try:
            _in_time(self._client.tracking_uri, end)
        except Exception as error:  # noqa: BLE001 - whatever a tracking server may answer
            self._say(str(error))

    def _experiment(self, name: str) -> str:
        """Return the number of the experiment, which is made if there is none."""
        found = self._client.get_experiment_by_name(name)
        number: str = self._client.create_experiment(name) if found is None else found.experiment_id
        return number

    def _found(self, experiment: str, group: str, name: str | None) -> Any:
        """Return the newest run of a parameter server, or None."""
        wanted = f"tags.`{_GROUP}` = '{group}'"
        order = ["attributes.start_time DESC"]
        runs = self._client.search_runs([experiment], wanted, order_by=order)
        return next((run for run in runs if name in (None, run.info.run_name)), None)

    def _put(self, item: _Item) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._say("it does not keep up")

    def _send_all(self) -> None:
        ended = False
        while not ended:
            item = self._queue.get()
            pending: list[Number] = []
            while item is not None:
                if isinstance(item, Failover):
                    self._tag(item)
                else:
                    pending += item
                if len(pending) >= BATCH or self._queue.empty():
                    break
                item = self._queue.get()
            ended = item is None
            for start in range(0, len(pending), BATCH):
                self._send(pending[start : start + BATCH])

    def _tag(self, failover: Failover) -> None:
        self._failovers += 1
        try:
            key = f"{_FAILOVER}{self._failovers}"
            self._client.set_tag(self.id, key, str(failover)[:_TEXT])
        except Exception as error:  # noqa: BLE001 - whatever a tracking server may answer
            self._say(str(error))

    def _send(self, numbers: Sequence[Number]) -> None:
        try:
            metrics = [
                self._metric(self._key(n), n.value, round(1000 * n.t), n.step) for n in numbers
            ]
            self._client.log_batch(self.id, metrics=metrics)
        except Exception as error:  # noqa: BLE001 - whatever a tracking server may answer
            self._say(str(error))

    def _key(self, number: Number) -> str:
        """Return the name of a number's series in the run: its own, as far as MLflow takes it."""
        name = f"{number.source}/{number.metric}"
        if name not in self._keys:
            like = _REFUSED.sub("_", name)[:_LONGEST]
            others = (f"{like[: _LONGEST - 8]}_{number}" for number in count(2))
            taken = set(self._keys.values())  # by names that are like it there
            key = next(each for each in chain([like], others) if each not in taken)
            self._keys[name] = key
            if key != name and not self._renamed:
                self._renamed = True
                self._warn(
                    f"MLflow takes no metric named {shown(name)}: it is {shown(key)} there. "
                    "Letters, digits, spaces and / . - _ : are taken"
                )
        return self._keys[name]

    def _say(self, reason: str) -> None:
        """Warn that numbers are missing in the run, once."""
        if not self._warned:
            self._warned = True
            self._warn(f"MLflow's run {self.id} lacks some of the history: {reason}")


def flat(name: str, choice: object) -> Iterator[tuple[str, object]]:
    """Return what was chosen, and all that it consists of, under dotted names to search by."""
    yield name, choice
    if is_dataclass(choice) and not isinstance(choice, type):
        yield f"{name}.kind", type(choice).__name__
        for field in fields(choice):
            part = getattr(choice, field.name)
            if is_dataclass(part):
                yield from flat(f"{name}.{field.name}", part)
            elif part is None or isinstance(part, str | int | float):
                yield f"{name}.{field.name}", part


def _in_time(uri: str, work: Callable[[], None]) -> None:
    """Do something with a tracking store; raise `OSError` if that takes longer than it may.

    MLflow tries again for minutes, also to open a database. Where a proxy is on the way, only that
    may know the host of a server, and MLflow asks it.
    """
    parts = urlsplit(uri)
    host = parts.hostname or ""
    if parts.scheme in _PORTS and (parts.scheme not in getproxies() or proxy_bypass(host)):
        place = host, parts.port or _PORTS[parts.scheme]
        socket.create_connection(place, CONNECT_SECONDS).close()
    done: Future[None] = Future()

    def do() -> None:
        try:
            work()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=do, name="dps-mlflow-asks", daemon=True).start()
    try:
        done.result(ANSWER_SECONDS)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {ANSWER_SECONDS:g} s") from error
