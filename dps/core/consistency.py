"""The consistency models: how far workers may run ahead of one another, by their clocks.

A worker's clock is the number of its last applied update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from dps.core.ranges import Checked, integer_argument, whole_from
from dps.core.shard import Progress
from dps.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class BSP:
    """Bulk synchronous (bounded delay 0): updates of one round are applied together.

    A shard holds each worker's update until every active worker has sent one, then applies them
    in the order of the workers' names. Results do not depend on timing.

    >>> BSP()
    BSP()
    """


@dataclass(frozen=True, slots=True)
class SSP(Checked):
    """Stale synchronous with bound `tau`, the paper's "maximal delayed time" (OSDI 2014, 3.5).

    A worker whose clock is more than `tau` ahead of the slowest active worker's waits before it
    reads weights for its next gradient.

    Parameters
    ----------
    tau
        Maximum number of updates by which a worker is ahead.

    Examples
    --------
    >>> SSP(tau=4)
    SSP(tau=4)
    """

    tau: Annotated[int, whole_from(0, "updates")]


@dataclass(frozen=True, slots=True)
class ASP:
    """Asynchronous: no worker ever waits for another (unbounded delay).

    >>> ASP()
    ASP()
    """


Consistency = BSP | SSP | ASP


def check_ahead(consistency: Consistency, ahead: int) -> None:
    """Refuse a number of own updates that a worker's weights must not lack."""
    integer_argument("ahead", ahead, 0, "updates")
    if isinstance(consistency, ASP):
        return
    bound = consistency.tau if isinstance(consistency, SSP) else 0
    if ahead > bound:
        raise ConfigurationError(
            f"ahead={ahead}, but under {consistency} a worker may compute {bound} more gradients "
            f"than one before it reads weights again; expected ahead={bound} at most, or "
            f"SSP(tau={ahead}), or ASP()"
        )


def slack(consistency: Consistency, workers: Mapping[str, Progress], worker: str) -> int | None:
    """Return how many gradients after the next one a worker may compute before it reads weights."""
    # Negative: it is too far ahead to read. None: there is no bound.
    known = workers.get(worker)
    if isinstance(consistency, ASP) or known is None or not known.active:
        return None
    tau = consistency.tau if isinstance(consistency, SSP) else 0
    return tau - (known.clock - min(each.clock for each in workers.values() if each.active))
