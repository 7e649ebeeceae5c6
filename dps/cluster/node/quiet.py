"""Fewer log lines: for repeated failures, and for workers that were ended on purpose.

Dask's worker logs the traceback of every task that raises. That is useful for a training function
that failed, but too much when all workers were stopped, or their parameter server was closed.
"""

from __future__ import annotations

import logging

from distributed.client import AllExit

from dps.cluster.node.cleanup import PREFIX
from dps.errors import GroupClosed, ResultLost, TrainingStopped, UpdatesLost

_ERRORS = (GroupClosed, ResultLost, TrainingStopped, UpdatesLost)
_ON_PURPOSE = tuple(f"{error.__name__}(" for error in _ERRORS)

_dask_log = logging.getLogger("distributed.worker")


def is_told(times: int) -> bool:
    """Whether to log a repeated failure: the 1st, 10th, 100th time, ..."""
    return str(times).strip("0") == "1"


def keep_quiet() -> None:
    """Keep this process from logging tracebacks of workers that are ended on purpose."""
    _dask_log.addFilter(_one_line)
    logging.getLogger("asyncio").addFilter(_retrieved)


def _retrieved(record: logging.LogRecord) -> bool:
    """Drop the records of an interrupted `Client.gather`, whose tasks nothing retrieves."""
    return not (record.exc_info and isinstance(record.exc_info[1], AllExit))


def _one_line(record: logging.LogRecord) -> bool:
    """Shorten Dask's record of a worker's task to one line if the task was ended on purpose."""
    about = record.args if str(record.msg).startswith("Compute Failed\nKey:") else None
    if not isinstance(about, tuple) or len(about) != 5:
        return True
    key, _, _, exception, _ = about
    if not (str(key).startswith(PREFIX) and str(exception).startswith(_ON_PURPOSE)):
        return True
    record.levelno, record.levelname = logging.INFO, "INFO"
    record.msg, record.args = "dps: %s ended: %s", (key, exception)
    return _dask_log.isEnabledFor(logging.INFO)
