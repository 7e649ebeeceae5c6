"""The recovery strategies that have a name of their own."""

from __future__ import annotations

from dps.core.arguments import nearest
from dps.core.outage import Continue
from dps.errors import ConfigurationError
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery

PRESETS: dict[str, Recovery] = {
    "none": Recovery(),
    "checkpoint": Recovery(durability=Checkpoint()),
    "chain": Recovery(durability=Chain()),
    "stateless": Recovery(durability=SharedStore(), outage=Continue()),
}


def preset(name: str) -> Recovery:
    """Return the strategy of that name; raises `ConfigurationError` with the nearest name."""
    try:
        return PRESETS[name]
    except KeyError:
        near = nearest(name, list(PRESETS))
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigurationError(
            f"unknown recovery strategy {name!r}; {hint}known are: {', '.join(PRESETS)}"
        ) from None
