"""Records of Dask that are not of a worker that was ended on purpose stay as they are."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from dps.cluster.node.quiet import keep_quiet

FAILED = "Compute Failed\nKey:       %s\nState: %s\nTask: %s\nException: %r\nTraceback: %r\n"


@pytest.mark.parametrize(
    ("said", "arguments"),
    [
        (RuntimeError("of Dask's state machine"), ()),
        ("Compute Failed\nKey: in other words", ()),
        ("Compute Failed\nKey: %(key)s", ({"key": "dps-worker-0"},)),
        (FAILED, ("inc-1", "executing", "task", "GroupClosed()", "trace")),
        (FAILED, ("dps-worker-0", "executing", "task", "ValueError()", "trace")),
    ],
)
def test_other_records_stay(
    said: Any, arguments: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    keep_quiet()
    with caplog.at_level(logging.WARNING, "distributed.worker"):
        logging.getLogger("distributed.worker").error(said, *arguments)
    (record,) = caplog.records
    assert (record.levelno, record.msg) == (logging.ERROR, said)
