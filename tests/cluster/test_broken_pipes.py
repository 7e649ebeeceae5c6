"""TLS: a connection that breaks does not break others of the same thread.

Without the repair, this fails with OpenSSL 3.5, and not with 3.0.
"""

from __future__ import annotations

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
from tornado.ioloop import IOLoop
from tornado.iostream import SSLIOStream

from dps.cluster import broken_pipes  # noqa: F401 - the repair
from dps.cluster.backends.tls import temporary


def connection() -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Return both ends of a new connection: the server's, which does not block, and the other."""
    security = temporary()
    server = security.get_listen_args("scheduler")["ssl_context"]
    client = security.get_connection_args("client")["ssl_context"]
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        other = threads.submit(
            lambda: client.wrap_socket(socket.create_connection(listener.getsockname()))
        )
        end = server.wrap_socket(listener.accept()[0], server_side=True)
        end.setblocking(False)
        return end, other.result()


async def write_to_a_peer_that_is_gone() -> None:
    end, other = connection()
    stream = SSLIOStream(end)
    other.close()
    with suppress(OSError):
        while True:
            stream.write_to_fd(memoryview(b"x"))
    stream.close()


def test_a_connection_that_breaks_leaves_others_whole() -> None:
    end, other = connection()
    with closing(end), closing(other):
        IOLoop(make_current=False).run_sync(write_to_a_peer_that_is_gone)
        with pytest.raises(ssl.SSLWantReadError):
            end.recv(1)
