"""Running a recorded trial again under the faults that it met.

Its plan follows from its configuration and seed. What was only decided while it ran, whom a fault
hit that aims at a place in a chain or at random, is read from its record and kept.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from dps.core.faults.plan import Among, Fault, FaultPlan, InChain
from dps.errors import ConfigurationError
from dps.events import Disturbed, Killed, Paused
from flows.analysis.finished import RESULTS
from flows.config.errors import suggest
from flows.config.trials import Trial
from flows.files import first_free, is_file
from flows.quoting import quoted, shown
from flows.records.record import EVENTS_FILE, Record, read_trial
from flows.records.settings import trial_from


@dataclass(frozen=True, slots=True)
class Replay:
    """A trial to be run again: under which name, where, with which plan, and what is recorded."""

    trial: Trial
    folder: Path
    plan: FaultPlan
    events_file: Path
    record: Record


def replay_of(name: str, here: Path) -> Replay:
    """Return how to run a recorded trial again.

    Parameters
    ----------
    name
        "experiment/trial", or the folder of the trial's record, or its record.
    here
        The working directory.

    Raises
    ------
    ConfigurationError
        There is no such record, or it is not of a trial that can run here.
    """
    original = _record_of(name, here)
    record = read_trial(original)
    trial = trial_from(record.started.settings if record.started else {}, str(original))
    folder = original.parent
    again = first_free(lambda number: folder.with_name(f"{folder.name}.replay-{number}"))
    return Replay(
        replace(trial, name=again.name),
        again,
        as_it_was(trial.config.build_faults(), record),
        original,
        record,
    )


def as_it_was(plan: FaultPlan, record: Record) -> FaultPlan:
    """Return a plan with the nodes that its faults hit in a recorded trial."""
    hit: defaultdict[int, list[str]] = defaultdict(list)
    struck: list[Killed | Paused | Disturbed] = [
        *record.of(Killed),
        *record.of(Paused),
        *record.of(Disturbed),
    ]
    for event in struck:
        hit[event.fault].append(event.node)
    return tuple(_aimed(fault, hit.get(number, [])) for number, fault in enumerate(plan))


def _aimed(fault: Fault, hit: list[str]) -> Fault:
    """The fault with those as its target whom it hit, if it aims at whoever is there."""
    if not hit or not isinstance(fault.target, Among | InChain):
        return fault
    return replace(fault, target=tuple(hit))


def _record_of(name: str, here: Path) -> Path:
    for place in (here / name, here / RESULTS / name):
        if is_file(place):
            return place
        if is_file(place / EVENTS_FILE):
            return place / EVENTS_FILE
    root = here / RESULTS
    known = [str(p.parent.relative_to(root)) for p in sorted(root.glob(f"*/*/{EVENTS_FILE}"))]
    if not known:
        raise ConfigurationError(
            f"{shown(name)}: no such record, and nothing is recorded in {root}"
        )
    raise ConfigurationError(
        f"no trial {quoted(name)} is recorded in {root}; {suggest(name, known)}"
    )
