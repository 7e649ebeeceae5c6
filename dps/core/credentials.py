"""What is done about passwords in addresses: they are found, to be refused, and masked.

Who somebody is belongs in the environment. An address is shown, recorded and copied; a password in
one would be as well.

Texts come from whoever wrote a configuration, and may be long and odd, so each of these searches
takes time in proportion to the text: no pattern may start anew in what another start has gone over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote, unquote_plus

MASK = "***"

_SCHEME = r"(?<![a-z0-9+.-])([a-z0-9+.-]+://)"
# The user's name and password, up to the last @ that may end them. A password may hold anything, a
# slash and a quote as well, which it should not; only a colon tells it from a host and a path then.
# These patterns are only tried on words up to their last @, so that `\S*@` never fails at the end.
_USER = re.compile(_SCHEME + r"([^\s/?\#:@]*:\S*|[^\s/?\#]*)@", re.IGNORECASE)
# What may be a port and a path that holds an @ is masked, but is no reason to refuse an address:
# unless it is a database's, which has no such path.
_PASSWORD = re.compile(_SCHEME + r"[^\s/?\#:@]*:(?!\d+(?:[/?\#]|$))\S*@", re.IGNORECASE)
_USER_AND_PASSWORD = re.compile(r"((?<![a-z0-9+.-])[a-z0-9+.-]+)://[^\s/?\#:@]*:", re.IGNORECASE)
_DATABASE = re.compile(r"postgres|mysql|mariadb|mssql|oracle", re.IGNORECASE)
_TOKEN = re.compile(r"https?://[^\s/?\#]+@", re.IGNORECASE)
_WORD_WITH_AT = re.compile(r"(?<!\S)\S*@")
# The name of a parameter begins at the first of these; the run before "=" may hold several.
_NAME = re.compile(r"(?<![^\s=&;])([^\s=&;]*+)=")
_FIRST_MARK = re.compile(r"[?\#]")
_SECRET_NAME = re.compile(r"pass|pwd|secret|token|key|sig|credential|odbc_connect", re.IGNORECASE)
_VALUE = re.compile(r"[^\s&]+")
_AROUND = "'\")]}>,."  # at the very end of a value, these are of the text around
_ODBC_PASSWORD = re.compile(r"(?:^|;)\s*(?:pwd|password)\s*=\s*", re.IGNORECASE)


def masked(text: str) -> str:
    """Return a text in which no address shows a user, a password or another secret."""
    text = _WORD_WITH_AT.sub(lambda word: _USER.sub(rf"\g<1>{MASK}@", word[0]), text)
    parts, end = [], 0
    for start, stop in _parameters(text):
        parts += [text[end:start], MASK]
        end = stop
    return "".join([*parts, text[end:]])


def masked_for(uri: str, text: str) -> str:
    """Return what somebody says of an address, as `masked`, and without its user and password."""
    text = masked(text)
    found = next(filter(None, (_USER.search(word) for word in _words_with_at(uri))), None)
    user, _, password = found[2].partition(":") if found else ("", "", "")
    secrets = [password, *(uri[start:stop] for start, stop in _parameters(uri))]
    secrets += [
        decoded for secret in secrets for decoded in (unquote(secret), unquote_plus(secret))
    ]
    secrets += [w.strip("{}") for secret in secrets for w in _odbc_passwords(secret)]
    for secret in sorted({*secrets} - {"", MASK}, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for quote in ("'", '"') if user else ():
        text = text.replace(f"{quote}{unquote(user)}{quote}", f"{quote}{MASK}{quote}")
    return text


def holds_secret(text: str) -> bool:
    """Whether an address in a text has a password or another secret; a user alone is none."""
    return (
        any(_PASSWORD.search(word) or _of_database(word) for word in _words_with_at(text))
        or _TOKEN.search(text) is not None
        or next(_parameters(text), None) is not None
    )


# -- parts -------------------------------------------------------------------------------------


def _words_with_at(text: str) -> Iterator[str]:
    """The words of a text that hold an @, each up to its last one."""
    return (word[0] for word in _WORD_WITH_AT.finditer(text))


def _of_database(word: str) -> bool:
    """Whether the address of a database in a word that ends with @ has something of a password."""
    return any(_DATABASE.search(found[1]) for found in _USER_AND_PASSWORD.finditer(word))


def _parameters(text: str) -> Iterator[tuple[int, int]]:
    """The places of the values of parameters that are secrets, as in ?token=…"""
    at = 0
    while (name := _NAME.search(text, at)) is not None:
        at, start = name.end(), name.start()
        if not start or text[start - 1] not in "&;":
            mark = _FIRST_MARK.search(text, start, at)
            start = mark.end() if mark else at
        value = _VALUE.match(text, at) if _SECRET_NAME.search(text, start, at) else None
        if value is not None:
            # Something is left in any case: a value may be a quote.
            at += max(1, len(value[0].rstrip(_AROUND)))
            yield value.start(), at


def _odbc_passwords(text: str) -> Iterator[str]:
    last_brace = text.rfind("}")
    at = 0
    while (name := _ODBC_PASSWORD.search(text, at)) is not None:
        start = name.end()
        braced = text[start : start + 1] == "{" and start < last_brace
        end = text.find("}", start) + 1 if braced else text.find(";", start)
        at = len(text) if end < 0 else end
        yield text[start:at]
