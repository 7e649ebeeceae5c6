"""MLflow: a writer of runs, and a run that a training streams to.

`dps run` writes recorded trials with `Writer`, and `ParameterServer.log_to_mlflow` streams a
training with `MlflowRun`. MLflow is imported when one of them is made, because that takes seconds.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import fields, is_dataclass
from itertools import count
from os import PathLike, fspath
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dps.core.credentials import masked, masked_for
from dps.core.ranges import refused, shown
from dps.errors import ConfigurationError, DpsError, StoreUnavailable
from dps.events import Failover
from dps.observe.history import History, Number

T = TypeVar("T")

BATCH = 1000  # the most metrics that MLflow takes at once
MAX_WAITING = 1_000_000  # numbers
SEND_SECONDS = 0.5
CLOSE_SECONDS = 30.0
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 30.0  # MLflow itself retries for minutes
# MLflow creates the tables of a new database, which takes more than a minute on a busy machine.
DATABASE_SECONDS = 180.0
PARAM_LENGTH, TAG_LENGTH = 6000, 5000
_PLAIN = (str, int, float, type(None))
SQLITE = "sqlite:///"
_PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}
_LONGEST = 250  # characters of a name
_NOT_TAKEN = re.compile(r"[^/\w.\- :]|(?<![^/])(\.{0,2})(?=/|$)")  # characters, and parts of a path
_GROUP = "dps.group"  # the tag with the name of the parameter server
_FAILOVER = "dps.failover."  # tags with a failover each, from 1


class Point(NamedTuple):
    """One value of a metric; `t` is in seconds since the Unix epoch."""

    name: str
    value: float
    t: float
    step: int


class Writer:
    """Writes runs of an MLflow experiment, which it creates or restores if necessary.

    Without a `uri`, the tracking store is that of `mlflow.set_tracking_uri` or the environment.
    `artifacts` is the URI for artifacts of a new experiment. `StoreUnavailable` is raised if the
    store cannot be used, or does not answer within 30 s (SQLite: 180 s).
    """

    def __init__(self, experiment: str, uri: str | None = None, artifacts: str | None = None):
        try:
            from mlflow import MlflowClient, get_tracking_uri
        except RuntimeError as error:  # of pathlib, where a user has no name and no home
            raise ConfigurationError(
                f"MLflow cannot be imported: {error} Set HOME to a writable folder"
            ) from error
        self.uri = str(uri or get_tracking_uri())

        def connect() -> None:
            self.client = MlflowClient(self.uri)
            known = self.client.get_experiment_by_name(experiment)
            if known is None:
                self.experiment_id = str(self.client.create_experiment(experiment, artifacts))
                return
            if known.lifecycle_stage == "deleted":
                self.client.restore_experiment(known.experiment_id)
            self.experiment_id = str(known.experiment_id)

        with store_errors(self.uri):
            _reach(self.uri)
            in_time(connect, DATABASE_SECONDS if self.uri.startswith(SQLITE) else ANSWER_SECONDS)

    def start(
        self, name: str, tags: Mapping[str, str], settings: Mapping[str, Any], t: float | None
    ) -> str:
        """Start a run with tags, and settings as parameters; return its id."""
        began = None if t is None else round(1000 * t)
        cut = {key: value[:TAG_LENGTH] for key, value in tags.items()}
        run = self.client.create_run(self.experiment_id, began, tags=cut, run_name=name)
        self.set(str(run.info.run_id), {}, settings)
        return str(run.info.run_id)

    def set(self, run: str, tags: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        """Set tags and parameters of a run."""
        from mlflow.entities import Param, RunTag

        params = [Param(name, text) for name, text in flat(settings).items()]
        entries = [RunTag(key, value[:TAG_LENGTH]) for key, value in tags.items()]
        self.client.log_batch(run, params=params, tags=entries)

    def log(self, run: str, points: Iterable[Point]) -> None:
        """Log metrics, whose names `as_name` must have returned."""
        from mlflow.entities import Metric

        metrics = [Metric(p.name, p.value, round(1000 * p.t), p.step) for p in points]
        self.client.log_batch(run, metrics)

    def find(self, query: str) -> list[Any]:
        """Return all matching runs, the newest first."""
        runs: list[Any] = []
        ids, order, token = [self.experiment_id], ["attributes.start_time DESC"], None
        while True:
            page = self.client.search_runs(ids, query, order_by=order, page_token=token)
            runs += page
            token = page.token
            if not token:
                return runs

    def end(self, run: str, succeeded: bool, t: float | None = None) -> None:
        """End a run, at a time if given."""
        status = "FINISHED" if succeeded else "FAILED"
        self.client.set_terminated(run, status, None if t is None else round(1000 * t))


def flat(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings under dotted names, such as "recovery.durability.kind", for MLflow.

    The class of a dataclass is its `kind`, and lists of settings are numbered. None and empty
    values are omitted.
    """
    texts: dict[str, str] = {}
    for name, value in settings.items():
        parts: Mapping[Any, Any] = {}
        if is_dataclass(value) and not isinstance(value, type):
            own = {field.name: getattr(value, field.name) for field in fields(value)}
            parts = {"kind": type(value).__name__, **own}
        elif isinstance(value, Mapping):
            parts = value
        elif isinstance(value, list | tuple) and not all(isinstance(v, _PLAIN) for v in value):
            parts = dict(enumerate(value))
        if parts:
            texts |= flat({f"{name}.{key}": part for key, part in parts.items()})
        elif value not in (None, "", [], (), {}):
            text = value if isinstance(value, str) else json.dumps(value, default=repr)
            cut = text if len(text) <= PARAM_LENGTH else text[: PARAM_LENGTH - 1] + "…"
            texts[as_name(name)] = cut
    return texts


def as_name(name: str) -> str:
    """Return a name, cut to 250 characters, with "_" for those that MLflow refuses."""
    return _NOT_TAKEN.sub("_", name)[:_LONGEST]


@contextmanager
def store_errors(uri: str) -> Iterator[None]:
    """Turn errors of the store into `StoreUnavailable`."""
    try:
        yield
    except DpsError:
        raise
    except Exception as error:  # the libraries of stores have no other common base
        raise unavailable(uri, error) from error


def unavailable(uri: str, error: Exception) -> StoreUnavailable:
    """Return an error with the store and the reason, without a user or a password."""
    todo = "Check that it runs and accepts your credentials"
    if uri.startswith(SQLITE):
        todo = "Make it writable, or move it away if it is damaged"
    return StoreUnavailable(
        f"the tracking store {masked(uri)} cannot be used: {reason(uri, error)}. {todo}, or set "
        "MLFLOW_TRACKING_URI to another one, such as sqlite:///mlflow.db."
    )


def reason(uri: str, error: Exception) -> str:
    """Return an error of a store in one line, without a full stop, a user or a password."""
    lines = str(error).strip().splitlines() or [""]
    text, plain = lines[0].rstrip("."), isinstance(error, OSError | ValueError | sqlite3.Error)
    if isinstance(error, UnicodeDecodeError):
        text = "a name in it is not valid UTF-8"
    elif not text or not (plain or type(error).__module__.startswith(("mlflow.", "sqlalchemy."))):
        text = f"{type(error).__name__}: {text}".removesuffix(": ")
    return masked_for(uri, text)


def check_sqlite(uri: str) -> None:
    """Raise an `OSError` or `sqlite3.Error` if a database is damaged or cannot be written."""
    # MLflow would retry for minutes.
    path = uri.removeprefix(SQLITE)
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True, timeout=1)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("CREATE TABLE dps_probe (x)")
            connection.rollback()
    except sqlite3.OperationalError:
        missing, folder = not os.path.exists(path), os.path.dirname(path) or "."
        effective = os.access in os.supports_effective_ids
        # MLflow creates a missing database.
        if not (missing and os.access(folder, os.W_OK, effective_ids=effective)):
            raise


def _reach(uri: str) -> None:
    """Raise an `OSError` if nothing listens at the address of a store without a proxy."""
    kind = uri.partition(":")[0].partition("+")[0].lower()  # as in postgresql+psycopg2
    if uri.startswith(SQLITE):
        check_sqlite(uri)
    elif kind in _PORTS:
        try:
            parts = urlsplit(uri)
            place = parts.hostname or "", parts.port or _PORTS[kind]
        except ValueError:  # its text quotes the supposed port, perhaps a part of the password
            reason = "not an address; in a password, write %2F for / and %40 for @"
            raise ValueError(reason) from None
        proxies = getproxies().keys() & {kind, "all"} if kind in ("http", "https") else ()
        if not proxies or proxy_bypass(place[0]):
            socket.create_connection(place, CONNECT_SECONDS).close()


def in_time(work: Callable[[], None], seconds: float = ANSWER_SECONDS) -> None:
    """Call a function in another thread; raise `TimeoutError` after `seconds`."""
    try:
        beside(work).result(seconds)
    except TimeoutError as error:
        raise TimeoutError(f"no answer within {seconds:g} s") from error


def beside(work: Callable[[], T]) -> Future[T]:
    """Call a function in another thread, which no end of the process waits for."""
    done: Future[T] = Future()

    def do() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised by the future
            done.set_exception(error)

    threading.Thread(target=do, name="dps-mlflow-asks", daemon=True).start()
    return done


# -- streaming -------------------------------------------------------------------------------------


class MlflowRun:
    """An MLflow run that a training streams to until `close`. Thread-safe.

    A thread sends the numbers of the `history` in batches, so a slow or unreachable tracking server
    delays nothing. If parameter server `group` resumes from checkpoints of another one, `before`,
    the newest run of `before` with this name is continued. `warn` is called, in any thread, at most
    once for missing numbers and once for renamed metrics.
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
        if not isinstance(experiment, str) or not experiment.strip():
            raise refused("experiment", experiment, "the name of an MLflow experiment")
        if not isinstance(name, str | None):
            raise refused("run_name", name, "a text or None")
        if not isinstance(tracking_uri, str | PathLike | None):
            raise refused("tracking_uri", tracking_uri, "a text such as sqlite:///mlflow.db")
        self._writer = Writer(experiment, None if tracking_uri is None else fspath(tracking_uri))
        self._keys: dict[str, str] = {}  # the name in MLflow of each series
        self._warn = warn
        self._warned = self._renamed = False

        def begin() -> None:
            wanted = f"tags.`{_GROUP}` = '{before}'"
            runs = self._writer.find(wanted) if before is not None else []
            run = next((run for run in runs if name in (None, run.info.run_name)), None)
            known = run.data.params if run else {}  # immutable in MLflow
            self._failovers = sum(tag.startswith(_FAILOVER) for tag in run.data.tags) if run else 0
            if run is None:
                self.id = self._writer.start(name or f"dps-{group}", {}, {}, None)
            else:
                self.id = str(run.info.run_id)
                self._writer.client.update_run(self.id, status="RUNNING")
            new = {key: text for key, text in flat(params).items() if key not in known}
            self._writer.set(self.id, {**tags, _GROUP: group}, new)

        with store_errors(self._writer.uri):
            in_time(begin)
        self._numbers: deque[Number] = deque()
        self._waiting_failovers: deque[Failover] = deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="dps-mlflow", daemon=True)
        self._thread.start()
        self._history = history
        history.listen(self._put)

    def failover(self, failover: Failover) -> None:
        """Log a failover as a tag."""
        self._waiting_failovers.append(failover)

    def close(self, numbers: Mapping[str, float], succeeded: bool) -> None:
        """Send all that is waiting and some last numbers, and end the run."""
        self._history.unlisten(self._put)
        self._over.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._lacks("it is too slow")
            return

        def end() -> None:
            for name, number in numbers.items():
                self._writer.client.log_metric(self.id, name, number)
            self._writer.end(self.id, succeeded)

        try:
            in_time(end)
        except Exception as error:  # noqa: BLE001 - of any library
            self._lacks(str(error))

    def _put(self, numbers: Sequence[Number]) -> None:
        if len(self._numbers) < MAX_WAITING:
            self._numbers.extend(numbers)
        else:
            self._lacks("it is too slow")

    def _send_all(self) -> None:
        ended = False
        while not ended:
            ended = self._over.wait(SEND_SECONDS)
            while self._numbers or self._waiting_failovers:
                try:
                    self._send_some()
                except Exception as error:  # noqa: BLE001 - of any library
                    self._lacks(str(error))

    def _send_some(self) -> None:
        numbers = [self._numbers.popleft() for _ in range(min(BATCH, len(self._numbers)))]
        if numbers:
            points = [Point(self._key(n), n.value, n.t, n.step) for n in numbers]
            self._writer.log(self.id, points)
        if self._waiting_failovers:
            self._failovers += 1
            tag = f"{_FAILOVER}{self._failovers}"
            self._writer.set(self.id, {tag: str(self._waiting_failovers.popleft())}, {})

    def _key(self, number: Number) -> str:
        name = f"{number.source}/{number.metric}"
        if name not in self._keys:
            key = like = as_name(name)
            for other in count(2):
                if key not in self._keys.values():
                    break
                key = f"{like[: _LONGEST - 8]}_{other}"
            self._keys[name] = key
            if key != name and not self._renamed:
                self._renamed = True
                self._warn(
                    f"MLflow does not accept the metric name {shown(name)}: recorded as "
                    f"{shown(key)}. Use letters, digits, spaces and / . - _ :"
                )
        return self._keys[name]

    def _lacks(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"MLflow's run {self.id} lacks some of the history: {why}")
