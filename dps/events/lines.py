"""Events as lines of Python's logging, `key=value`, in loggers such as `dps.shard`.

What comes with every update, or several times a second, makes no line. Nothing is shown unless
somebody asks for it: the level of a logger is WARNING until then, and `dps` has no handler.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dps.events.base import Event

ROOT = "dps"

logging.getLogger(ROOT).addHandler(logging.NullHandler())  # or Python would show warnings itself

# By the names of their classes, for those are what this is about.
_NO_LINE = frozenset({"Applied", "Acked", "Reported", "Filtered", "ResourceSampled"})
_OFTEN = frozenset(
    {"CheckpointWritten", "CutTaken", "Evaluated", "EvaluationMissed", "IntervalChosen"}
)
_BAD = frozenset(
    {
        *("CheckpointFailed", "CheckpointRefused", "Detected", "Failover", "FaultMissed"),
        *("LossReported", "Returned", "RolledBack", "TaskFailed"),
    }
)
_SUBJECTS = ("shard", "worker", "node", "target")
_PLAIN = re.compile(r"[^\s\"=]+")


def log(event: Event, labels: Mapping[str, str]) -> None:
    """Write an event to the log of this process, where that is wanted.

    Parameters
    ----------
    labels
        What else the line says, such as the group.
    """
    level = level_of(event)
    if level and logging.getLogger(_logger_of(event)).isEnabledFor(level):
        record = line_of(event, labels)
        logging.getLogger(record.name).handle(record)


def line_of(event: Event, labels: Mapping[str, str]) -> logging.LogRecord:
    """Return an event as a record of Python's logging, as of the moment when it happened.

    The message is the whole line. All of it is in the record's `fields` as well, and `trial`,
    `shard` and `epoch` are attributes of their own, for formatters that want them.
    """
    values = asdict(event).items()
    said = {key: value for key, value in values if not isinstance(value, dict | list | tuple)}
    del said["t"]
    fields: dict[str, Any] = {"event": type(event).__name__, **labels, **said}
    level = level_of(event)
    attributes: dict[str, Any] = {
        "name": _logger_of(event),
        "levelno": level,
        "levelname": logging.getLevelName(level),
        "msg": " ".join(f"{key}={_text(value)}" for key, value in fields.items()),
        "created": event.t,
        "msecs": event.t % 1 * 1000,
        "fields": fields,
    }
    attributes |= {name: fields[name] for name in ("trial", "shard", "epoch") if name in fields}
    return logging.makeLogRecord(attributes)


def level_of(event: Event) -> int:
    """The level of an event's line; `logging.NOTSET` if it has none."""
    kind = type(event).__name__
    if kind in _NO_LINE:
        return logging.NOTSET
    if kind in _OFTEN:
        return logging.DEBUG
    in_order = ("finished", "stopped")
    lost = kind == "WorkerLeft" and getattr(event, "reason", "") not in in_order
    wrong = kind == "TrialEnded" and getattr(event, "status", "") != "valid"
    return logging.WARNING if kind in _BAD or lost or wrong else logging.INFO


def _logger_of(event: Event) -> str:
    found = (name for name in _SUBJECTS if hasattr(event, name))
    subject = next(found, "group")
    return f"{ROOT}.{'node' if subject == 'target' else subject}"


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
