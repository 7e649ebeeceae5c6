"""The training that is asked about, and the strategies that are compared for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dps.core.names import role_of
from dps.errors import ConfigurationError
from dps.protocol.timings import Timings
from dps.virtual.profile import Profile

# Of the time in which the servers take in a gradient of each worker: so long a silence is no loss.
LEASES = 4
CONTINUE_LIMIT = 32  # gradients that a worker buffers, unless `outage.limit` says otherwise


@dataclass(frozen=True, slots=True)
class Situation:
    """A training, what it runs on, and how its servers fail.

    Attributes
    ----------
    nbytes
        Of the model's parameters.
    workers, servers
        How many there are; each server has a shard of its own.
    gradient
        Seconds that a worker computes a gradient for.
    mtbf
        Mean time between two failures of one server-side node, in seconds.
    outage
        Seconds from the loss of a node until a fresh one is started in its place.
    training
        How long the training takes without failures and without recovery, in seconds.
    server_price, worker_price
        USD for one hour of one node.
    profile
        What costs time on the nodes.
    """

    nbytes: int
    workers: int
    servers: int
    gradient: float
    mtbf: float
    outage: float
    training: float
    server_price: float
    worker_price: float
    profile: Profile

    @property
    def again(self) -> float:
        """Seconds from the loss of a node until another one is there in its place."""
        return self.outage + self.profile.start

    @property
    def round_seconds(self) -> float:
        """How long a server is busy with one gradient of each worker, at least."""
        costs, shard = self.profile, self.nbytes / self.servers
        takes_in = costs.service.message + shard * (costs.service.byte + costs.service.update)
        return self.workers * max(takes_in, shard / costs.link.bandwidth)

    def check(self) -> None:
        """Refuse a training that dps could not run.

        Raises
        ------
        ConfigurationError
            The servers could not answer within the deadline of a call.
        """
        most = Timings().call / 2  # as much goes out as comes in
        if self.round_seconds > most:
            raise ConfigurationError(
                f"a server takes {self.round_seconds:.3g} s to take in a gradient of each of the "
                f"{self.workers} workers, and calls have a deadline of {Timings().call:g} s; "
                f"expected {most:g} s at most: more --servers, fewer --workers or a smaller --model"
            )

    @property
    def lease(self) -> float:
        """The seconds of silence after which a node is given up: long enough for busy servers."""
        return max(Timings().lease, LEASES * self.round_seconds)


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to recover, as a configuration says it.

    Attributes
    ----------
    label
        What it is called.
    recovery
        The section `recovery` of a configuration, without an interval of checkpoints.
    spares
        Nodes that are kept warm.
    buffers
        Whether workers compute on while a shard is down, so that an outage may cost nothing.
    restarts
        Whether the loss of a server leaves nothing of its shard.
    twins
        Of which two roles the loss within one outage leaves nothing of a shard, or no more than
        the newest checkpoint.
    above
        The label of the strategy that it has checkpoints below of; "": it is none with a layer.
    """

    label: str
    recovery: Mapping[str, Any] = field(hash=False)
    spares: int = 0
    buffers: bool = False
    restarts: bool = False
    twins: tuple[str, str] | None = None
    above: str = ""

    @property
    def layered(self) -> bool:
        """Whether it has checkpoints below a chain or a store."""
        return bool(self.above)

    @property
    def checkpoints(self) -> bool:
        """Whether it writes checkpoints."""
        return self.layered or self.recovery.get("preset") == "checkpoint"

    def section(self, every: int) -> dict[str, Any]:
        """The section `recovery`, with an interval of so many updates if it writes checkpoints."""
        if not self.checkpoints:
            return dict(self.recovery)
        written = {"every": every}
        return {**self.recovery, "durability": {"below": written} if self.layered else written}


STRATEGIES = (
    Strategy("none", {"preset": "none"}, restarts=True),
    Strategy("checkpoint", {"preset": "checkpoint"}),
    Strategy("checkpoint + spare", {"preset": "checkpoint"}, spares=1),
    Strategy("chain(2)", {"preset": "chain"}, twins=("server", "replica")),
    Strategy(
        "chain(2) + continue",
        {"preset": "chain", "outage": {"kind": "continue", "buffer": "worker"}},
        twins=("server", "replica"),
    ),
    Strategy(
        "chain(2) + checkpoint", {"preset": "chain"}, twins=("server", "replica"), above="chain(2)"
    ),
    Strategy("stateless", {"preset": "stateless"}, buffers=True, twins=("server", "store")),
    Strategy(
        "stateless + checkpoint",
        {"preset": "stateless"},
        buffers=True,
        twins=("server", "store"),
        above="stateless",
    ),
    Strategy("worker_cache", {"durability": {"kind": "worker_cache"}}),
)


@dataclass(frozen=True)
class Layout:
    """The server-side nodes of one strategy, by role."""

    names: tuple[str, ...]

    @cached_property
    def nodes(self) -> dict[str, int]:
        """How many nodes there are of each role that is none of the workers'."""
        roles = (role_of(name) for name in self.names)
        return dict(Counter(role for role in roles if role not in ("worker", "evaluator")))

    def of(self, role: str) -> list[str]:
        """The names of the nodes of a role."""
        return [name for name in self.names if role_of(name) == role]
