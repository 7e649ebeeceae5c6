"""Owns the preview of an experiment: its trials, what is recorded, and the nodes they need."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from dps.core.faults import AtUpdates
from flows.fault_words import FEW, brief, full, late_line
from flows.grid import Trial


def plan_table(trials: Sequence[Trial], recorded: Sequence[Trial]) -> Table:
    """Return one line per trial; `recorded` are those that a run would skip."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in ("trial", *trials[0].labels, "seed", "fault plan", "nodes", "state"):
        table.add_column(Text(heading), justify="right" if heading in ("seed", "nodes") else "left")
    for trial in trials:
        state = "recorded" if trial in recorded else "to run"
        cells = [
            trial.name,
            *trial.labels.values(),
            str(trial.seed),
            brief(trial.config.build_faults()),
        ]
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
        for fault, end in trial.config.late_faults:
            late = f"{late_line(fault)}, for {end}"
            affected[late].append(trial.name)
    return [f"{late}; will be marked invalid: {', '.join(n)}" for late, n in affected.items()]


def fault_plans(trials: Sequence[Trial]) -> list[str]:
    """Return the faults one by one of those trials whose plan says more than fits in the table."""
    trials_of: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for trial in trials:
        plan = trial.config.build_faults()
        if any(not isinstance(fault.when, AtUpdates) for fault in plan) or len(plan) > FEW:
            trials_of[tuple(full(plan))].append(trial.name)
    lines = []
    for told, names in trials_of.items():
        lines += [f"Faults of {', '.join(names)}:", *(f"  {line}" for line in told)]
    return lines
