"""Owns what it takes to repeat an experiment: configuration and versions, out of its records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flows.axes import Combinations
from flows.record import Record


def experiment_yaml(records: Sequence[Record]) -> str:
    """Return one YAML document that `dps run` expands to the same trials.

    It is put together from the trials' resolved settings: what the first trial has is the base,
    and the axes hold what each label stands for.
    """
    import yaml

    settings = [record.started.settings for record in records if record.started]
    if not settings:
        return ""
    base = {key: value for key, value in settings[0]["config"].items() if key != "seed"}
    axes: dict[str, dict[str, Any]] = {}
    for trial in settings:
        for axis, label in trial["labels"].items():
            axes.setdefault(axis, {})[label] = _short(axis, _at(trial["config"], axis))
    lot = settings[0].get("circumstances", {}).get("order_seed", 0)
    document = {
        **base,
        "recovery": _short("recovery", base["recovery"]),
        "axes": axes,
        **_limits(axes, [trial["labels"] for trial in settings]),
        **({"order_seed": lot} if lot else {}),
        "seeds": sorted({trial["seed"] for trial in settings}),
    }
    # By way of JSON, for YAML would write what occurs twice as a reference.
    plain = json.loads(json.dumps(document))
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=88))


def _limits(axes: Mapping[str, Any], present: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return what keeps a grid to the combinations that are present; nothing if all are.

    Axes whose labels are in step with each other vary together; of what is left, combinations that
    are missing are left out.
    """
    groups: list[list[str]] = []
    for axis in axes:
        partner = next((g for g in groups if _in_step(g[0], axis, axes, present)), None)
        if partner is None:
            groups.append([axis])
        else:
            partner.append(axis)
            mate = {labels[partner[0]]: labels[axis] for labels in present}
            for label in axes[partner[0]]:  # in the order of the first
                axes[axis][mate[label]] = axes[axis].pop(mate[label])
    together = [group for group in groups if len(group) > 1]
    every = Combinations({axis: list(values) for axis, values in axes.items()}, together)
    missing = [labels for labels in every if labels not in present]
    limits = {"zip": together, "exclude": missing}
    return {key: entries for key, entries in limits.items() if entries}


def _in_step(
    first: str, second: str, axes: Mapping[str, Any], present: Sequence[Mapping[str, str]]
) -> bool:
    pairs = {(labels[first], labels[second]) for labels in present}
    return len(pairs) == len(axes[first]) == len(axes[second]) > 1


def versions(records: Sequence[Record]) -> dict[str, str]:
    """Return the software that the trials ran on; several versions of one are listed together."""
    found: dict[str, dict[str, None]] = {}
    for record in records:
        for name, version in (record.started.versions if record.started else {}).items():
            found.setdefault(name, {})[version] = None
    return {name: ", ".join(seen) for name, seen in found.items()}


def _at(config: Any, dotted: str) -> Any:
    """Return the value of a key; of one that was left out of the record, its default."""
    found = config
    for part in dotted.split("."):
        if isinstance(found, Mapping) and part not in found:
            return _default(config, dotted)
        found = found[int(part)] if isinstance(found, Sequence) else found[part]
    return found


def _default(config: Any, dotted: str) -> Any:
    from flows.config import TrialConfig

    found: Any = TrialConfig.model_validate(config)
    for part in dotted.split("."):
        found = found[int(part)] if isinstance(found, Sequence) else getattr(found, part)
    return found


def _short(key: str, value: Any) -> Any:
    """Return a preset's name for a recovery that is nothing but the preset."""
    from flows.sections import RecoverySection

    if key != "recovery" or not isinstance(value, Mapping) or value.get("name") == "custom":
        return value
    whole = RecoverySection.model_validate(value["name"]).model_dump(mode="json")
    return value["name"] if whole == value else value
