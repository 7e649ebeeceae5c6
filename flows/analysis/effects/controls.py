"""Controls: which trial of an experiment is the same as another, but for the faults.

What two trials were is told by the settings in their records: the labels on an experiment's axes
are only names.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# What makes no difference to what a trial measures, besides the faults: when it would have failed,
# and for how long nodes, or real time, are waited for.
_NO_MATTER = ("faults", "time_limit")
_NO_MATTER_OF_CLUSTER = ("patience",)


@dataclass(frozen=True, slots=True)
class Setup:
    """What a trial was, as far as controls go.

    Attributes
    ----------
    but_for_faults
        Digest of the experiment, the seed, all settings but the faults, and how many trials ran at
        once, for these take the time from each other. "": the record does not tell.
    plans_faults
        Whether its fault plan has any entry.
    labels
        Its values on the experiment's axes.
    """

    but_for_faults: str
    plans_faults: bool
    labels: Mapping[str, str]


def setup(settings: Mapping[str, Any]) -> Setup:
    """Return what the settings that open a record say a trial was.

    They may be damaged: whatever is no mapping where one belongs tells nothing.
    """
    config, labels, circumstances = (
        found if isinstance(found := settings.get(key), dict) else {}
        for key in ("config", "labels", "circumstances")
    )
    if not config:
        return Setup("", False, {})
    kept = {key: value for key, value in config.items() if key not in _NO_MATTER}
    if isinstance(kept.get("cluster"), dict):
        cluster = kept["cluster"]
        kept["cluster"] = {k: v for k, v in cluster.items() if k not in _NO_MATTER_OF_CLUSTER}
    told = {
        "experiment": settings.get("experiment"),
        "seed": settings.get("seed"),
        "config": kept,
        "parallel": circumstances.get("parallel", 1),
    }
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
    named = {str(axis): str(label) for axis, label in labels.items()}
    return Setup(digest, bool(config.get("faults")), named)


def controls(trials: Mapping[str, Setup]) -> dict[str, str]:
    """Return for each trial with planned faults the name of its control, if there is one.

    Where several trials are the same but for the faults, as when two labels stand for the same
    configuration, it is the one that has the most labels in common; among these, the first by name.
    """
    quiet: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(trials):
        each = trials[name]
        if each.but_for_faults and not each.plans_faults:
            quiet[each.but_for_faults].append(name)
    found = {}
    for name, each in trials.items():
        candidates = quiet.get(each.but_for_faults, [])
        if each.plans_faults and candidates:
            found[name] = _nearest(each, candidates, trials)
    return found


def _nearest(trial: Setup, candidates: Sequence[str], trials: Mapping[str, Setup]) -> str:
    def in_common(name: str) -> int:
        return len(trial.labels.items() & trials[name].labels.items())

    return max(candidates, key=in_common)  # the first of those that have as many
