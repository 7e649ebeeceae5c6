"""The soak: rounds of real faults over all strategies for so many minutes, and their sum.

The rounds run in a driver process of their own (this module as a script), so that the command can
see from outside what a driver leaves behind: no process of its session, and no file.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count, cycle
from pathlib import Path

import pandas as pd
import psutil

from benchmarks.live import TookTooLong, eventually
from dps.core.consistency import BSP, SSP
from dps.core.replay import Continue
from dps.errors import ConfigurationError, DpsError
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.layered import Layered
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import Recovery
from dps.recovery.worker_cache import WorkerCache
from flows.records.record import EVENTS_FILE, EventWriter
from tests.soak.pool import Pool, require_flat
from tests.soak.round import Case, Result, Round

GONE_SECONDS = 10.0
_LAYER = Checkpoint(every=20)
CASES = (
    Case("chain(2)", Recovery(Chain(2))),
    Case("checkpoint", Recovery(Checkpoint(every=20))),
    Case("stateless", Recovery(SharedStore(), Continue())),
    Case("chain(3)", Recovery(Chain(3))),
    Case("none", Recovery()),
    Case("chain(2) SSP(4)", Recovery(Chain(2)), SSP(4)),
    Case("checkpoint, sync", Recovery(Checkpoint(every=20, mode="sync"))),
    Case("chain(2) + worker buffer", Recovery(Chain(2), Continue(buffer="worker"))),
    Case("chain(3) BSP", Recovery(Chain(3)), BSP()),
    Case("checkpoint + mailbox", Recovery(Checkpoint(every=20), Continue())),
    Case("stateless SSP(4)", Recovery(SharedStore(), Continue()), SSP(4)),
    Case("checkpoint, all shards", Recovery(Checkpoint(every=20, scope="all"))),
    Case("worker cache", Recovery(WorkerCache())),
    Case("chain(2), sums of 4", Recovery(Chain(2, aggregate=4))),
    Case("chain(3), any reads", Recovery(Chain(3, reads="any"))),
    Case("stateless, store too", Recovery(SharedStore(), Continue()), both=True),
    Case("chain(2) + mailbox", Recovery(Chain(2), Continue())),
    Case("stateless, two stores", Recovery(SharedStore(stores=2), Continue())),
    Case("chain(2) over checkpoint", Recovery(Layered(Chain(2), _LAYER)), both=True),
    Case(
        "stateless over checkpoint", Recovery(Layered(SharedStore(), _LAYER), Continue()), both=True
    ),
)


def soak(minutes: float, seed: int, first: int, faults: int, only: Sequence[str]) -> int:
    """Run the soak in a driver of its own.

    Return the exit code: 1 if a promise was broken, or something is left behind.

    Parameters
    ----------
    first
        The number of the first round; seed and number of a round draw its faults.
    only
        Names of the cases to take; all of them if there are none.
    """
    chosen(only)
    folder = Path(tempfile.mkdtemp(prefix="dps-soak-"))
    settings = [str(minutes), str(seed), str(first), str(faults), str(folder), *only]
    command = [sys.executable, "-m", __name__, *settings]
    temporary = folder / "tmp"
    temporary.mkdir()
    with subprocess.Popen(
        command, start_new_session=True, env={**os.environ, "TMPDIR": str(temporary)}
    ) as driver:
        try:
            code = driver.wait()
        except KeyboardInterrupt:
            driver.terminate()  # what belongs to it ends and is removed with it
            driver.wait()
            shutil.rmtree(folder)
            raise
    left = [*map(str, left_behind(driver.pid)), *map(str, sorted(temporary.iterdir()))]
    for each in left:
        print(f"left behind: {each}")
    if code == 0 and not left:
        print("No process and no file is left behind.")
        shutil.rmtree(folder)
    return 1 if left else code


def chosen(only: Sequence[str]) -> list[Case]:
    """The cases of these names, all of them if none are given."""
    by_name = {case.name: case for case in CASES}
    unknown = [name for name in only if name not in by_name]
    if unknown:
        raise ConfigurationError(f"no strategy {unknown[0]!r}; there are: {', '.join(by_name)}")
    return [by_name[name] for name in only] or list(CASES)


def left_behind(session: int) -> list[psutil.Process]:
    """The processes of a session that do not end within a bound."""
    with suppress(TookTooLong):
        eventually(lambda: not _members(session), "end of all processes", GONE_SECONDS)
    return _members(session)


def _members(session: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(OSError):
            found += [process] if os.getsid(process.pid) == session else []
    return found


# -- the driver ----------------------------------------------------------------------------------


def drive(
    minutes: float, seed: int, first: int, faults: int, folder: Path, only: Sequence[str]
) -> int:
    """Run rounds until the time is up; print a line for each and a table of all."""
    cases = chosen(only)
    results: list[Result] = []
    until = time.monotonic() + 60 * minutes
    code = 0
    with Pool() as pool:
        try:
            for number, case in _rounds(cases, first, until):
                results.append(_round(number, case, seed, faults, pool, folder))
                pool.fill()
                pool.measure()
            require_flat(pool)
        except (DpsError, OSError, TimeoutError) as error:
            print(f"VIOLATION: {error}\nIts events are kept in {folder}.", flush=True)
            code = 1
        print(table(results), "", "from the first third to the end, between rounds:", sep="\n")
        print(pool.held(), flush=True)
    return code


def _rounds(cases: Sequence[Case], first: int, until: float) -> Iterator[tuple[int, Case]]:
    """Rounds until the time is up, and each case once in any event."""
    for number, case in zip(count(first), cycle(cases), strict=False):
        if number >= first + len(cases) and time.monotonic() > until:
            return
        yield number, case


def _round(number: int, case: Case, seed: int, faults: int, pool: Pool, folder: Path) -> Result:
    here = folder / f"round-{number}"
    here.mkdir()
    name = f"round {number:>3}  {case.name:<25} seed {seed}/{number}"
    began = time.monotonic()
    running = Round(case, f"{seed}/{number}", pool, here, faults)
    try:
        result = running.run()
    except BaseException:
        print(
            f"{name}\nTo repeat: python -m tests.soak --minutes 0 --seed {seed} "
            f"--first {number} --faults {faults} --only {shlex.quote(case.name)}",
            flush=True,
        )
        with EventWriter(here / EVENTS_FILE) as write:
            for event in running.watch.record.events:
                write(event)
        raise
    shutil.rmtree(here)
    counts = ", ".join(f"{n} {what}" for what, n in list(result.counts().items())[2:])
    print(f"{name:<48} {counts} ({time.monotonic() - began:.0f} s)", flush=True)
    return result


def table(results: Sequence[Result]) -> str:
    """The sums by strategy, as text."""
    if not results:
        return ""
    sums = pd.DataFrame([result.counts() for result in results]).groupby("strategy", sort=False)
    whole = sums.sum()
    whole.loc["all"] = whole.sum()
    times = [(t.kind, result.case, t.rto_seconds) for result in results for t in result.recoveries]
    seconds = pd.DataFrame(times, columns=["fault", "strategy", "seconds"])
    recoveries = seconds.groupby(["fault", "strategy"], sort=False).seconds.agg(["median", "max"])
    hit = Counter(f"{each.kind} {each.part}" for result in results for each in result.struck)
    told = ", ".join(f"{number} × {what}" for what, number in hit.most_common())
    return f"\n{whole.to_string()}\n\n{recoveries.round(3).to_string()}\n\nfaults: {told}"


if __name__ == "__main__":
    minutes, seed, first, faults, folder, *only = sys.argv[1:]
    sys.exit(drive(float(minutes), int(seed), int(first), int(faults), Path(folder), only))
