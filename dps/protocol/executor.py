"""Where numerics are run: at once if they are short, else in a thread beside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# Work on fewer bytes than this is quicker than handing it to a thread.
INLINE_BYTES = 1 << 20


async def offload(work: Callable[[], T], nbytes: int) -> T:
    """Return what `work` returns, which reads and writes about so many bytes, if any."""
    if not nbytes or nbytes < INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)
