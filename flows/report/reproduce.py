"""What it takes to repeat an experiment: configuration and versions, out of its records."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from flows.config.axes import Combinations
from flows.config.base import ComparisonSection
from flows.config.claims import ClaimSection
from flows.config.yaml_document import EVERY_ENTRY
from flows.records.record import Record


def experiment_yaml(
    records: Sequence[Record],
    claims: Sequence[ClaimSection] = (),
    comparison: ComparisonSection | None = None,
) -> str:
    """Return one YAML document that `dps run` expands to the same trials.

    It is put together from the trials' resolved settings: what the first trial has is the base,
    and the axes hold what each label stands for; no record holds the `claims` and the
    `comparison`. Where that cannot be done, as of a configuration of another version of dps whose
    keys are not known here, the document says so.
    """
    import yaml

    settings = [record.started.settings for record in records if record.started]
    if not settings:
        return ""
    try:
        document = _document(settings)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return f"# These trials cannot be put together to one experiment ({why}).\n"
    compared = comparison.model_dump(mode="json", exclude_defaults=True) if comparison else {}
    if compared:
        document["comparison"] = compared
    if claims:
        document["claims"] = [
            claim.model_dump(mode="json", exclude_defaults=True) for claim in claims
        ]
    # By way of JSON, for YAML would write what occurs twice as a reference.
    plain = json.loads(json.dumps(document))
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=88))


def _document(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    base = {key: value for key, value in settings[0]["config"].items() if key != "seed"}
    axes: dict[str, dict[str, Any]] = {}
    for trial in settings:
        for axis, label in trial["labels"].items():
            values = axes.setdefault(axis, {})
            try:
                values[label] = _short(axis, value_at(trial["config"], axis))
            except NoEntry:  # the value has no effect here; another trial may tell it
                values.setdefault(label, None)
    lot = settings[0].get("circumstances", {}).get("order_seed", 0)
    return {
        **base,
        "recovery": _short("recovery", base["recovery"]),
        "axes": axes,
        **_limits(axes, [trial["labels"] for trial in settings]),
        **({"order_seed": lot} if lot else {}),
        "seeds": sorted({trial["seed"] for trial in settings}),
    }


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


class NoEntry(LookupError):
    """A key is of every entry of a list that has none."""


def value_at(config: Mapping[str, Any], dotted: str) -> Any:
    """Return a trial's setting by its dotted key.

    What is set in every entry of a list (`*`) is what the first entry has.

    Raises
    ------
    NoEntry
        There is no entry to have it.
    LookupError
        There is no such setting.
    """
    return _inside(config, dotted.split("."))


def _inside(value: Any, parts: Sequence[str]) -> Any:
    if not parts:
        return value
    part, rest = parts[0], parts[1:]
    if isinstance(value, Mapping):
        return _inside(value[part], rest)
    if part != EVERY_ENTRY:
        return _inside(value[int(part)], rest)
    for entry in value:
        try:
            return _inside(entry, rest)
        except NoEntry:
            continue
    raise NoEntry(part)


def _short(key: str, value: Any) -> Any:
    """Return a preset's name for a recovery that is nothing but the preset."""
    from flows.config.base import RecoverySection

    if key != "recovery" or not isinstance(value, Mapping) or value.get("name") == "custom":
        return value
    whole = RecoverySection.model_validate(value["name"]).model_dump(mode="json")
    return value["name"] if whole == value else value
