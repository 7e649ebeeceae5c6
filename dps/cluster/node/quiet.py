"""One line instead of a flood: of failures that are repeated, and of workers that were ended.

Dask's worker logs every task that raises, with its traceback. That is right for a training function
that failed, and a flood where all workers were stopped, or their parameter server was closed.
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
    """Whether a failure that has been repeated is worth a line: the 1st, 10th, 100th time, ..."""
    return str(times).strip("0") == "1"


def keep_quiet() -> None:
    """Have this process log no traceback of workers that are ended on purpose."""
    _dask_log.addFilter(_one_line)
    logging.getLogger("asyncio").addFilter(_retrieved)


def _retrieved(record: logging.LogRecord) -> bool:
    """Drop what a `Client.gather` leaves that was interrupted: nothing retrieves its tasks."""
    return not (record.exc_info and isinstance(record.exc_info[1], AllExit))


def _one_line(record: logging.LogRecord) -> bool:
    """Make one line of Dask's record of a failed task, whose arguments are named in its format."""
    about = record.args if str(record.msg).startswith("Compute Failed\nKey:") else None
    if not isinstance(about, tuple) or len(about) != 5:
        return True
    key, _, _, exception, _ = about
    if not (str(key).startswith(PREFIX) and str(exception).startswith(_ON_PURPOSE)):
        return True
    record.levelno, record.levelname = logging.INFO, "INFO"
    record.msg, record.args = "dps: %s ended: %s", (key, exception)
    return _dask_log.isEnabledFor(logging.INFO)
