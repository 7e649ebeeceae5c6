"""Passwords in addresses: none is shown, and none is taken for one that is not."""

from __future__ import annotations

from time import process_time

import pytest

from dps.core.credentials import holds_secret, masked, masked_for

WITH = {
    "http://ann:pa55word@host:5000/x": "http://***@host:5000/x",
    "http://:pa55word@host": "http://***@host",
    "http://ann:pa55@word@host/x": "http://***@host/x",
    "http://ann:pa55/word@host/x": "http://***@host/x",
    "postgresql+psycopg2://ann:pa55word@db/mlflow": "postgresql+psycopg2://***@db/mlflow",
    "ftp://ann:pa55word@host/a, then s3://b/c": "ftp://***@host/a, then s3://b/c",
    "HTTP://Ann:PA55word@HOST": "HTTP://***@HOST",
    "mysql://db/x?user=ann&password=pa55word&a=b": "mysql://db/x?user=ann&password=***&a=b",
    "https://host/a?sig=pa55word": "https://host/a?sig=***",
    "postgresql://ann:pa'55word@h/db": "postgresql://***@h/db",
    "mssql+pyodbc:///?odbc_connect=UID%3Dann%3BPWD%3Dpa55word": "mssql+pyodbc:///?odbc_connect=***",
    "Driver=x;UID=ann;PWD=pa55word;Encrypt=yes": "Driver=x;UID=ann;PWD=***",
    "http://h/x#access_token=pa55word": "http://h/x#access_token=***",
    "mysql://db/x?password=pa'55word": "mysql://db/x?password=***",
    "('mysql://db/x?password=pa55word')": "('mysql://db/x?password=***')",
    "'http://ann:pa55word@h' or \"ftp://ann:pa55word@h\"": "'http://***@h' or \"ftp://***@h\"",
}
WITHOUT = [
    "sqlite:////home/me@corp/mlruns/mlflow.db",
    "file:///home/me@corp/a",
    "http://127.0.0.1:5000/#/experiments?workflowType=machine_learning",
    "s3://bucket/path@v2",
    "https://host/a?b=c",
    "me@example.org: hello",
]


@pytest.mark.parametrize(("text", "shown"), WITH.items())
def test_secrets_are_found_and_masked(text: str, shown: str) -> None:
    assert holds_secret(text)
    assert masked(text) == shown
    assert masked(shown) == shown


@pytest.mark.parametrize("text", WITHOUT)
def test_what_is_no_secret_stays(text: str) -> None:
    assert not holds_secret(text)
    assert masked(text) == text


def test_what_may_be_a_port_or_a_password_may_be_written_down_and_is_not_shown() -> None:
    for text in ("http://host:5000/a@b", "hdfs://host:8020/user/a@b"):
        assert not holds_secret(text)
        assert masked(text).endswith("://***@b")


@pytest.mark.parametrize(
    ("uri", "password"),
    [
        ("postgresql://ann:12/pa55word@h/db", "12/pa55word"),
        ("postgresql://ann:12%2Fpa55word@h/db", "12/pa55word"),
        ("mysql://h/db?user=ann&password=12/pa'55word", "12/pa'55word"),
        (
            "mssql+pyodbc:///?odbc_connect=UID%3Dann%3BPWD%3D{pa55+word}%3BEncrypt%3Dyes",
            "pa55 word",
        ),
    ],
)
def test_what_is_said_of_an_address_shows_no_password(uri: str, password: str) -> None:
    shown = masked_for(uri, f"({password}) is wrong, says {uri}")
    assert shown.startswith("(***) is wrong")
    assert "word" not in shown.replace("password=", "")


def test_what_a_driver_of_odbc_says_shows_no_password() -> None:
    uri = "mssql+pyodbc:///?odbc_connect=UID%3Dann%3BPWD%3Dpa55word"
    said = "password pa55word refused; DSN PWD=pa55word"
    assert masked_for(uri, said) == "password *** refused; DSN PWD=***"


def test_a_long_text_is_masked_at_once() -> None:
    long = "a" * 1_000_000
    assert masked(f"{long} http://ann:pa55word@h") == f"{long} http://***@h"


@pytest.mark.parametrize(
    "word",
    [
        "a://b:" * 20_000,
        "?key=" + "'" * 20_000 + "x",
        "?" + "key" * 20_000,
        ",".join(["http://host:5000/x"] * 20_000),
    ],
    ids=["addresses without @", "quotes", "a name", "addresses"],
)
def test_the_time_of_a_long_word_grows_with_its_length(word: str) -> None:
    began = process_time()
    masked(word)
    masked_for(word, word)
    holds_secret(word)
    assert process_time() - began < 1.0
