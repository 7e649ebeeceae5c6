"""Owns the preview of an experiment: its trials, what is recorded, and the nodes they need."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from flows.config import TrialConfig
from flows.grid import Trial


def plan_table(trials: Sequence[Trial], recorded: Sequence[Trial]) -> Table:
    """Return one line per trial; `recorded` are those that a run would skip."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("trial", *trials[0].labels, "seed", "fault plan", "nodes", "state"):
        table.add_column(Text(heading), justify="right" if heading in ("seed", "nodes") else "left")
    for trial in trials:
        state = "recorded" if trial in recorded else "to run"
        cells = [trial.name, *trial.labels.values(), str(trial.seed), _faults(trial.config)]
        table.add_row(*map(Text, [*cells, str(len(trial.config.node_names)), state]))
    return table


def nodes_needed(trials: Sequence[Trial]) -> str:
    """Say how many nodes the largest trial needs, by what they are."""
    names = max((trial.config.node_names for trial in trials), key=len)
    roles = Counter(name.partition("-")[0] for name in names)
    parts = ", ".join(f"{count} {role}" for role, count in roles.items())
    return f"Nodes needed at once, at most: {len(names)} ({parts}), and a scheduler."


def warnings(trials: Sequence[Trial]) -> list[str]:
    """Return what will make trials invalid: faults that come after the end of the training."""
    affected: defaultdict[str, list[str]] = defaultdict(list)
    for trial in trials:
        updates = trial.config.training.updates
        for fault in trial.config.late_faults:
            late = (
                f"the {fault.kind} of {fault.target} at {fault.at_updates} updates never comes, "
                f"for the training ends after {updates}"
            )
            affected[late].append(trial.name)
    return [f"{late}; will be marked invalid: {', '.join(n)}" for late, n in affected.items()]


def _faults(config: TrialConfig) -> str:
    told = [f"{fault.kind} {fault.target} at {fault.at_updates}" for fault in config.faults]
    return ", ".join(told) or "–"
