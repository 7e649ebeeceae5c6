"""Another user of this machine, who tries to get at what a run has open.

Run as root as `python -m tests.support.stranger PORT…`: it gives up its rights, and prints what it
got.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from distributed.core import connect, rpc
from distributed.protocol.pickle import dumps
from distributed.security import Security

from dps.cluster.backends.tls import temporary

NOBODY = 65534
ROOT = Path(__file__).parents[2]
SECONDS = 3.0
PATHS = ("/metrics", "/status", "/json/identity.json", "/sitemap.json")

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def got_by_a_stranger(ports: Iterable[int]) -> dict[str, list[str]]:
    """What another user gets at each port of loopback: code run by a process, a page, nothing."""
    command = [sys.executable, "-m", "tests.support.stranger", *map(str, ports)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return told


def status_for_a_stranger(url: str, body: object = None) -> int:
    """The HTTP status that another user gets for a GET, or a POST of JSON."""
    asked = ["--status", url, *([json.dumps(body)] if body is not None else [])]
    command = [sys.executable, "-m", "tests.support.stranger", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


# -- as the other user ---------------------------------------------------------------------------


def _main() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    assert os.getuid() == NOBODY
    if sys.argv[1] == "--status":
        print(_status(*sys.argv[2:]))
        return
    print(json.dumps({port: _got(int(port)) for port in sys.argv[1:]}))


def _status(url: str, body: str | None = None) -> int:
    data = None if body is None else body.encode()
    asked = Request(url, data, {"Content-Type": "application/json"})
    try:
        with urlopen(asked, timeout=60) as reply:
            return int(reply.status)
    except HTTPError as error:
        return error.code


def _got(port: int) -> list[str]:
    for scheme, security in (("tcp", Security()), ("tls", temporary())):
        # A ValueError: of a port that is none of Dask's connections.
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            return [asyncio.run(_code_run(f"{scheme}://127.0.0.1:{port}", security))]
    return [*_pages(port, None), *_pages(port, _no_certificate()), *_pages(port, _of_own())]


def _pages(port: int, context: ssl.SSLContext | None) -> list[str]:
    """The pages that are shown to who asks; the first silence is taken for all."""
    found = []
    with contextlib.suppress(OSError):
        for path in PATHS:
            with contextlib.ExitStack() as stack:
                connection: Any = stack.enter_context(
                    socket.create_connection(("127.0.0.1", port), SECONDS)
                )
                if context is not None:
                    connection = stack.enter_context(context.wrap_socket(connection))
                connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
                if connection.recv(100).startswith(b"HTTP/1.1 200"):
                    found.append(path)
    return found


def _no_certificate() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _of_own() -> ssl.SSLContext:
    context: ssl.SSLContext = temporary().get_connection_args("client")["ssl_context"]
    context.verify_mode = ssl.CERT_NONE
    return context


async def _code_run(address: str, security: Security) -> str:
    """Connect as Dask's processes do, and have code run, as far as the other end lets us."""
    known = security.get_connection_args("client")
    async with asyncio.timeout(SECONDS):
        comm = await connect(address, **known)
        comm.abort()
    async with asyncio.timeout(SECONDS), rpc(address, connection_args=known) as other:
        kind = (await other.identity())["type"]
        function = dumps(os.getuid)
        if kind.startswith("Scheduler"):
            uid = await other.run_function(function=function, wait=True)
        else:
            uid = await other.run(function=function, wait=True)
        return f"{kind} ran code as {uid['result'] if isinstance(uid, dict) else uid}"


if __name__ == "__main__":
    _main()
