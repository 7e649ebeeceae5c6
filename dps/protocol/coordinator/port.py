"""What a shard's controller needs of the coordinator, said as an interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dps.core.placement.rebalancing import Move
from dps.protocol.coordinator.liveness import Membership
from dps.protocol.coordinator.snapshots import Snapshots
from dps.protocol.durability import CoordinatorPart
from dps.protocol.messages import Brought, HostInfo, Seed, View
from dps.protocol.tasks import Tasks
from dps.protocol.transport import Endpoint


class CoordinatorPort(Protocol):
    """What a shard's controller needs to know, and to have done: the coordinator."""

    @property
    def tasks(self) -> Tasks:
        """The coordinator's background tasks."""
        ...

    @property
    def members(self) -> Membership:
        """The hosts that the coordinator knows, and their leases."""
        ...

    @property
    def stores(self) -> tuple[Endpoint, ...]:
        """Who keeps states."""
        ...

    @property
    def mailboxes(self) -> tuple[Endpoint, ...]:
        """Who keeps what workers push to shards that are down."""
        ...

    @property
    def seeds(self) -> dict[int, Seed]:
        """The shards that are to be given their initial values; published with the table."""
        ...

    @property
    def cuts(self) -> Snapshots | None:
        """Consistent cuts, if all shards go back together."""
        ...

    def refuse_cut(self, shard: int, cut: int) -> None:
        """Have all shards go back to the cut before this one, which is damaged."""
        ...

    @property
    def part(self) -> CoordinatorPart | None:
        """The coordinator's part of the durability, if it has one."""
        ...

    def restored(self, view: View, brought: Brought, *, certain: bool) -> None:
        """Take note of what a shard that had been served goes on with (see `Restoration`)."""
        ...

    def load(self, host: Endpoint) -> int:
        """How many replicas a host has, or is about to have."""
        ...

    def may_hold(self, info: HostInfo, shard: int) -> bool:
        """Whether a host may have a replica of a shard."""
        ...

    def is_reserve(self, host: Endpoint) -> bool:
        """Whether a host is more than the wanted number of servers."""
        ...

    def preferred(self, shard: int) -> Sequence[Endpoint]:
        """The hosts that are to hold a shard, the first before others; none: all are alike."""
        ...

    def moved(self, view: View, move: Move[Endpoint], seconds: float, pause: float) -> None:
        """Record that a replica has moved, which took so long, and its shard's pause in it."""
        ...

    async def came_to_rest(self) -> None:
        """Take note that a shard has nothing left to do: perhaps something is to be moved."""
        ...

    def decided(self, view: View, head: Endpoint, how: str) -> None:
        """Record how the shard is to go on."""
        ...

    async def publish(self) -> None:
        """Let everybody know of a change."""
        ...

    async def admit_present(self, view: View, host: Endpoint) -> None:
        """Have a restored shard wait for workers that its state does not know."""
        ...

    async def evict_absent(self, shard: int) -> None:
        """Take workers that are gone out of the shard's clock table."""
        ...
