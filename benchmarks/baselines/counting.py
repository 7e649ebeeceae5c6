"""`make bench-examples`: the examples that are lost or repeated if a process is killed.

All systems train the same model for the same number of epochs, in random orders of the examples. An
array beside the parameters counts how often the gradient of each example was applied, and is
restored with them. The process is killed at a random moment.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np

from benchmarks.baselines.program import Victim, read_trace, run
from benchmarks.baselines.task import COUNT, Task, snapshots
from benchmarks.baselines.trials import BASELINES, DPS, Settings, missing, task_of, trials_of
from dps.errors import DpsError

EPOCHS = 20
LEASED = {f"dps, {name}": preset for name, preset in DPS.items() if preset != "none"}
Kill = Literal["no"] | Victim
_DELAY = 23  # separates the draw of the delay from other draws of a seed


@dataclass(frozen=True, slots=True)
class Counted:
    """The examples of a trial.

    Attributes
    ----------
    kill
        The process that was killed: "server", "worker", or "no".
    examples
        Examples to apply, over all epochs.
    lost, repeated
        How often examples were applied too few and too many times, summed over all examples.
    seconds
        Duration from the first gradient to the last.
    reason
        Why the trial is invalid; "": it is valid.
    """

    system: str
    seed: int
    kill: Kill
    examples: int = 0
    lost: int = 0
    repeated: int = 0
    seconds: float = 0.0
    reason: str = ""


def count(
    seeds: Sequence[int], notify: Callable[[str], None], settings: Settings | None = None
) -> list[Counted]:
    """Run every system for each seed: without a kill, and with one of each kind of its processes.

    In each seed another system is the first.
    """
    settings = settings or Settings()
    trials = []
    with tempfile.TemporaryDirectory(prefix="dps-bench-") as folder:
        for turn, (system, seed, kill) in enumerate(_turns(seeds)):
            trials.append(trial(system, seed, kill, settings, Path(folder) / f"{turn:03d}"))
            notify(_line(trials[-1]))
    return trials


def trial(
    system: str, seed: int, kill: Kill, settings: Settings, folder: Path, epochs: int = EPOCHS
) -> Counted:
    """Run one trial in a new folder; one that fails has a reason."""
    task = _task(system, seed, settings, folder, epochs)
    task.write()
    module = BASELINES[system].module if system in BASELINES else "dps_leases"
    failed = Counted(system, seed, kill)
    try:
        if kill == "no":
            ran = run(f"{__package__}.{module}", task, None)
        else:
            delay = np.random.default_rng([seed, _DELAY]).uniform(0, settings.compute_seconds)
            at = settings.kill_at(seed)
            ran = run(f"{__package__}.{module}", task, at, kill, delay)
    except DpsError as problem:
        return replace(failed, reason=str(problem))
    if ran.unfinished:
        return replace(failed, reason=ran.unfinished)
    if kill != "no" and (ran.kill is None or not ran.kill.gone):
        return replace(failed, reason="the process was not killed")
    applied = [each["t"] for each in read_trace(folder) if each["event"] == "applied"]
    if ran.kill is not None and ran.kill.t > applied[-1]:
        return replace(failed, reason="no gradient was applied after the kill")
    *_, (_, weights) = snapshots(folder)
    excess = np.rint(weights[COUNT]).astype(int) - epochs
    return replace(
        failed,
        examples=epochs * len(excess),
        lost=int(-excess[excess < 0].sum()),
        repeated=int(excess[excess > 0].sum()),
        seconds=max(applied) - min(applied),
    )


def table(trials: Sequence[Counted]) -> str:
    """Examples lost and repeated by system and kill: means, and the extremes over seeds."""
    lines = [f"{'':<17}{'kill':<8}{'finished':>9}{'lost':>20}{'repeated':>20}{'seconds':>9}"]
    groups: dict[tuple[str, Kill], list[Counted]] = {}
    for each in trials:
        groups.setdefault((each.system, each.kill), []).append(each)
    for (system, kill), group in sorted(groups.items()):
        finished = [each for each in group if not each.reason]
        cells = [f"{len(finished)} of {len(group)}"]
        if finished:
            cells += [_mean([each.lost for each in finished])]
            cells += [_mean([each.repeated for each in finished])]
            cells += [f"{fmean(each.seconds for each in finished):.2f}"]
        widths = (9, 20, 20, 9)
        columns = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False))
        lines.append(f"{system:<17}{kill:<8}{''.join(columns)}")
    lines += [_line(each) for each in trials if each.reason]
    lines += [f"{name} is left out: {why}" for name, why in missing().items()]
    return "\n".join(lines)


# -- parts -------------------------------------------------------------------------------------


def _task(system: str, seed: int, settings: Settings, folder: Path, epochs: int) -> Task:
    config = trials_of(seed, settings)["none", False].config
    recovery = LEASED.get(system, "")
    task = replace(task_of(config, settings, folder), epochs=epochs, recovery=recovery)
    return replace(task, updates=epochs * task.examples // task.batch_size)


def _turns(seeds: Sequence[int]) -> Iterator[tuple[str, int, Kill]]:
    kinds: tuple[Victim, ...] = "server", "worker"
    kills: dict[str, list[Kill]] = {name: ["no", *kinds] for name in LEASED}
    for name, each in BASELINES.items():
        kills[name] = ["no", *(kind for kind in kinds if kind in each.roles)]
    names = [name for name in kills if name not in missing()]
    for number, seed in enumerate(seeds):
        first = number % len(names)
        for system in [*names[first:], *names[:first]]:
            for kill in kills[system]:
                yield system, seed, kill


def _line(trial: Counted) -> str:
    text = trial.reason or f"{trial.lost} lost, {trial.repeated} repeated, {trial.seconds:.2f} s"
    return f"seed {trial.seed}, {trial.system}, {trial.kill} kill: {text}"


def _mean(values: Sequence[int]) -> str:
    extremes = f" [{min(values)}, {max(values)}]" if max(values) else ""
    return f"{fmean(values):,.0f}{extremes}"
