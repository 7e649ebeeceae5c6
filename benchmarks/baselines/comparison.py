"""`make bench-baselines`: dps beside a process that restarts, Ray actors, torch RPC and torchft.

All train the same model on the same batches, once without a fault and once with their server killed
after the same number of gradients. The costs to the target accuracy are compared by seed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.baselines.trials import BASELINES, Measured, Settings, measure, missing, systems
from flows.files import write_whole
from flows.statistics import Difference, Interval, interval, paired

MICRO = 1e6

Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """The results of a system: its valid trials, over seeds.

    Attributes
    ----------
    control, kill
        Seconds to the target without a kill and with one; None where a trial did not reach it.
    control_usd, kill_usd
        Cost of the machines until then.
    accuracy_control, accuracy_kill
        Final accuracy, in [0, 1].
    effect_seconds, effect_accuracy
        Kill minus control of the same seed.
    reached
        Trials with a kill that reached the target, and all of them.
    lost, down_seconds
        Gradients lost by a kill, and seconds without any applied, mean over the seeds.
    invalid
        Invalid trials.
    """

    system: str
    control: Interval | None
    kill: Interval | None
    control_usd: Interval | None
    kill_usd: Interval | None
    accuracy_control: Interval | None
    accuracy_kill: Interval | None
    effect_seconds: Difference | None
    effect_accuracy: Difference | None
    reached: tuple[int, int]
    lost: float | None
    down_seconds: float | None
    invalid: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """All trials, their common settings, and the systems that were left out."""

    settings: Settings
    seeds: Sequence[int]
    trials: Sequence[Measured]
    left_out: Mapping[str, str]
    load: tuple[float, float]

    @property
    def rows(self) -> list[Row]:
        """Return a row for each system, in order of their first trials."""
        names = dict.fromkeys(trial.system for trial in self.trials)
        return [row_of(name, [t for t in self.trials if t.system == name]) for name in names]


def compare(
    seeds: Sequence[int],
    notify: Notify,
    settings: Settings | None = None,
    folder: Path | None = None,
) -> Comparison:
    """Run every system with and without a kill for each seed.

    Within a seed the systems take turns, and each seed begins with another one. A trial with a kill
    is next to its control, so other work on the machine affects both. `folder` keeps the records;
    None: they are removed.
    """
    settings = settings or Settings()
    names, before, trials = systems(), os.getloadavg()[0], []
    with tempfile.TemporaryDirectory(prefix="dps-bench-") as temporary:
        root = folder or Path(temporary)
        for turn, (system, seed, killed) in enumerate(_turns(names, seeds)):
            name = f"{turn:03d}-{'kill' if killed else 'control'}"
            found = measure(system, seed, killed, settings, root / name)
            trials.append(found)
            notify(_told(found))
    trials.sort(key=lambda trial: names.index(trial.system))
    return Comparison(settings, [*seeds], trials, missing(), (before, os.getloadavg()[0]))


def row_of(system: str, trials: Sequence[Measured]) -> Row:
    """Return the results of the trials of a system."""
    valid = [trial for trial in trials if not trial.reason]
    control = {t.seed: t for t in valid if not t.killed}
    kill = {t.seed: t for t in valid if t.killed}
    return Row(
        system=system,
        control=_mean(control, "target_seconds"),
        kill=_mean(kill, "target_seconds"),
        control_usd=_mean(control, "target_usd"),
        kill_usd=_mean(kill, "target_usd"),
        accuracy_control=_mean(control, "accuracy_final"),
        accuracy_kill=_mean(kill, "accuracy_final"),
        effect_seconds=_effect(kill, control, "target_seconds"),
        effect_accuracy=_effect(kill, control, "accuracy_final"),
        reached=(sum(t.target_seconds is not None for t in kill.values()), len(kill)),
        lost=_plain_mean(kill, "lost"),
        down_seconds=_plain_mean(kill, "down_seconds"),
        invalid=len(trials) - len(valid),
    )


def table(found: Comparison) -> str:
    """Return the rows as text, with the systems that were left out."""
    settings, moments = found.settings, [found.settings.kill_at(seed) for seed in found.seeds]
    lines = [
        f"seconds and money (millionths of a USD) to an accuracy of {settings.target:g}; mean and "
        f"95% interval of {len(found.seeds)} seeds",
        f"{settings.updates} gradients; the server is killed after {', '.join(map(str, moments))}, "
        f"its machine is away for {settings.back_after:g} s; a checkpoint every {settings.every}",
        "",
        f"{'':<17}{'control: s':>24}{'USD/10⁶':>9}{'kill: s':>24}{'USD/10⁶':>9}"
        f"{'kill - control: s':>24}{'accuracy':>15}{'lost':>7}{'down s':>8}",
    ]
    lines += map(_line, found.rows)
    lines += ["", "accuracy: at the end, control → kill; lost: gradients, * computed again"]
    lines.append(f"load of the machine: {found.load[0]:.1f} before, {found.load[1]:.1f} after")
    for trial in found.trials:
        name = f"{trial.system}, {'kill' if trial.killed else 'control'}, seed {trial.seed}"
        if trial.reason:
            lines.append(f"{name} is left out: {trial.reason}")
        elif trial.unfinished:
            lines.append(f"{name} counts as it is: {trial.unfinished}")
    lines += [f"{name} is left out: {why}" for name, why in found.left_out.items()]
    return "\n".join(lines)


def write(found: Comparison, path: Path) -> None:
    """Write everything as JSON.

    Raises `StoreUnavailable` if the file cannot be written.
    """
    write_whole(path, json.dumps(as_data(found), indent=1) + "\n", "the comparison")


def as_data(found: Comparison) -> dict[str, Any]:
    """Return everything for JSON."""
    return {**asdict(found), "rows": [_as_json(row) for row in found.rows]}


# -- parts -------------------------------------------------------------------------------------


def _as_json(row: Row) -> dict[str, Any]:
    """Return a row for JSON; a difference has its mean and interval only."""
    values = {field.name: getattr(row, field.name) for field in fields(row)}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Difference):
        return {name: getattr(value, name) for name in ("mean", "low", "high", "sd", "n", "p")}
    return asdict(value) if isinstance(value, Interval) else value


def _turns(names: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[str, int, bool]]:
    for number, seed in enumerate(seeds):
        first = number % len(names)
        for system in [*names[first:], *names[:first]]:
            for killed in (False, True) if number % 2 == 0 else (True, False):
                yield system, seed, killed


def _told(trial: Measured) -> str:
    what = "kill" if trial.killed else "control"
    said = (
        trial.reason
        or trial.unfinished
        or (
            f"target after {_number(trial.target_seconds, '.2f')} s, "
            f"accuracy {_number(trial.accuracy_final, '.3f')}"
        )
    )
    return f"seed {trial.seed}, {trial.system}, {what}: {said}"


def _values(trials: Mapping[int, Measured], name: str) -> dict[int, float]:
    found = {seed: getattr(trial, name) for seed, trial in trials.items()}
    return {seed: value for seed, value in found.items() if value is not None}


def _mean(trials: Mapping[int, Measured], name: str) -> Interval | None:
    """Return the mean of a figure; None if a trial has none: a mean of the others would flatter."""
    values = _values(trials, name)
    if not values or len(values) < len(trials):
        return None
    return interval([*values.values()], np.random.default_rng(0))


def _plain_mean(trials: Mapping[int, Measured], name: str) -> float | None:
    """Return the mean alone; None if a trial has no such figure: it may never have recovered."""
    values = _values(trials, name)
    return fmean(values.values()) if values and len(values) == len(trials) else None


def _effect(
    kill: Mapping[int, Measured], control: Mapping[int, Measured], name: str
) -> Difference | None:
    values, baseline = _values(kill, name), _values(control, name)
    if len(values) < len(kill) or len(baseline) < len(control):
        return None
    return paired(values, baseline, np.random.default_rng(0))


def _line(row: Row) -> str:
    reached, of = row.reached
    kill = _text(row.kill) if reached == of else f"reached in {reached} of {of}"
    again = "*" if row.system in BASELINES and BASELINES[row.system].again else ""
    ends = [_accuracy(row.accuracy_control), _accuracy(row.accuracy_kill)]
    return (
        f"{row.system:<17}{_text(row.control):>24}{_usd(row.control_usd):>9}{kill:>24}"
        f"{_usd(row.kill_usd):>9}{_text(row.effect_seconds):>24}{' → '.join(ends):>15}"
        f"{_number(row.lost, '.0f') + again:>7}{_number(row.down_seconds, '.2f'):>8}"
    )


def _text(found: Interval | Difference | None) -> str:
    if found is None:
        return "–"
    if found.low is None or found.high is None:
        return f"{found.mean:.2f}"
    return f"{found.mean:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _usd(found: Interval | None) -> str:
    return _number(MICRO * found.mean if found else None, ".0f")


def _accuracy(found: Interval | None) -> str:
    return _number(found.mean if found else None, ".3f")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
