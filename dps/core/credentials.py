"""Detection and masking of passwords in addresses, which are shown, recorded and copied."""

from __future__ import annotations

import re
from urllib.parse import unquote, unquote_plus

MASK = "***"

# Texts may be long: the pattern is tried only at the start of a run of these characters.
_SCHEME = r"(?<![a-z0-9+.-])([a-z0-9+.-]+://)"
# The user's name and password, up to the last @ that may end them. A password may contain any
# character, even an unescaped slash; then only a colon distinguishes it from a host and a path.
_USER = re.compile(_SCHEME + r"([^\s/?\#:@]*:\S*|[^\s/?\#]*)@", re.IGNORECASE)
# Text that may be a port and a path with an @ is masked, but does not make an address invalid.
_PASSWORD = re.compile(_SCHEME + r"[^\s/?\#:@]*:(?!\d+(?:[/?\#]|$))\S*@", re.IGNORECASE)
_TOKEN = re.compile(r"https?://[^\s/?\#]+@", re.IGNORECASE)
# The patterns above are applied to words up to their last @: otherwise, each :// in a long word
# would scan to the end of the word and backtrack.
_UP_TO_AT = re.compile(r"(?<!\S)\S*@")
# A value ends before quotes and brackets of the surrounding text.
_PARAMETER = re.compile(
    r"(?<=[?\#&;])([\w.-]{0,80}?(?:pass|pwd|secret|token|key|sig|credential|odbc_connect)"
    r"[\w.-]{0,80}=)([^\s&]*[^\s&'\")\]}>,.]|[^\s&])",
    re.IGNORECASE,
)
# The password in the value of `odbc_connect`, without the braces that may enclose it.
_ODBC_PASSWORD = re.compile(r"(?:^|;)\s*(?:pwd|password)\s*=\s*\{?([^;}\s][^;}]*)", re.IGNORECASE)


def masked(text: str) -> str:
    """Return a text in which no address shows a user, a password or another secret."""
    text = _UP_TO_AT.sub(lambda word: _USER.sub(rf"\g<1>{MASK}@", word[0]), text)
    return _PARAMETER.sub(rf"\g<1>{MASK}", text)


def masked_for(uri: str, text: str) -> str:
    """Return a message about an address, as `masked`, and without its user and password."""
    text = masked(text)
    match = next(filter(None, map(_USER.search, _UP_TO_AT.findall(uri))), None)
    user, _, password = match[2].partition(":") if match else ("", "", "")
    secrets = [password, *(parameter[2] for parameter in _PARAMETER.finditer(uri))]
    # Both as written and percent-decoded.
    spelled = {spell(secret) for secret in secrets for spell in (str, unquote, unquote_plus)}
    inner = {match for secret in spelled for match in _ODBC_PASSWORD.findall(secret)}
    for secret in sorted((spelled | inner) - {"", MASK}, key=len, reverse=True):
        text = text.replace(secret, MASK)
    for quote in ("'", '"') if user else ():
        text = text.replace(f"{quote}{unquote(user)}{quote}", f"{quote}{MASK}{quote}")
    return text


def holds_secret(text: str) -> bool:
    """Whether an address in a text has a password or another secret; a user name is not one."""
    words = _UP_TO_AT.findall(text)
    in_a_word = any(_PASSWORD.search(word) or _TOKEN.search(word) for word in words)
    return in_a_word or _PARAMETER.search(text) is not None
