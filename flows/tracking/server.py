"""The MLflow UI as a child process on loopback, which ends when its parent does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote, urlsplit

from dps.core.credentials import masked
from dps.errors import ConfigurationError
from flows.tracking.store import default_uri, require_database, scheme
from flows.tracking.ui_server import PARAMETER, TOKEN

HOST = "127.0.0.1"
APP = "dps"  # the name of `flows.tracking.ui_server` among MLflow's apps, in pyproject.toml
# MLflow opens with its views of language models; this is what makes it show training runs.
WORKFLOW = "workflowType=machine_learning"
TRAINING_VIEW = f"#/experiments?{WORKFLOW}"
STOP_SECONDS = 5.0
TRIALS = "tags.dps.kind = 'trial'"
ORDER_TAG = "dps.order"
BY_SEED = f"tags.`{ORDER_TAG}`"


def ui_command(
    here: Path, store: str | None, port: int, token: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves the tracking store of a working directory to who has a token.

    What the store and the token are comes second, as its environment: everybody on the machine can
    read command lines.

    Raises
    ------
    ConfigurationError
        There is no store to show, it has a UI of its own, or the port is taken.
    StoreUnavailable
        The store is damaged, or of another version of MLflow.
    """
    uri = store or default_uri(here)
    if scheme(uri) in ("http", "https"):
        raise ConfigurationError(
            f"MLFLOW_TRACKING_URI is a server: open {masked(uri)} in a browser"
        )
    if scheme(uri) == "sqlite":
        _require_store(Path(uri.removeprefix("sqlite:///")), uri)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"port {port} of {HOST} cannot be used: {error}; name another one with --port"
            ) from error
    serve = ["--app-name", APP, "--host", HOST, "--port", str(port), "--workers", "1"]
    return [sys.executable, "-m", "mlflow", "server", *serve], {
        "MLFLOW_BACKEND_STORE_URI": uri,
        TOKEN: token,
    }


def _require_store(path: Path, uri: str) -> None:
    if not path.exists():
        raise ConfigurationError(
            f"there is no tracking store at {uri} yet; `dps run demo` makes one, "
            "or go to the directory in which an experiment ran"
        )
    require_database(path)


def page(view: str, port: int, token: str) -> str:
    """Return the address of a page of the UI, with which a browser gets in."""
    return f"http://{HOST}:{port}/?{PARAMETER}={token}{view}"


def served_page(view: str, uri: str) -> str:
    """Return the address of a page of an MLflow server, without what its URI has of a password."""
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}/{view}"


def trials_view(experiment_id: str) -> str:
    """Return the page that shows the trials of an experiment side by side.

    The strategies of one seed come after each other, for MLflow draws the first ten runs. In the
    order of their start it would hide them in their parent.
    """
    query = f"{WORKFLOW}&searchFilter={quote(TRIALS)}&orderByKey={quote(BY_SEED)}&orderByAsc=true"
    return f"#/experiments/{experiment_id}/runs?{query}&compareRunsMode=CHART"


@contextmanager
def child(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a process group of its own, and end the whole group on the way out.

    `environment` is what it has beside that of this process.
    """
    environment = {"MLFLOW_DISABLE_TELEMETRY": "true", **os.environ, **(environment or {})}
    process = subprocess.Popen(command, start_new_session=True, env=environment)
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        # The leader may be gone while servers that it started are not: signal the group anyway.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
