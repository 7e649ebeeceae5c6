"""A real HTTP proxy on this machine, as sites have before their servers and at their borders."""

from __future__ import annotations

import http.client
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HOP_BY_HOP = {"connection", "keep-alive", "proxy-connection", "transfer-encoding", "host"}


class HttpProxy:
    """Passes on what it gets to a port of this machine, whatever host it is for.

    Bodies of more than `limit` bytes are answered with 413. `asked` are the addresses that it was
    asked for. Use as a context manager.
    """

    def __init__(self, port: int, limit: int | None = None) -> None:
        self.asked: list[str] = []
        self.limit = limit
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def pass_on(self) -> None:
                outer.asked.append(self.path)
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if outer.limit is not None and len(body) > outer.limit:
                    self.send_error(413)
                    return
                parts = urlsplit(self.path)
                target = parts.path + (f"?{parts.query}" if parts.query else "")
                headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_BY_HOP}
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request(self.command, target, body, headers)
                answer = connection.getresponse()
                content = answer.read()
                self.send_response(answer.status, answer.reason)
                for key, value in answer.getheaders():
                    if key.lower() not in HOP_BY_HOP | {"content-length", "server", "date"}:
                        self.send_header(key, value)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)
                connection.close()

            def log_message(self, format: str, *args: object) -> None:
                pass

        for method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
            setattr(Handler, f"do_{method}", Handler.pass_on)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HttpProxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
