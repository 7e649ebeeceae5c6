"""Owns what is done about passwords in addresses: they are found, to be refused, and masked.

Who somebody is belongs in the environment. An address is shown, recorded and copied; a password in
one would be as well.
"""

from __future__ import annotations

import re
from urllib.parse import unquote, unquote_plus

MASK = "***"

_SCHEME = r"(?<![a-z0-9+.-])([a-z0-9+.-]+://)"
# The user's name and password, up to the last @ that may end them. A password may hold anything, a
# slash and a quote as well, which it should not; only a colon tells it from a host and a path then.
_USER = re.compile(_SCHEME + r"([^\s/?\#:@]*:\S*|[^\s/?\#]*)@", re.IGNORECASE)
# What may be a port and a path that holds an @ is masked, but is no reason to refuse an address:
# unless it is a database's, which has no such path.
_PASSWORD = re.compile(
    _SCHEME + r"[^\s/?\#:@]*:(?!\d+(?:[/?\#]|$))\S*@"
    r"|(?:postgres|mysql|mariadb|mssql|oracle)[a-z0-9+.-]*://[^\s/?\#:@]*:\S*@",
    re.IGNORECASE,
)
_TOKEN = re.compile(r"https?://[^\s/?\#]+@", re.IGNORECASE)
# A quote or the like at the very end is of the text around.
_PARAMETER = re.compile(
    r"""([?&;\#][^\s=&;]*(?:pass|pwd|secret|token|key|sig|credential|odbc_connect)[^\s=&;]*=)
        ([^\s&]+?)(?=['")\]}>,.]*(?:[\s&]|$))""",
    re.IGNORECASE | re.VERBOSE,
)
_ODBC_PASSWORD = re.compile(r"(?:^|;)\s*(?:pwd|password)\s*=\s*(\{[^}]*\}|[^;]*)", re.IGNORECASE)


def masked(text: str) -> str:
    """Return a text in which no address shows a user, a password or another secret."""
    return _PARAMETER.sub(rf"\g<1>{MASK}", _USER.sub(rf"\g<1>{MASK}@", text))


def masked_for(uri: str, text: str) -> str:
    """Return what somebody says of an address, as `masked`, and without its user and password."""
    text = masked(text)
    found = _USER.search(uri)
    user, _, password = found[2].partition(":") if found else ("", "", "")
    secrets = [password, *(value for _, value in _PARAMETER.findall(uri))]
    secrets += [
        decoded for secret in secrets for decoded in (unquote(secret), unquote_plus(secret))
    ]
    secrets += [w.strip("{}") for secret in secrets for w in _ODBC_PASSWORD.findall(secret)]
    for secret in sorted({*secrets} - {"", MASK}, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for quote in ("'", '"') if user else ():
        text = text.replace(f"{quote}{unquote(user)}{quote}", f"{quote}{MASK}{quote}")
    return text


def holds_secret(text: str) -> bool:
    """Whether an address in a text has a password or another secret; a user alone is none."""
    return any(pattern.search(text) for pattern in (_PASSWORD, _TOKEN, _PARAMETER))
