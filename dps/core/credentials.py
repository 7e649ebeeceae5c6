"""Owns what is done about passwords in addresses: they are found, to be refused, and masked.

Who somebody is belongs in the environment. An address is shown, recorded and copied; a password in
one would be as well.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, urlsplit

MASK = "***"

# The user's name and password, up to the last @ that may end them. A password may hold a slash,
# which it should not; then only a colon tells it from a host and a path, and no port follows that.
_USER = re.compile(
    r"""([a-z][a-z0-9+.-]*://)
        (?:[^\s/?\#:@'"]*:(?!\d+(?:[/?\#]|$))[^\s'"]*|[^\s/?\#'"]*)
        @""",
    re.IGNORECASE | re.VERBOSE,
)
_PASSWORD = re.compile(
    r"""[a-z][a-z0-9+.-]*://[^\s/?\#:@'"]*:(?!\d+(?:[/?\#]|$))[^\s'"]*@""",
    re.IGNORECASE | re.VERBOSE,
)
_TOKEN = re.compile(r"""https?://[^\s/?\#'"]+@""", re.IGNORECASE)
_PARAMETER = re.compile(
    r"""([?&][^\s=&'"]*(?:pass|pwd|secret|token|key|sig|credential)[^\s=&'"]*=)[^\s&'"]+""",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """Return a text in which no address shows a user, a password or another secret."""
    return _PARAMETER.sub(rf"\g<1>{MASK}", _USER.sub(rf"\g<1>{MASK}@", text))


def masked_for(uri: str, text: str) -> str:
    """Return what somebody says of an address, as `masked`, and without its user and password."""
    text = masked(text)
    try:
        parts = urlsplit(uri)
    except ValueError:  # it is none that could be taken apart
        return text
    password, user = parts.password or "", parts.username or ""
    for secret in {password, unquote(password)} - {""}:
        text = text.replace(secret, MASK)
    for quote in ("'", '"') if user else ():
        text = text.replace(f"{quote}{unquote(user)}{quote}", f"{quote}{MASK}{quote}")
    return text


def holds_secret(text: str) -> bool:
    """Whether an address in a text has a password or another secret; a user alone is none."""
    return any(pattern.search(text) for pattern in (_PASSWORD, _TOKEN, _PARAMETER))
