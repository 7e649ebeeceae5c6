"""Calls to several processes, any of whose answers is enough: some may be unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from dps.errors import NotServing, TransportError

T = TypeVar("T")


async def answers_of(calls: Sequence[Coroutine[Any, Any, T]], grace: float) -> list[T]:
    """Return the answers that come, in the order of the calls.

    After the first answer, the others have `grace` seconds.

    Raises
    ------
    TransportError, NotServing
        No call is answered; this is the error of the first.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    waiting, limit = set(tasks), None
    try:
        while waiting:
            ended, waiting = await asyncio.wait(
                waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended:
                break
            if any(task.exception() is None for task in ended):
                limit = grace
    finally:
        for task in waiting:
            task.cancel()
    over = [task for task in tasks if task not in waiting]
    errors = [error for task in over if (error := task.exception()) is not None]
    for error in errors:
        if len(errors) == len(over) or not isinstance(error, TransportError | NotServing):
            raise error
    return [task.result() for task in over if task.exception() is None]
