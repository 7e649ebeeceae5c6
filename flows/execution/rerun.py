"""Rerun of one recorded trial, in this process and under the faults that it met.

Its plan follows from its configuration and seed. Choices made at run time, such as the node hit by
a fault that targets a place in a chain or a random node, are read from its record and kept.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from dps.errors import ConfigurationError
from dps.events import Disturbed, Killed, Paused
from dps.faults import Among, Fault, FaultPlan, InChain
from flows.config.errors import complaints, suggest
from flows.config.experiment import TrialConfig
from flows.config.sections import OF_RECORD
from flows.config.trials import Trial
from flows.execution.trial import run_trial
from flows.files import first_free
from flows.metrics.outcome import Outcome
from flows.metrics.prices import load_prices
from flows.monitor.course import Follower
from flows.monitor.progress import PlainView
from flows.quoting import quoted, shown
from flows.records.record import EVENTS_FILE, Record, read_trial
from flows.statistics.finished import RESULTS, finished


@dataclass(frozen=True, slots=True)
class Rerun:
    """A trial to be run again: its new name, folder and plan, and the record of the first time."""

    trial: Trial
    folder: Path
    plan: FaultPlan
    events_file: Path
    record: Record

    def run(self, view: PlainView) -> tuple[Outcome, Outcome]:
        """Run the trial, show it in the open `view`, and return both outcomes."""
        trial, folder, prices = self.trial, self.folder, load_prices()
        view.begin(trial.experiment, [trial], [])
        view.started(trial)
        show, moved = partial(view.show_line, trial), partial(view.moved, trial)
        run_trial(trial, folder, Follower(show, moved), notify=show, plan=self.plan)
        before = finished(self.events_file, self.record, prices).outcome
        after = finished(folder / EVENTS_FILE, read_trial(folder / EVENTS_FILE), prices).outcome
        view.ended(trial, after)
        return before, after


def rerun_of(name: str, here: Path) -> Rerun:
    """Return how to run a recorded trial again, by "experiment/trial", its folder or its record.

    Raises `ConfigurationError` if there is no such record, or its trial cannot run here.
    """
    original = _record_of(name, here)
    record = read_trial(original)
    trial = _trial_of(record, original)
    folder = original.parent
    again = first_free(lambda number: folder.with_name(f"{folder.name}.rerun-{number}"))
    plan = as_it_was(trial.config.fault_plan, record)
    return Rerun(replace(trial, name=again.name), again, plan, original, record)


def _trial_of(record: Record, place: Path) -> Trial:
    kept = record.started.settings if record.started else {}
    try:
        config = TrialConfig.model_validate(kept["config"], context=OF_RECORD)
        trial, experiment, labels = kept["trial"], kept["experiment"], kept["labels"]
        return Trial(trial, experiment, labels, kept["seed"], config, kept["digest"])
    except KeyError as error:
        why = [f"{place} was not recorded by this version of dps: {error} is missing"]
    except ValidationError as error:
        why = [f"{place}: config.{key}: {reason}" for key, reason in complaints(error)]
    raise ConfigurationError("\n".join([*why, "This trial cannot be rerun here; use dps run."]))


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
    """The fault with the nodes that it hit as its target, if its target was open."""
    if not hit or not isinstance(fault.target, Among | InChain):
        return fault
    return replace(fault, target=tuple(hit))


def _record_of(name: str, here: Path) -> Path:
    for place in (here / name, here / RESULTS / name):
        if place.is_file():
            return place
        if (place / EVENTS_FILE).is_file():
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
