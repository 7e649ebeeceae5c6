"""The consistency models as data: how far workers may run ahead of one another.

The gates are enforced at the shard (`dps.protocol.server.replica`) on the workers' clocks, which
are part of the shard's state (`dps.core.shard`). A worker's clock is the number of its last applied
update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dps.core import ranges
from dps.core.shard import Progress
from dps.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class BSP:
    """Bulk synchronous (bounded delay 0): updates of one round are applied together.

    A shard holds each worker's update until every active worker has sent one, then applies them
    in the order of the workers' names. Results do not depend on timing.
    """


@dataclass(frozen=True, slots=True)
class SSP:
    """Stale synchronous with bound `tau`, the paper's "maximal delayed time" (OSDI 2014, 3.4).

    A worker whose clock is more than `tau` ahead of the slowest active worker's waits before it
    reads weights for its next gradient.
    """

    tau: int

    def __post_init__(self) -> None:
        ranges.count(self, "tau", 0, "updates")


@dataclass(frozen=True, slots=True)
class ASP:
    """Asynchronous: no worker ever waits for another (unbounded delay)."""


Consistency = BSP | SSP | ASP


def check_ahead(consistency: Consistency, ahead: int) -> None:
    """Refuse to compute on weights that lack more of a worker's own updates than is allowed.

    Parameters
    ----------
    ahead
        How many of its last updates they may lack.

    Raises
    ------
    ConfigurationError
        It is negative, no whole number, or the consistency model has a worker read again before.
    """
    ranges.whole_argument("ahead", ahead, 0, "updates")
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
    """How many more gradients than one a worker may compute before it reads weights again.

    Parameters
    ----------
    workers
        How far each worker is in these weights; those that are not active hold nobody up.

    Returns
    -------
    slack
        Negative: the worker is too far ahead to read at all. None: there is no bound for it.
    """
    known = workers.get(worker)
    if isinstance(consistency, ASP) or known is None or not known.active:
        return None
    tau = consistency.tau if isinstance(consistency, SSP) else 0
    return tau - (known.clock - min(each.clock for each in workers.values() if each.active))
