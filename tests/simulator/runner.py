"""Many random schedules on all cores, one again, or the hunt for the broken variants."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from tests.simulator.broken.variant import BUDGET, Caught, hunt
from tests.simulator.broken.variants import VARIANTS
from tests.simulator.network import Line
from tests.simulator.schedules.draw import named, numbered
from tests.simulator.schedules.strategies import CASES
from tests.simulator.simulate import Record, shrink, simulate

BATCH = 20  # schedules that a process is given at a time
SHRUNK = 3  # violations of one batch that are shrunk; more are only named
SHOWN = 10
GARBAGE = 10_000  # objects made and not yet freed, after which the newest are looked through

Job = TypeVar("Job")
Done = TypeVar("Done")


# -- many schedules --------------------------------------------------------------------------------


@dataclass(slots=True)
class Totals:
    """Counts over the schedules of one case, and a text about each violation."""

    schedules: int = 0
    faults: int = 0
    operations: int = 0
    violations: list[str] = field(default_factory=list)

    def add(self, other: Totals) -> None:
        """Add the counts of another batch."""
        self.schedules += other.schedules
        self.faults += other.faults
        self.operations += other.operations
        self.violations += other.violations

    def row(self) -> list[str]:
        """Cells of the table."""
        numbers = self.schedules, self.faults, self.operations, len(self.violations)
        return [f"{number:,}" for number in numbers]


def run_many(schedules: int, series: int, console: Console) -> bool:
    """Run a number of schedules, evenly over the cases, and print a table and the violations."""
    began = time.monotonic()
    cases, everything = {name: Totals() for name in CASES}, Totals()
    ranges = [
        (series, first, min(first + BATCH, schedules)) for first in range(0, schedules, BATCH)
    ]
    with _bar(schedules, "schedules") as advance:
        for batch in _in_processes(_run_batch, ranges):
            for name, totals in batch.items():
                cases[name].add(totals)
                everything.add(totals)
                advance(totals.schedules)
    table = Table("case", *_right("schedules", "faults", "operations", "violations"))
    for name, totals in cases.items():
        if totals.schedules:
            table.add_row(name, *totals.row())
    table.add_section()
    table.add_row("all", *everything.row())
    console.print(table)
    broken = everything.violations
    for text in broken[:SHOWN]:
        console.print(text, soft_wrap=True, markup=False, highlight=False)
    if len(broken) > SHOWN:
        print(f"\nand {len(broken) - SHOWN} more")
    print(f"{schedules} schedules in {time.monotonic() - began:.0f} s.")
    return not broken


def _run_batch(job: tuple[int, int, int]) -> dict[str, Totals]:
    series, first, end = job
    cases: dict[str, Totals] = {}
    shrunk = 0
    for number in range(first, end):
        record = simulate(numbered(number, series))
        broken = record.violation is not None
        text = [_in_words(record, shrunk < SHRUNK)] if broken else []
        shrunk += broken
        totals = Totals(1, record.struck.total(), record.operations, text)
        cases.setdefault(record.schedule.case.name, Totals()).add(totals)
    return cases


def _in_words(record: Record, shorten: bool) -> str:
    """A violation, and the shortest schedule that breaks the same promise."""
    less = (shrink(record) if shorten else record).schedule
    faults = "".join(f"\n  - {line}" for line in less.in_words())
    again = f"make simulate REPLAY={shlex.quote(less.name)}"
    return f"\n{record.schedule.name}: {record.violation}{faults}\n  {again}"


# -- one schedule ----------------------------------------------------------------------------------


def run_again(name: str) -> bool:
    """Run one schedule again, and print every message and fault."""
    schedule = named(name)
    record = simulate(schedule)
    print(f"{schedule.name}, in words:")
    for line in schedule.in_words() or ["no fault at all"]:
        print(f"  - {line}")
    print()
    for event in record.trace:
        print(_event(event))
    kept = f"No promise is broken ({record.operations} operations)."
    print(f"\n{record.violation or kept}")
    return record.violation is None


def _event(line: Line) -> str:
    seconds, what, source, target, message = line
    ends = f"{source} -> {target}" if target else source
    return f"{seconds:11.6f}  {what:10}  {ends:28}  {message}".rstrip()


# -- the broken variants ---------------------------------------------------------------------------


def run_mutants(console: Console) -> bool:
    """Run schedules until each broken variant is caught, and print a table."""
    began = time.monotonic()
    caught: dict[str, Caught | None] = {}
    with _bar(len(VARIANTS), "broken variants") as advance:
        for name, each in _in_processes(_hunt, list(VARIANTS)):
            caught[name] = each
            advance(1)
    table = Table("broken variant", "caught by", *_right("after"), "violation")
    for name in VARIANTS:
        each = caught[name]
        cells = (each.schedule, f"{each.after:,}", each.violation) if each else ("not caught",)
        table.add_row(name, *map(escape, cells))
    console.print(table)
    missed = sum(each is None for each in caught.values())
    print(
        f"{len(caught) - missed} of {len(caught)} broken variants caught within "
        f"{BUDGET:,} schedules each, in {time.monotonic() - began:.0f} s."
    )
    return not missed


def _hunt(name: str) -> tuple[str, Caught | None]:
    return name, hunt(VARIANTS[name])


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
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def _prepare() -> None:
    """Set up a process of the pool.

    Ctrl-C reaches every process of a terminal; the parent ends the others. The garbage collector
    need not look at the modules again and again, nor as often as it does by default.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    gc.set_threshold(GARBAGE, 10, 10)


@contextmanager
def _bar(total: int, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, if there is one; call what this gives with how many are done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    console = Console(file=sys.stderr)
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)


def _right(*names: str) -> list[Any]:
    return [Column(name, justify="right") for name in names]
