"""What each strategy of a report is, in a line: what is kept of a shard, and what workers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flows.records.record import Record
from flows.report.reproduce import value_at

LONGEST = 160


def strategy_notes(records: Sequence[Record], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return each strategy with a line on what it is, from the settings of its first trial."""
    found: dict[str, str] = {}
    for record in records:
        labels = record.started.settings.get("labels", {}) if record.started else {}
        axis = "recovery" if "recovery" in labels or not labels else next(iter(labels))
        name = labels.get(axis)
        if name is not None and name not in found:
            found[name] = _told(axis, record.config)
    return [(name, found[name]) for name in names if found.get(name)]


def _told(axis: str, config: Mapping[str, Any]) -> str:
    if axis == "recovery":
        recovery = config.get("recovery")
        return _recovery(recovery) if isinstance(recovery, Mapping) else ""
    try:
        text = _plain(value_at(config, axis))
    except (LookupError, TypeError, ValueError, AttributeError):
        return ""  # of another version of dps, whose keys are not known here
    text = f"{axis}: {text}"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _plain(value: Any) -> str:
    """Return a setting in a line, without the marks of JSON: a kind before what belongs to it."""
    if isinstance(value, Mapping):
        rest = [f"{k}: {_plain(v)}" for k, v in value.items() if k != "kind" and v is not None]
        if "kind" not in value:
            return "; ".join(rest) or "nothing"
        return f"{value['kind']} ({', '.join(rest)})" if rest else str(value["kind"])
    if isinstance(value, list | tuple):
        return ", ".join(map(_plain, value)) or "nothing"
    return str(value)


def _recovery(recovery: Mapping[str, Any]) -> str:
    durability, outage = recovery.get("durability") or {}, recovery.get("outage") or {}
    kind = str(durability.get("kind", "none"))
    told = _DURABILITIES[kind](durability) if kind in _DURABILITIES else f"Durability “{kind}”."
    if outage.get("kind") == "continue":
        told += (
            " Meanwhile workers go on: of each, up to "
            f"{outage.get('limit', '?')} updates per shard are kept and applied afterwards."
        )
    return told


def _every(durability: Mapping[str, Any]) -> str:
    every, seconds = durability.get("every"), durability.get("seconds")
    if every == "auto":
        return "at an interval that follows from what a checkpoint costs and how often nodes fail"
    if seconds is not None:
        return f"every {seconds:g} s"
    return "from time to time" if every is None else f"every {every:,} updates"


def _checkpoint(durability: Mapping[str, Any]) -> str:
    if durability.get("scope") == "all":
        return (
            f"All shards are written to files together, {_every(durability)}; when one is lost, "
            "all go back to the last files."
        )
    return (
        f"Each shard is written to a file {_every(durability)}; a lost shard goes back to its last "
        "file, and later updates of it are lost."
    )


def _partial(durability: Mapping[str, Any]) -> str:
    share = durability.get("share")
    part = "a part" if share is None else f"the {share:.0%}"
    return (
        f"Of each shard, {part} that has changed most is written to a file {_every(durability)}; a "
        "lost shard goes back to what was written last of each part."
    )


def _chain(durability: Mapping[str, Any]) -> str:
    return (
        f"{durability.get('replicas', 'Several')} servers hold each shard (chain replication); "
        "when one is lost, those left go on at once."
    )


def _shared_store(durability: Mapping[str, Any]) -> str:
    number = durability.get("stores", 1)
    keeps = f"Each of {number} stores on other nodes" if number > 1 else "A store on another node"
    return f"{keeps} keeps the state of each shard; a new server reads it from there."


_DURABILITIES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "none": lambda _: "Nothing is kept: a lost shard starts again from its initial values.",
    "checkpoint": _checkpoint,
    "partial_checkpoint": _partial,
    "chain": _chain,
    "shared_store": _shared_store,
    "worker_cache": lambda _: (
        "Workers keep the weights that they have read; a lost shard is rebuilt from the newest."
    ),
}
