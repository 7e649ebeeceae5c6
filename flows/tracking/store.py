"""The tracking store that belongs to a working directory."""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from contextlib import suppress
from multiprocessing.util import get_temp_dir
from pathlib import Path

from dps.errors import DpsError
from dps.observe.tracking import SQLITE, check_sqlite, store_errors
from flows.files import scratch_path, write_whole

REQUEST_SECONDS = 15  # MLflow takes whole ones only


class Refused(DpsError):
    """The tracking store works, but does not take one thing, such as a trial."""


def default_uri(folder: Path) -> str:
    """Return the tracking store of a working directory."""
    return f"{SQLITE}{folder.resolve() / 'mlruns' / 'mlflow.db'}"


def prepare_mlflow() -> None:
    """Keep MLflow quiet, from reporting its use, and from repeating requests for minutes.

    A repeated request could enter a run twice: the answer may be all that was lost. This must come
    before MLflow is first imported, because some of it is read only then.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
    # It prints the address of every run that ends, with the password in the store's.
    os.environ["MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"] = "true"
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(REQUEST_SECONDS))
    logging.getLogger("alembic").setLevel(logging.WARNING)
    # It shows the traceback of what it raises, which `store_errors` reports in a line.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


def check_default(folder: Path) -> None:
    """Raise `StoreUnavailable` if a working directory's store is damaged or cannot be written."""
    uri = default_uri(folder)
    with store_errors(uri):
        Path(uri.removeprefix(SQLITE)).parent.mkdir(parents=True, exist_ok=True)
        check_sqlite(uri)


def create_database(folder: Path) -> None:
    """Create the store of a working directory elsewhere first, so that it is there whole or not.

    An interruption between two of MLflow's many tables would leave a database that it refuses.
    """
    check_default(folder)
    uri = default_uri(folder)
    path = Path(uri.removeprefix(SQLITE))
    if path.exists():
        return
    from mlflow import MlflowClient
    from sqlalchemy import Engine, event

    made = Path(get_temp_dir()) / f"{secrets.token_hex(8)}.db"  # removed with this process
    scratch = scratch_path(path)
    event.listen(Engine, "connect", _without_sync)
    with store_errors(uri):
        try:
            MlflowClient(f"{SQLITE}{made}").search_experiments(max_results=1)
            with scratch.open("xb") as file:
                file.write(made.read_bytes())
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):  # another process was quicker: its database is as good
                os.link(scratch, path)
        finally:
            event.remove(Engine, "connect", _without_sync)
            scratch.unlink(missing_ok=True)


def _without_sync(connection: sqlite3.Connection, record: object) -> None:
    """Let SQLite not wait for the disk after each of MLflow's hundreds of statements."""
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA journal_mode = MEMORY")


def directory_id(folder: Path) -> str:
    """Return the id of a working directory in a store that others write to as well.

    It is drawn once and kept in `mlruns/`, so it stays when the directory is moved.
    """
    path = folder / "mlruns" / ".directory"
    if not path.exists():
        scratch = scratch_path(path)
        write_whole(scratch, secrets.token_hex(8), "the id of the working directory")
        with suppress(FileExistsError):  # another process was quicker: its id is that of both
            os.link(scratch, path)
        scratch.unlink(missing_ok=True)
    return path.read_text(encoding="utf-8").strip()
