"""`make bench-examples`: the examples that are lost or repeated if a process is killed.

All systems train the same model on the same batches for the same number of epochs. An array beside
the parameters counts how often the gradient of each example was applied, and is restored with them.
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

Tell = Callable[[str], None]


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


def count(seeds: Sequence[int], tell: Tell, settings: Settings | None = None) -> list[Counted]:
    """Run every system for each seed: without a kill, and with one of each kind of its processes.

    In each seed another system is the first.
    """
    settings = settings or Settings()
    found = []
    with tempfile.TemporaryDirectory(prefix="dps-bench-") as folder:
        for turn, (system, seed, kill) in enumerate(_turns(seeds)):
            found.append(trial(system, seed, kill, settings, Path(folder) / f"{turn:03d}"))
            tell(_line(found[-1]))
    return found


def trial(
    system: str, seed: int, kill: Kill, settings: Settings, folder: Path, epochs: int = EPOCHS
) -> Counted:
    """Run one trial in a new folder; one that fails has a reason."""
    task = _task(system, seed, settings, folder, epochs)
    task.write()
    module = BASELINES[system].module if system in BASELINES else "dps_leases"
    nothing = Counted(system, seed, kill)
    try:
        if kill == "no":
            ran = run(f"{__package__}.{module}", task, None)
        else:
            ran = run(f"{__package__}.{module}", task, settings.kill_at(seed), kill)
    except DpsError as problem:
        return replace(nothing, reason=str(problem))
    if ran.unfinished:
        return replace(nothing, reason=ran.unfinished)
    if kill != "no" and (ran.kill is None or not ran.kill.gone):
        return replace(nothing, reason="the process was not killed")
    applied = [each["t"] for each in read_trace(folder) if each["event"] == "applied"]
    if ran.kill is not None and ran.kill.t > applied[-1]:
        return replace(nothing, reason="no gradient was applied after the kill")
    *_, (_, weights) = snapshots(folder)
    excess = np.rint(weights[COUNT]).astype(int) - epochs
    return replace(
        nothing,
        examples=epochs * len(excess),
        lost=int(-excess[excess < 0].sum()),
        repeated=int(excess[excess > 0].sum()),
        seconds=max(applied) - min(applied),
    )


def table(found: Sequence[Counted]) -> str:
    """The examples lost and repeated by system and kill: means, with the extremes over seeds."""
    lines = [f"{'':<17}{'kill':<8}{'lost':>22}{'repeated':>22}{'seconds':>9}"]
    groups: dict[tuple[str, Kill], list[Counted]] = {}
    for each in found:
        if not each.reason:
            groups.setdefault((each.system, each.kill), []).append(each)
    for (system, kill), trials in sorted(groups.items()):
        lost, repeated = ([getattr(each, name) for each in trials] for name in ("lost", "repeated"))
        seconds = fmean(each.seconds for each in trials)
        lines.append(f"{system:<17}{kill:<8}{_mean(lost):>22}{_mean(repeated):>22}{seconds:>9.2f}")
    lines += [_line(each) for each in found if each.reason]
    lines += [f"{name} is left out: {why}" for name, why in missing().items()]
    return "\n".join(lines)


# -- parts -------------------------------------------------------------------------------------


def _task(system: str, seed: int, settings: Settings, folder: Path, epochs: int) -> Task:
    config = trials_of(seed, settings)["none", False].config
    recovery = LEASED.get(system, "")
    task = replace(task_of(config, settings, folder), counts=True, recovery=recovery)
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
