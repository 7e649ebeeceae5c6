"""`dps simulate`: many random schedules over all cores, one again, or the broken variants."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from dps.sim.broken.hunt import BUDGET, VARIANTS, hunt
from dps.sim.network import Line
from dps.sim.schedules.draw import named, numbered
from dps.sim.schedules.shrink import shrink
from dps.sim.schedules.strategies import CASES
from dps.sim.simulate import Record, simulate

BATCH = 20  # schedules that a process is given at a time
SHRUNK = 3  # violations of one batch that are shrunk; more are only named
SHOWN = 10
GARBAGE = 10_000  # objects made and not yet freed, after which the newest are looked through

# The kinds of faults under a few heads, so that the table fits on a page.
HEADS = {
    "crashes": ("crash", "crash in a write", "return", "twin"),
    "power": ("power loss", "power loss in a write"),
    "ends": ("resume",),
    "pauses": ("pause", "slow"),
    "clocks": ("clock step",),
    "links": ("partition", "one-way cut", "lossy link", "slow link", "late copies"),
    "false alarms": ("suspicion",),
    "disk": ("full disk", "failed rename", "torn write", "bit flip", "slow disk"),
    "joins": ("join",),
}

Job = TypeVar("Job")
Done = TypeVar("Done")


@dataclass(frozen=True, slots=True)
class Broken:
    """A promise that was broken: the schedule, and what it takes to break it."""

    schedule: str
    what: str
    shrunk: str
    words: tuple[str, ...]


@dataclass(slots=True)
class Totals:
    """What came of the schedules of one case."""

    schedules: int = 0
    operations: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    broken: list[Broken] = field(default_factory=list)

    def add(self, other: Totals) -> None:
        """Count another batch in."""
        self.schedules += other.schedules
        self.operations += other.operations
        self.faults += other.faults
        self.broken += other.broken


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came of many schedules; `seed` is their series."""

    seed: int
    schedules: int
    faults: int
    operations: int
    violations: tuple[Broken, ...]
    cases: dict[str, Totals]
    seconds: float

    @property
    def good(self) -> bool:
        """Whether every promise held."""
        return not self.violations


@dataclass(frozen=True, slots=True)
class Repeated:
    """What came of one schedule; `violation` says which promise was broken, if one was."""

    schedule: str
    faults: tuple[str, ...]
    operations: int
    violation: str | None

    @property
    def good(self) -> bool:
        """Whether every promise held."""
        return self.violation is None


# -- many schedules --------------------------------------------------------------------------------


def run_many(schedules: int, series: int, console: Console) -> Simulated:
    """Run so many schedules, evenly over the cases, and print what came of them."""
    began = time.monotonic()
    totals = {name: Totals() for name in CASES}
    ranges = [
        (series, first, min(first + BATCH, schedules)) for first in range(0, schedules, BATCH)
    ]
    with _bar(schedules, "schedules") as advance:
        for batch in _in_processes(_run_batch, ranges):
            for name, found in batch.items():
                totals[name].add(found)
                advance(found.schedules)
    console.print(_table(totals))
    broken = [each for found in totals.values() for each in found.broken]
    _print_broken(broken, console)
    seconds = time.monotonic() - began
    faults = sum(sum(found.faults.values()) for found in totals.values())
    operations = sum(found.operations for found in totals.values())
    console.print(
        f"{schedules} schedules, {faults} faults, {operations} operations, "
        f"{len(broken)} violations in {seconds:.0f} s."
    )
    cases = {name: found for name, found in totals.items() if found.schedules}
    return Simulated(series, schedules, faults, operations, tuple(broken), cases, seconds)


def _run_batch(job: tuple[int, int, int]) -> dict[str, Totals]:
    series, first, end = job
    totals: dict[str, Totals] = {}
    shrunk = 0
    for number in range(first, end):
        record = simulate(numbered(number, series))
        found = totals.setdefault(record.schedule.case.name, Totals())
        found.schedules += 1
        found.operations += record.operations
        found.faults += record.struck
        if record.violation is not None:
            found.broken.append(_broken(record, shrunk < SHRUNK))
            shrunk += 1
    return totals


def _broken(record: Record, shorten: bool) -> Broken:
    less = (shrink(record) if shorten else record).schedule
    return Broken(record.schedule.name, str(record.violation), less.name, tuple(less.in_words()))


def _table(totals: dict[str, Totals]) -> Table:
    table = Table("case", *_right("schedules", *HEADS, "operations", "violations"))
    everything = Totals()
    for name, found in totals.items():
        if found.schedules:
            table.add_row(name, *_row(found))
            everything.add(found)
    table.add_section()
    table.add_row("all", *_row(everything))
    return table


def _row(found: Totals) -> list[str]:
    faults = [sum(found.faults[kind] for kind in kinds) for kinds in HEADS.values()]
    numbers = [found.schedules, *faults, found.operations, len(found.broken)]
    return [f"{number:,}" for number in numbers]


def _print_broken(broken: Sequence[Broken], console: Console) -> None:
    for each in broken[:SHOWN]:
        console.print(f"\n[bold]{each.schedule}[/bold]: {_plain(each.what)}")
        for line in each.words:
            console.print(f"  - {line}")
        console.print(f"  dps simulate --replay {shlex.quote(each.shrunk)}")
    if len(broken) > SHOWN:
        names = "; ".join(each.schedule for each in broken[SHOWN:])
        console.print(f"\nand {len(broken) - SHOWN} more: {names}")


# -- one schedule ----------------------------------------------------------------------------------


def replay(name: str, console: Console) -> Repeated:
    """Run one schedule again, and print all that happens."""
    schedule = named(name)
    record = simulate(schedule)
    console.print(f"{schedule.name}, in words:")
    for line in schedule.in_words() or ["no fault at all"]:
        console.print(f"  - {line}")
    console.print()
    for event in record.trace:
        print(_told(event))
    verdict = record.violation
    kept = f"No promise is broken ({record.operations} operations)."
    console.print(f"\n{kept if verdict is None else _plain(str(verdict))}")
    said = None if verdict is None else str(verdict)
    return Repeated(schedule.name, tuple(schedule.in_words()), record.operations, said)


def _told(line: Line) -> str:
    seconds, what, source, target, message = line
    ends = f"{source} -> {target}" if target else source
    return f"{seconds:11.6f}  {what:10}  {ends:28}  {message}".rstrip()


# -- the broken variants ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hunted:
    """What came of the hunt for one broken variant; without a schedule, it was not caught."""

    variant: str
    after: int = 0
    schedule: str = ""
    said: str = ""


@dataclass(frozen=True, slots=True)
class Hunt:
    """What came of the hunt for all broken variants; `missed` are the names of those not caught."""

    variants: tuple[Hunted, ...]
    missed: tuple[str, ...]
    seconds: float

    @property
    def good(self) -> bool:
        """Whether all were caught."""
        return not self.missed


def run_mutants(console: Console) -> Hunt:
    """Hunt for every broken variant, and print a table."""
    began = time.monotonic()
    hunted = {}
    with _bar(len(VARIANTS), "broken variants") as advance:
        for each in _in_processes(_hunt, list(VARIANTS)):
            hunted[each.variant] = each
            advance(1)
    table = Table("broken variant", "what it does", "caught by", *_right("after"), "what was said")
    for name, variant in VARIANTS.items():
        each = hunted[name]
        caught = [each.schedule, f"{each.after:,}"] if each.schedule else ["nobody", ""]
        table.add_row(name, variant.about, *caught, _plain(each.said))
    console.print(table)
    missed = tuple(name for name, each in hunted.items() if not each.schedule)
    seconds = time.monotonic() - began
    console.print(
        f"{len(hunted) - len(missed)} of {len(hunted)} broken variants caught within "
        f"{BUDGET:,} schedules each, in {seconds:.0f} s."
    )
    return Hunt(tuple(hunted.values()), missed, seconds)


def _hunt(name: str) -> Hunted:
    caught = hunt(VARIANTS[name])
    if caught is None:
        return Hunted(name)
    record = caught.record
    return Hunted(name, caught.after, record.schedule.name, str(record.violation))


# -- processes and progress ------------------------------------------------------------------------


def _in_processes(work: Callable[[Job], Done], jobs: Sequence[Job]) -> Iterator[Done]:
    """The results of all jobs, as they come, from one process on each core."""
    context = multiprocessing.get_context("spawn")
    processes = min(os.cpu_count() or 1, len(jobs))
    with ProcessPoolExecutor(processes, context, _prepare) as pool:
        try:
            for done in as_completed([pool.submit(work, job) for job in jobs]):
                yield done.result()
        except BaseException:
            _end_at_once(pool)
            raise


def _prepare() -> None:
    """Set up a process of the pool.

    Ctrl-C reaches every process of a terminal; the parent ends the others. The garbage collector
    need not look at the modules again and again, nor as often as it does by default.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    gc.set_threshold(GARBAGE, 10, 10)


def _end_at_once(pool: ProcessPoolExecutor) -> None:
    """End the processes of a pool, whatever they are doing, and let go of what they share.

    Whoever asked for the end may ask again, or end this process by force, when it takes long; the
    semaphores would then be left behind.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # one is enough: it is ending
    for process in multiprocessing.active_children():
        process.terminate()
    pool.shutdown(cancel_futures=True)


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, if there is one; call what this gives with how many are done."""
    columns: Iterable[Any] = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def _right(*names: str) -> list[Any]:
    return [Column(name, justify="right") for name in names]


def _plain(text: str) -> str:
    """Text that rich takes as it is."""
    return text.replace("[", r"\[")
