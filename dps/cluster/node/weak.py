"""Handlers that Dask may keep for ever without keeping what they belong to.

Dask's scheduler and client never let go of a handler that they were given once, not even when it is
taken back. A bound method would keep its group, with all its arrays, for as long as the cluster is.
"""

from __future__ import annotations

import weakref
from collections.abc import Awaitable, Callable
from typing import Any


def weakly(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a handler that calls a bound method while its object lives, and then does nothing."""
    known = weakref.WeakMethod(method)

    async def handle(*args: Any, **kwargs: Any) -> Any:
        found = known()
        return None if found is None else await found(*args, **kwargs)

    return handle
