"""Supervised trainings whose driver or scheduler is killed at a random moment, and what that costs.

Each training counts as those of the soak do: every update adds to a cell that no other one touches,
so the final weights tell which updates are in them, and how often. Workers note in files what they
were told is safe, so it is known what was acknowledged when the processes were killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from dps.cluster.backends.fork_server import environment
from dps.cluster.names import NodeSpec
from dps.cluster.supervision.supervisor import supervise
from dps.core.rules.rule import SGD
from dps.errors import ConfigurationError, DpsError
from dps.events import Returned
from dps.protocol.durabilities.chain import Chain
from dps.protocol.durabilities.checkpoint import Checkpoint
from dps.protocol.durabilities.layered import Layered
from dps.protocol.recovery import Recovery
from flows.records.live import eventually
from tests.soak.counting import (
    DTYPE,
    Task,
    cells_of,
    check_counts,
    count,
    parameters,
    read_notes,
    require,
)
from tests.soak.soak import left_behind

if TYPE_CHECKING:
    from dps.cluster.driver.parameter_server import ParameterServer
    from dps.cluster.node.worker import Worker
    from dps.cluster.supervision.session import Session

VICTIMS = ("driver", "scheduler")
CHECKPOINTS = "checkpoints"  # the folder of all of them

SHARDS = 2
WORKERS = 2
CELLS = 5_000  # of each worker: more than it pushes while a training lasts
THINK_SECONDS = 0.002
LONGEST_SECONDS = 3.0  # from the first acknowledged update to the kill, at most
AFTERWARDS = 50  # acknowledged updates of each worker after the return
PRELOAD = ("dps.cluster.driver.parameter_server", "tests.soak.counting")


@dataclass(frozen=True, slots=True)
class Begun:
    """How an incarnation of a training begins: whom to kill, and what each shard has by worker.

    `group` is the name of its parameter server, and of the folder of its checkpoints.
    """

    driver: int
    scheduler: int
    group: str
    applied: list[list[int]]


@dataclass(frozen=True, slots=True)
class Setting:
    """How trainings are supervised, and what their shards are restored from.

    Attributes
    ----------
    every
        The interval of checkpoints, in updates.
    standby
        Whether the next driver is kept ready.
    layered
        Whether checkpoints are below a chain. No ack waits for them then, so the interval does not
        bound what is lost.
    """

    every: int
    standby: bool = False
    layered: bool = False

    def recovery(self, folder: Path) -> Recovery:
        """The recovery of a training whose files are in a folder."""
        checkpoint = Checkpoint(every=self.every, path=str(folder / CHECKPOINTS))
        return Recovery(Layered(Chain(2), checkpoint) if self.layered else checkpoint)


@dataclass(frozen=True, slots=True)
class Return:
    """What a kill came to.

    Attributes
    ----------
    acked
        How many updates had been acknowledged when the processes were killed.
    seconds
        From the kill to the first acknowledged update after it.
    up
        From when the loss was noticed to when the parameter server was up again.
    lost
        How many of those acknowledged each shard did not have any more.
    told
        How many it was said to lack at least.
    missing
        How many of those acknowledged each shard does not have in the end.
    """

    whom: str
    acked: int
    seconds: float
    up: float
    lost: tuple[int, ...]
    told: tuple[int, ...]
    missing: tuple[int, ...]


def run_returns(victims: Sequence[str], times: int, seed: int, setting: Setting) -> int:
    """Kill each victim `times` times, and print the results; return 1 at a broken promise.

    Parameters
    ----------
    seed
        It draws the moments of the kills.
    """
    for each in victims:
        if each not in VICTIMS:
            raise ConfigurationError(f"{each}: expected {' or '.join(VICTIMS)}")
    found: list[Return] = []
    for number in range(times):
        for each in victims:
            try:
                found.append(_one(each, random.Random(f"{seed}/{number}/{each}"), setting))
            except (DpsError, OSError, TimeoutError) as error:
                print(f"VIOLATION: {each}, kill {number + 1}, seed {seed}: {error}", flush=True)
                return 1
            print(_line(number + 1, found[-1], setting.every), flush=True)
    print(
        table(found, setting.every),
        "No process and no file is left behind.",
        sep="\n\n",
        flush=True,
    )
    return 0


def table(found: Sequence[Return], every: int) -> str:
    """What all kills came to, as text."""
    lines = [
        "",
        f"{'killed':<10} {'times':>5} {'first ack: median':>18} {'longest':>8} "
        f"{'lost of ' + str(every) + ': median':>19} {'most':>5} {'told: median':>13}",
    ]
    for whom in dict.fromkeys(each.whom for each in found):
        of_whom = [each for each in found if each.whom == whom]
        seconds = [each.seconds for each in of_whom]
        lost = [max(each.lost) for each in of_whom]
        told = [max(each.told) for each in of_whom]
        lines.append(
            f"{whom:<10} {len(of_whom):>5} {median(seconds):>16.2f} s {max(seconds):>6.2f} s "
            f"{median(lost):>19g} {max(lost):>5} {median(told):>13g}"
        )
    return "\n".join(lines)


def _line(number: int, each: Return, every: int) -> str:
    return (
        f"{number:>3} {each.whom:<9} killed after {each.acked:>5} acked updates: the next after "
        f"{each.seconds:5.2f} s (up after {each.up:5.2f} s), "
        f"lost {_numbers(each.lost)} of {every}, told {_numbers(each.told)}, "
        f"missing in the end {_numbers(each.missing)}; each update once"
    )


def _numbers(numbers: Iterable[int]) -> str:
    return "+".join(map(str, numbers))


# -- one training, and its kill ------------------------------------------------------------------


def _one(whom: str, draw: random.Random, setting: Setting) -> Return:
    """Supervise a training whose driver or scheduler is killed, and check what has become of it."""
    with tempfile.TemporaryDirectory(prefix="dps-") as name:
        folder, temporary = Path(name), Path(name) / "tmp"
        temporary.mkdir()
        told: list[Returned] = []
        killer = _Killer(folder, whom, draw.uniform(0, LONGEST_SECONDS))
        with environment({"TMPDIR": str(temporary)}):
            work, standby = partial(train, folder, setting), setting.standby
            ready = PRELOAD if standby else None
            final = supervise(work, on_return=told.append, standby=standby, preload=ready)
        killer.join()
        left = [str(process) for pid in killer.drivers for process in left_behind(pid)]
        left += [str(path) for path in temporary.iterdir()]
        require(not left, f"left behind: {', '.join(left)}")
        require(len(told) == 1, f"{len(told)} returns were told, expected 1")
        return _checked(folder, whom, setting, killer, told[0], final)


def _checked(
    folder: Path,
    whom: str,
    setting: Setting,
    killer: _Killer,
    told: Returned,
    final: list[set[int]],
) -> Return:
    """Compare what workers were told with what each shard had afterwards, and has in the end."""
    before, after = (read_notes(_notes(folder, number)) for number in range(2))
    saved = [_cells(of_shard) for of_shard in _begun(folder, 1).applied]
    lost = tuple(len(before.safe - cells) for cells in saved)
    for shard, number in enumerate(lost):
        require(
            number <= setting.every or setting.layered,
            f"shard {shard} has lost {number} updates, of {setting.every} at most",
        )
        require_newest(folder / CHECKPOINTS / _begun(folder, 0).group, shard, len(saved[shard]))
        require(
            told.lost[shard] <= len(before.pushed - saved[shard]),
            f"shard {shard} was said to have lost {told.lost[shard]} updates, and has not",
        )
    missing = []
    for shard, cells in enumerate(final):
        pushed = saved[shard] | after.pushed
        require(cells <= pushed, f"shard {shard} has what it was not sent: {cells - pushed}")
        gone = (before.safe | after.safe) - cells
        require(
            gone <= before.safe - saved[shard],
            f"shard {shard} lacks what was acknowledged after the return",
        )
        missing.append(len(gone))
    acked, up = len(before.safe), told.seconds
    return Return(whom, acked, killer.seconds, up, lost, told.lost, tuple(missing))


def require_newest(folder: Path, shard: int, version: int) -> None:
    """A shard goes on from the newest complete checkpoint of the parameter server of before."""
    # A manifest is published last, and its name begins with its place in the order.
    manifest = max((folder / f"shard-{shard}").glob("*.json"), key=lambda path: path.name)
    newest = json.loads(manifest.read_text())["version"]
    require(
        version >= newest,
        f"shard {shard} has gone back to version {version}, though {newest} was complete",
    )


class _Killer:
    """Kills a process of a training, in a thread of its own, and has it end after its return.

    Attributes
    ----------
    seconds
        From the kill to the first acknowledged update after it; once it has ended.
    drivers
        The processes of the drivers that there were.
    """

    def __init__(self, folder: Path, whom: str, after: float) -> None:
        self.seconds = 0.0
        self.drivers: list[int] = []
        self._folder = folder
        self._whom = whom
        self._after = after
        self._kill = Future[None]()
        threading.Thread(target=self._run, daemon=True).start()

    def join(self) -> None:
        """Wait until it has ended; raise what it has raised."""
        self._kill.result()

    def _run(self) -> None:
        try:
            self._kill_and_wait()
        except BaseException as error:  # noqa: BLE001 (raised by `join`)
            self._kill.set_exception(error)
        else:
            self._kill.set_result(None)

    def _kill_and_wait(self) -> None:
        self._acked(0, 1)
        begun = _begun(self._folder, 0)
        time.sleep(self._after)
        os.kill(begun.driver if self._whom == "driver" else begun.scheduler, signal.SIGKILL)
        killed = time.monotonic()
        self._acked(1, 1)
        self.seconds = time.monotonic() - killed
        self.drivers = [begun.driver, _begun(self._folder, 1).driver]
        self._acked(1, AFTERWARDS * WORKERS)
        _flag(self._folder).touch()

    def _acked(self, number: int, updates: int) -> None:
        """Wait until workers of an incarnation were told that so many updates are safe."""
        eventually(
            lambda: len(read_notes(_notes(self._folder, number)).safe) >= updates,
            f"{updates} updates of incarnation {number}",
            120.0,
        )


# -- what runs in the driver and in the workers --------------------------------------------------


def train(folder: Path, setting: Setting, session: Session) -> list[set[int]]:
    """Train until told to stop; return the updates, by cell, that each shard has in the end."""
    from dps.cluster.backends.local import LocalCluster

    recovery = setting.recovery(folder)
    names = [f"server-{shard}" for shard in range(SHARDS)]
    names += [f"replica-{shard}-1" for shard in range(SHARDS) if setting.layered]
    specs = [NodeSpec(name, "server") for name in names]
    specs += [NodeSpec(f"worker-{n}", "worker") for n in range(WORKERS)]
    with (
        LocalCluster(specs, PRELOAD) as cluster,
        session.parameter_server(
            cluster.client,
            parameters(SHARDS, WORKERS * CELLS),
            shards=SHARDS,
            optimizer=SGD(1.0),
            recovery=recovery,
        ) as ps,
    ):
        _note_beginning(folder, session.returns, cluster.pids["scheduler"], ps)
        work = partial(_count, folder, session.returns)
        cluster.client.gather(ps.run(work, workers=WORKERS))
        return _audited(ps)


def _count(folder: Path, returns: int, worker: Worker) -> None:
    """Push the cells of this worker that no shard has yet."""
    require(cells_of(worker.layout) >= WORKERS * CELLS, "too few cells")
    cells = range(worker.index * CELLS, (worker.index + 1) * CELLS)[worker.done :]
    notes, flag = _note_file(folder, returns, worker.index), _flag(folder)
    seed = f"{returns}/{worker.index}"
    count(Task(worker.layout, cells, str(notes), str(flag), THINK_SECONDS, seed), worker)


def _audited(ps: ParameterServer) -> list[set[int]]:
    """The cells that each shard has, each of which must be there once, as its audit says."""
    weights, found = ps.pull(), []
    for shard, reply in enumerate(ps.audit()):
        buffer, _ = ps.group.layout.gather(shard, weights)
        check_counts(f"shard {shard}", buffer)
        values = buffer.view(DTYPE)
        require(reply is not None, f"shard {shard} is down in the end")
        assert reply is not None
        applied = sum(reply.applied.values())
        require(
            reply.version == applied == values[0],
            f"shard {shard}: version {reply.version}, {applied} updates by worker, {values[0]:g}",
        )
        found.append(set(np.flatnonzero(values[1:]).tolist()))
    return found


def _note_beginning(folder: Path, returns: int, scheduler: int, ps: ParameterServer) -> None:
    states = ps.saved.states if ps.saved is not None else ()
    names = [f"worker-{number}" for number in range(WORKERS)]
    applied = [
        [state.workers[name].applied if name in state.workers else 0 for name in names]
        for state in states
    ]
    whole = folder / f"begun-{returns}.json"
    part = whole.with_suffix(".tmp")
    part.write_text(json.dumps(asdict(Begun(os.getpid(), scheduler, ps.name, applied))))
    part.replace(whole)


def _begun(folder: Path, number: int) -> Begun:
    return Begun(**json.loads((folder / f"begun-{number}.json").read_text()))


def _cells(applied: Sequence[int]) -> set[int]:
    """The updates of which a shard has so many of each worker: the first ones."""
    return {w * CELLS + cell for w, number in enumerate(applied) for cell in range(number)}


def _notes(folder: Path, number: int) -> list[Path]:
    files = (_note_file(folder, number, worker) for worker in range(WORKERS))
    return [path for path in files if path.exists()]


def _note_file(folder: Path, number: int, worker: int) -> Path:
    return folder / f"notes-{number}-{worker}"


def _flag(folder: Path) -> Path:
    return folder / "stop"
