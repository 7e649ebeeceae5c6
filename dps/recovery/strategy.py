"""A recovery strategy, one choice on each of three axes, and the strategies that have a name."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dps.core.arguments import nearest
from dps.core.ranges import refused, whole
from dps.core.replay import Continue, Outage, Replay, Wait
from dps.errors import ConfigurationError
from dps.protocol.wire import message
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.durability import Durability, Feature, NoDurability
from dps.recovery.shared_store import SharedStore

_AXES = (
    ("durability", Durability, "Chain(2), Checkpoint(path=…) or another durability"),
    ("outage", Outage, "Wait() or Continue()"),
    ("replay", Replay, "Replay(policy)"),
)


@message
@dataclass(frozen=True, slots=True)
class Recovery:
    """Where state survives, what workers do during an outage, and how its gradients are replayed.

    >>> Recovery(Checkpoint(every=50), Continue(buffer="mailbox"), Replay("mean")).uses_mailbox
    True
    """

    durability: Durability = NoDurability()
    outage: Outage = Wait()
    replay: Replay = Replay()

    def __post_init__(self) -> None:
        for name, kind, some in _AXES:
            if not isinstance(value := getattr(self, name), kind):
                raise refused(f"Recovery: {name}", value, some)
        if isinstance(self.outage, Continue):
            self.must_allow("buffered gradients")

    @property
    def uses_mailbox(self) -> bool:
        """Whether workers deposit gradients in a mailbox while a shard is down."""
        return isinstance(self.outage, Continue) and self.outage.buffer == "mailbox"

    @property
    def stores(self) -> int:
        """How many nodes keep each state and each buffered gradient."""
        return max(self.durability.above.stores, int(self.uses_mailbox))

    @property
    def path(self) -> str | None:
        """The folder of the checkpoints; None if it is not chosen yet, or none are written."""
        return self.durability.below.path

    def must_allow(self, feature: Feature) -> None:
        """Raise `ConfigurationError` if the durability does not support a feature."""
        if refusal := self.durability.refusal(feature):
            raise ConfigurationError(refusal)

    def at(self, path: str) -> Recovery:
        """Return the same recovery with its checkpoints, if it has any, below another path."""
        return replace(self, durability=self.durability.at(path))


PRESETS: dict[str, Recovery] = {
    "none": Recovery(),
    "checkpoint": Recovery(durability=Checkpoint()),
    "chain": Recovery(durability=Chain()),
    "stateless": Recovery(durability=SharedStore(), outage=Continue()),
}


def preset(name: str) -> Recovery:
    """Return a strategy by its name; the `ConfigurationError` for others has the nearest name."""
    try:
        return PRESETS[name]
    except KeyError:
        near = nearest(name, list(PRESETS))
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigurationError(
            f"unknown recovery strategy {name!r}; {hint}known are: {', '.join(PRESETS)}"
        ) from None


def with_checkpoint_path(recovery: Recovery, path: str) -> Recovery:
    """Return the same recovery with the checkpoint path filled in where none was given."""
    missing = recovery.durability.writes_checkpoints and recovery.path is None
    return recovery.at(path) if missing else recovery


def as_servers(servers: object, shards: int, recovery: Recovery) -> int:
    """Return `servers` as an int, if the shards can be spread over that many servers.

    Raises `ConfigurationError` if it is not a whole number, is less than the replicas of one shard
    or more than those of all shards, or if shards cannot move.
    """
    recovery.must_allow("moves")
    number = whole(servers)
    if number is None:
        raise refused("servers", servers, "a whole number")
    replicas = recovery.durability.above.replicas
    if not replicas <= number <= shards * replicas:
        each = "one replica" if replicas == 1 else f"{replicas} replicas"
        raise ConfigurationError(
            f"servers={number}, expected {replicas} to {shards * replicas} for {shards} shards "
            f"with {each} each; choose a number in this range, or start with more shards"
        )
    return number
