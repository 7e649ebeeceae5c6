"""The tracking store that belongs to a working directory."""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
from contextlib import suppress
from pathlib import Path

from dps.errors import DpsError
from dps.observe.tracking import SQLITE, store_errors
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


def create_database(path: Path) -> None:
    """Create MLflow's database under another name first, so that it is there whole or not at all.

    An interruption between two of its many tables would leave a database that MLflow refuses.
    """
    if path.exists():
        return
    from mlflow import MlflowClient
    from sqlalchemy import Engine, event

    with store_errors(f"{SQLITE}{path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = scratch_path(path)
        event.listen(Engine, "connect", _without_sync)
        try:
            scratch.touch()  # raises at once where MLflow would retry for minutes
            MlflowClient(f"{SQLITE}{scratch}").search_experiments(max_results=1)
            with scratch.open("rb") as file:
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
