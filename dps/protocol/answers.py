"""Calls to several processes of which each knows enough: some of them may be out of reach."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from dps.errors import NotServing, TransportError

T = TypeVar("T")


async def answers_of(calls: Sequence[Coroutine[Any, Any, T]], grace: float) -> list[T]:
    """Return the answers that come, in the order of the calls.

    As soon as there is one, the others have `grace` seconds more.

    Raises
    ------
    TransportError, NotServing
        None of them is answered: the error of the first.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    waiting, found = set(tasks), False
    try:
        while waiting:
            limit = grace if found else None
            ended, waiting = await asyncio.wait(
                waiting, timeout=limit, return_when=asyncio.FIRST_COMPLETED
            )
            if not ended:
                break
            found = found or any(task.exception() is None for task in ended)
    finally:
        for task in waiting:
            task.cancel()
    errors: list[BaseException] = []
    answers = []
    for task in tasks:
        if task not in waiting:
            error = task.exception()
            if error is None:
                answers.append(task.result())
            elif not isinstance(error, TransportError | NotServing):
                raise error
            else:
                errors.append(error)
    if errors and not answers:
        raise errors[0]
    return answers
