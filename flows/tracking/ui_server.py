"""The MLflow UI for one user: a child process on loopback that asks for a token.

MLflow accepts every client that can connect, on loopback all users of the machine; they could
delete runs and make it write files. MLflow runs the guarded server as its app `dps`.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from dps.core.credentials import masked
from dps.errors import ConfigurationError
from dps.observe.tracking import SQLITE, check_sqlite, store_errors
from flows.tracking.store import default_uri

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

HOST = "127.0.0.1"
TOKEN = "MLFLOW_TRACKING_TOKEN"  # which MLflow's clients send as a bearer token
# MLflow opens with its views of language models; this makes it show training runs.
WORKFLOW = "workflowType=machine_learning"
TRAINING_VIEW = f"#/experiments?{WORKFLOW}"
STOP_SECONDS = 5.0


def comparison_view(experiment_id: str) -> str:
    """Return the page that compares the strategies of an experiment."""
    only, order = quote("tags.dps.kind = 'strategy'"), quote("tags.`dps.order`")
    query = f"{WORKFLOW}&searchFilter={only}&orderByKey={order}&orderByAsc=true"
    return f"#/experiments/{experiment_id}/runs?{query}&compareRunsMode=CHART"


def page(view: str, port: int, token: str) -> str:
    """Return the address of a page of the UI, with which a browser gets in."""
    return f"http://{HOST}:{port}/?token={token}{view}"


def served_page(view: str, uri: str) -> str:
    """Return the address of a page of an MLflow server, without user and password."""
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}/{view}"


def ui_command(
    here: Path, store: str | None, port: int, token: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command that serves the store of a working directory, and its environment.

    Store and token are in the environment, because all users can read command lines.

    Raises `ConfigurationError` if there is no store to show, the store is a server with its own UI,
    or the port is taken, and `StoreUnavailable` if the store is damaged or cannot be written.
    """
    uri = store or default_uri(here)
    if uri.lower().startswith(("http:", "https:")):
        raise ConfigurationError(
            f"MLFLOW_TRACKING_URI is a server: open {masked(uri)} in a browser"
        )
    if uri.startswith(SQLITE):
        if not Path(uri.removeprefix(SQLITE)).exists():
            raise ConfigurationError(
                f"there is no tracking store at {uri} yet; `dps run demo` makes one, "
                "or go to the directory in which an experiment ran"
            )
        with store_errors(uri):
            check_sqlite(uri)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"port {port} of {HOST} cannot be used: {error}; name another one with --port"
            ) from error
    serve = ["--app-name", "dps", "--host", HOST, "--port", str(port), "--workers", "1"]
    command = [sys.executable, "-m", "mlflow", "server", *serve]
    # MLflow prints a line about the registry's store if it is not given.
    stores = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_REGISTRY_STORE_URI": uri}
    return command, {**stores, TOKEN: token}


@contextmanager
def child(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command in a new process group, with `environment` added to that of this process.

    The whole group is ended on exit.
    """
    environment = {"MLFLOW_DISABLE_TELEMETRY": "true", **os.environ, **(environment or {})}
    process = subprocess.Popen(command, start_new_session=True, env=environment)
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            # The leader may be gone while servers that it started are not: signal the group anyway.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)


def wait_until_served(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until a port accepts connections, or the process that is to serve it has ended."""
    while process.poll() is None:
        with suppress(OSError):
            socket.create_connection((HOST, port)).close()
            return
        time.sleep(0.1)


def create_app() -> ASGIApp:
    """Return MLflow's server, for clients with the token in the environment."""
    from mlflow.server.fastapi_app import app  # takes seconds, and reads the environment

    return guarded(app, os.environ[TOKEN])


def guarded(app: ASGIApp, token: str) -> ASGIApp:
    """Return an ASGI app that answers only clients with a token.

    The token comes in the address of a page, as `?token=…`, then in the cookie that the browser is
    given, or as the bearer token of an `Authorization`.
    """
    from starlette.requests import HTTPConnection
    from starlette.responses import PlainTextResponse, RedirectResponse

    def is_token(given: str | None) -> bool:
        return secrets.compare_digest((given or "").encode(), token.encode())

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":  # of the server itself
            await app(scope, receive, send)
            return
        client = HTTPConnection(scope)
        cookie = f"dps-ui-{client.url.port}"  # browsers separate cookies by host, not by port
        bearer = client.headers.get("authorization", "").removeprefix("Bearer ")
        if is_token(client.cookies.get(cookie)) or is_token(bearer):
            await app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        elif is_token(client.query_params.get("token")):
            url = client.url.remove_query_params("token")
            place = f"/{url.path.lstrip('/')}{'?' if url.query else ''}{url.query}"
            welcome = RedirectResponse(place, HTTPStatus.SEE_OTHER)
            welcome.set_cookie(cookie, token, httponly=True, samesite="lax")
            await welcome(scope, receive, send)
        else:
            text = "An access token is missing: open the address that `dps ui` has printed.\n"
            await PlainTextResponse(text, HTTPStatus.UNAUTHORIZED)(scope, receive, send)

    return guard
