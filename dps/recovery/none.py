"""No durability: the state is lost with the server.

- Written: nothing.
- Restored: from the initial values.
- Promised: nothing, but dps waits for a silent server, which may have the only copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dps.protocol.wire import message
from dps.recovery.durability import Durability


@message
@dataclass(frozen=True, slots=True)
class NoDurability(Durability):
    """Shard state survives nothing; a lost shard restarts from its initial values."""

    kind: ClassVar[str] = "none"

    def is_last_copy(self, alone: bool, tried: bool, restorable: bool) -> bool:
        """Return True for the only replica: a server that is merely silent still has the state."""
        return alone
