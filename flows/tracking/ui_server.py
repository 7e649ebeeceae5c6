"""The MLflow server of `dps ui`, for whoever has its token: MLflow runs it as its app `dps`.

MLflow lets everybody in who can connect, as every user of the machine can to a port on loopback:
they could delete runs, and have files written wherever its owner may write.
"""

from __future__ import annotations

import os
import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlencode

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

# As MLflow's clients know it, and send it: those that the server itself starts get in by it.
TOKEN = "MLFLOW_TRACKING_TOKEN"
PARAMETER = "token"


class ForTokenHolders:
    """An ASGI app that answers only who has a token.

    It comes in the address of a page, as `?token=…`, in the cookie that a browser is given then, or
    as the bearer token of an `Authorization`.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what comes with the token, and refuse the rest."""
        if scope["type"] == "lifespan":  # of the server itself
            await self._app(scope, receive, send)
            return
        asked = HTTPConnection(scope)
        # Browsers tell hosts apart by cookies, and not ports.
        cookie = f"dps-ui-{asked.url.port}"
        bearer = Headers(scope=scope).get("authorization", "").removeprefix("Bearer ")
        if self._is_it(asked.cookies.get(cookie, "")) or self._is_it(bearer):
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close"})
        elif self._is_it(asked.query_params.get(PARAMETER, "")):
            rest = [(k, v) for k, v in asked.query_params.multi_items() if k != PARAMETER]
            place = f"/{asked.url.path.lstrip('/')}" + (f"?{urlencode(rest)}" if rest else "")
            welcome = RedirectResponse(place, HTTPStatus.SEE_OTHER)
            welcome.set_cookie(cookie, self._token, httponly=True, samesite="lax")
            await welcome(scope, receive, send)
        else:
            text = "This is for who started it: open the address that `dps ui` has printed.\n"
            await PlainTextResponse(text, HTTPStatus.UNAUTHORIZED)(scope, receive, send)

    def _is_it(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def create_app() -> ASGIApp:
    """Return MLflow's server, for who has the token that is in the environment."""
    from mlflow.server.fastapi_app import app  # takes seconds, and reads the environment

    return ForTokenHolders(app, os.environ[TOKEN])
