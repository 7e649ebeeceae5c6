"""Owns the check of what a user asks `ParameterServer` for, before anything is started."""

from __future__ import annotations

from dps.core.consistency import ASP, BSP, SSP
from dps.core.recovery import Checkpoint, Recovery, preset
from dps.errors import ConfigurationError


def checked_recovery(recovery: object) -> Recovery:
    """Return the recovery that is meant, by name or as it is.

    Raises
    ------
    ConfigurationError
        It is neither, or leaves open where checkpoints go.
    """
    chosen = preset(recovery) if isinstance(recovery, str) else recovery
    if not isinstance(chosen, Recovery):
        raise ConfigurationError(
            f"recovery={recovery!r}, expected a preset's name or Recovery(durability=..., ...)"
        )
    if isinstance(chosen.durability, Checkpoint) and chosen.durability.path is None:
        raise ConfigurationError(
            "checkpoints need a path that all server nodes can reach: give "
            "recovery=Recovery(Checkpoint(path=...))"
        )
    return chosen


def check_choices(optimizer: object, consistency: object) -> None:
    """Refuse what is no update rule, or no consistency model; raises `ConfigurationError`."""
    if isinstance(optimizer, type) or not hasattr(optimizer, "step"):
        raise ConfigurationError(
            f"optimizer={optimizer!r}, expected an update rule such as SGD(0.1) or Adam()"
        )
    if not isinstance(consistency, BSP | SSP | ASP):
        raise ConfigurationError(f"consistency={consistency!r}, expected BSP(), SSP(4) or ASP()")
