"""The tracking store as a place: where it is, whether it answers, what is said if it fails.

MLflow's client would repeat a request to a server that is down for minutes. Here it asks once, and
does not wait long: whoever writes to the store repeats what failed as a whole, at a better time.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shlex
import socket
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dps.core.credentials import masked, masked_for
from dps.errors import DpsError, StoreUnavailable
from flows.files import scratch_path, write_whole


def refuse_other_schema(path: Path) -> None:
    """Refuse a SQLite database of another version of MLflow, and leave it as it is.

    Raises
    ------
    StoreUnavailable
        It is of another version; the message says what to do.
    sqlite3.Error
        It cannot be read.
    """
    found = _schema_of(path)
    if found is None:
        return
    from alembic.script import ScriptDirectory

    spec = find_spec("mlflow.store")
    assert spec is not None
    assert spec.submodule_search_locations
    scripts = ScriptDirectory(str(Path(spec.submodule_search_locations[0]) / "db_migrations"))
    wanted = scripts.get_current_head()
    if found == wanted:
        return
    told = f"the tracking store {path} has the database schema {found}, and this MLflow {wanted}: "
    if found in {script.revision for script in scripts.walk_revisions()}:
        copy = shlex.join(["cp", str(path), f"{path}.bak"])
        upgrade = shlex.join(["mlflow", "db", "upgrade", f"sqlite:///{path}"])
        raise StoreUnavailable(
            f"{told}it was made by an older MLflow, and is left as it was. Keep a copy and bring "
            f"it up to date ({copy} && {upgrade}), or name another store with MLFLOW_TRACKING_URI."
        )
    raise StoreUnavailable(
        f"{told}it was made by a newer MLflow, and is left as it was. Install that version here, "
        "or name another store with MLFLOW_TRACKING_URI."
    )


def _schema_of(path: Path) -> str | None:
    """The schema that a database says it has; None: it says none, as one that is new."""
    if not path.exists():
        return None
    with closing(sqlite3.connect(path)) as connection:
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return None
            raise
    return None if row is None else str(row[0])


CONNECT_SECONDS = 5.0
REQUEST_SECONDS = 15  # whole ones only, says MLflow
PORTS = {"http": 80, "https": 443, "postgresql": 5432, "mysql": 3306, "mssql": 1433}

DIRECTORY_FILE = ".directory"
NO_ADDRESS = "it is no address; in a password, / is written as %2F, and @ as %40"

SIGNS_OF_DAMAGE = (
    *("file is not a database", "database disk image is malformed", "malformed database schema"),
    *("no such table", "no such column", "Could not decode to UTF-8"),
)
MOVE_AWAY = (
    "Move the file away (`dps run` makes a new one and enters the recorded trials of its "
    "experiment)"
)

# Answers to what the store was given, which it would repeat; others are of who asks, or when.
REFUSALS = frozenset({400, 409, 411, 413, 414, 415, 422, 431})
_ANSWERED = re.compile(r"failed with error code (\d{3})")  # MLflow has no names for some of them


class Refused(DpsError):
    """The tracking store is well, but does not take one thing, such as a trial."""


def default_uri(folder: Path) -> str:
    """Return the tracking store that belongs to a working directory."""
    return f"sqlite:///{folder.resolve() / 'mlruns' / 'mlflow.db'}"


def scheme(uri: str) -> str:
    """Return what a URI begins with; it may be none that could be taken apart."""
    return uri.partition(":")[0].lower()


def prepare_mlflow() -> None:
    """Keep MLflow quiet, from reporting its use to anyone, and from waiting for minutes.

    MLflow must not repeat a request by itself, whatever the environment says: the answer may be all
    that was lost, and the run that it asked for would be there twice. What else the environment
    says stays.

    This must come before MLflow is first imported, for some of it is read only then.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    # It prints the address of every run that ends, with the password that is in the store's.
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REQUEST_SECONDS))
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It shows the traceback of what it raises, of which `store_errors` tells in a line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def require_reachable(uri: str) -> None:
    """Make sure that a store can be written, if it is a file, or that somebody listens there.

    Where a proxy is between here and there, only the proxy may know the host, and MLflow asks it.

    Raises
    ------
    StoreUnavailable
        It is not so; the message says what to do.
    """
    kind = scheme(uri).partition("+")[0]  # as in postgresql+psycopg2
    if kind == "sqlite":
        _require_writable_sqlite(Path(uri.removeprefix("sqlite:///")))
    elif kind in PORTS:
        try:
            parts = urlsplit(uri)
            place = (parts.hostname or "", parts.port or PORTS[kind])
            if not _is_by_proxy(kind, *place):
                socket.create_connection(place, CONNECT_SECONDS).close()
        except OSError as error:
            raise unavailable(uri, error) from error
        except ValueError:  # which quotes what it took for the port, and may be of the password
            raise unavailable(uri, ValueError(NO_ADDRESS)) from None


def require_database(path: Path) -> None:
    """Make sure that a file is a database that this version of MLflow can serve.

    Raises
    ------
    StoreUnavailable
        It is not; the message says what to do.
    """
    with store_errors(f"sqlite:///{path}"):
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA schema_version")
        refuse_other_schema(path)


def create_database(path: Path) -> None:
    """Create MLflow's database under another name first, so that it is there whole or not at all.

    Its tables are made in many steps; an interruption between two would leave a database that
    MLflow refuses for good.
    """
    if path.exists():
        return
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_path(path)
    try:
        with _without_waiting_for_the_disk():
            MlflowClient(tracking_uri=f"sqlite:///{scratch}").search_experiments(max_results=1)
        with scratch.open("rb") as written:
            os.fsync(written.fileno())
        with suppress(FileExistsError):  # another process was quicker: its database is as good
            os.link(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


@contextmanager
def _without_waiting_for_the_disk() -> Iterator[None]:
    """Have SQLite go on while what it has written is on its way to the disk.

    MLflow makes its tables in many steps, and SQLite would wait after each: for seconds in all.
    """
    from sqlalchemy import Engine, event

    def go_on(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA synchronous = OFF")

    event.listen(Engine, "connect", go_on)
    try:
        yield
    finally:
        event.remove(Engine, "connect", go_on)


def directory_id(folder: Path) -> str:
    """Return what a working directory is known by in a store that others write to as well.

    It is drawn once, and kept in `mlruns/`: no other has it, wherever it lies and whoever's it is.

    Raises
    ------
    StoreUnavailable
        It cannot be kept.
    """
    path = folder / "mlruns" / DIRECTORY_FILE
    if not path.exists():
        scratch = scratch_path(path)
        write_whole(scratch, secrets.token_hex(8), "the id of the working directory")
        with suppress(FileExistsError):  # another process was quicker: its id is that of both
            os.link(scratch, path)
        scratch.unlink(missing_ok=True)
    return path.read_text(encoding="utf-8").strip()


def is_damaged(error: Exception) -> bool:
    """Whether an error says that a database's file is none, or no whole one.

    SQLite quotes what it found in the file. Where that is no text, its message cannot be decoded.
    """
    if isinstance(error, UnicodeDecodeError):
        return True
    return any(sign in str(error) for sign in SIGNS_OF_DAMAGE)


@contextmanager
def store_errors(uri: str) -> Iterator[None]:
    """Turn what the store raises into one error that says which store and what to do."""
    try:
        yield
    except DpsError:
        raise
    except Exception as error:  # the libraries of stores have no root in common but this
        raise unavailable(uri, error) from error


def refuses(error: Exception) -> bool:
    """Whether an error is the answer to what the store was given, rather than a failure of it."""
    return not is_damaged(error) and _status(error) in REFUSALS


def refused(uri: str, what: str, error: Exception) -> Refused:
    """Return the error that names what a store did not take, and why."""
    why = masked_for(uri, reason(error))
    return Refused(f"the tracking store {masked(uri)} refuses {what}: {why}.")


def unavailable(uri: str, error: Exception) -> StoreUnavailable:
    """Return the error that names a store that failed, why it did, and what to do.

    Neither the user nor the password of the URI is in it.
    """
    why = masked_for(uri, reason(error))
    told = f"the tracking store {masked(uri)} cannot be used: {why}"
    if is_damaged(error):
        todo = MOVE_AWAY
    else:
        up = "Make sure that it is up and lets you in"
        todo = "Make it writable" if scheme(uri) == "sqlite" else up
    return StoreUnavailable(f"{told}. {todo}, or name another one with MLFLOW_TRACKING_URI.")


def _is_by_proxy(kind: str, host: str, port: int) -> bool:
    proxies = getproxies().keys() & {kind, "all"} if kind in ("http", "https") else ()
    return bool(proxies) and not proxy_bypass(f"{host}:{port}")


def _require_writable_sqlite(path: Path) -> None:
    """Make sure that a database can be written, and leave none where none was.

    SQLite would leave an empty file, which `create_database` would take for a database.
    """
    tried = path if path.exists() else scratch_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with closing(sqlite3.connect(tried)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("CREATE TABLE dps_probe (x)")
                connection.rollback()
        finally:
            if tried != path:
                tried.unlink(missing_ok=True)
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        raise unavailable(f"sqlite:///{path}", error) from error


def _status(error: Exception) -> object:
    """The HTTP status that an error stands for; None if it stands for none."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        found = _ANSWERED.search(str(error))
        return int(found[1]) if found else error.get_http_status_code()
    answer = getattr(error, "response", None)  # of requests, or of botocore
    if isinstance(answer, Mapping):
        return answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return getattr(answer, "status_code", None)


def reason(error: Exception) -> str:
    """Return in a line why a store failed, without a full stop."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    if isinstance(error, UnicodeDecodeError):
        return "a name in it is no text"
    lines = str(error).strip().splitlines()
    name = type(error).__name__
    if not lines:
        return name
    told = isinstance(error, (MlflowException, SQLAlchemyError, OSError, sqlite3.Error, ValueError))
    return lines[0].rstrip(".") if told else f"{name}: {lines[0].rstrip('.')}"
