"""A durability of another maker, made of one of dps."""

from __future__ import annotations

from dataclasses import dataclass

from dps import Chain


@dataclass(frozen=True)
class Standby(Chain):
    """A chain that stands two losses, unless it is told to stand more or fewer."""

    replicas: int = 3
