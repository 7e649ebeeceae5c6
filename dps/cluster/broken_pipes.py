"""A repair of TLS: a connection that breaks must not break others.

CPython leaves some errors in OpenSSL's queue of a thread, such as that of a write to a peer that is
gone. The next read on any connection of the thread takes it for its own (python/cpython#81891; with
OpenSSL 3.5, not 3.0), so Tornado closes that one too: a scheduler would lose more than one node.
"""

from __future__ import annotations

import ssl
from contextlib import suppress

from tornado.iostream import SSLIOStream

_close = SSLIOStream.close_fd


def _close_and_clear(self: SSLIOStream) -> None:
    """Close the socket, at once after an error, and clear the queue."""
    _close(self)
    with suppress(ssl.SSLError):
        # There is no such cipher. Before CPython raises that, it clears the queue.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).set_ciphers("none")


SSLIOStream.close_fd = _close_and_clear  # type: ignore[assignment, method-assign]
