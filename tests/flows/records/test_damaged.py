"""Damaged files of a real experiment: named, never a traceback, and the other trials are shown.

`DPS_DAMAGED` sets how many cases there are, and `DPS_DAMAGED_SEED` which: they are new ones each
time, and so is the record; a failure says what was changed.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from dps.core.checksum import sealed, unsealed
from dps.errors import CheckpointCorrupt, ConfigurationError, StoreUnavailable
from dps.protocol.storage.manifest import find_saved
from flows.records.owner import NOTE, noted
from flows.records.record import EARLIER, EVENTS_FILE, GRID_FILE, read_trial
from tests.support.damage import (
    BYTES,
    DEEP,
    Ended,
    changed,
    dps,
    flipped,
    with_changed_line,
    without_checksums,
    working_in,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

CASES = int(os.environ.get("DPS_DAMAGED", "300"))
SEED = int(os.environ.get("DPS_DAMAGED_SEED", random.SystemRandom().randrange(1 << 32)))
SECONDS = 20.0  # of the processor for one command; most take a tenth of one, a report takes three
EVERY = 100  # so many cases to one report and one sync: they take longer

SMALL: dict[str, Any] = {
    "experiment": "small",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "training": {"workers": 1, "updates": 60, "compute_seconds": 0.0},
    "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    "recovery": {"durability": {"kind": "checkpoint", "every": 10}},
    "faults": [{"kind": "kill", "target": "server-0", "at_updates": 30, "back_after": 0.1}],
    "evaluation": {"every_seconds": 0.1},
    "seeds": [0, 1],
}
STRUCK, OTHER = "seed-0", "seed-1"
DAMAGED = f"{STRUCK} is left out, its record is damaged: "


def run(here: Path) -> str:
    """Run the experiment in a process of its own; return what it says."""
    (here / "small.yaml").write_text(yaml.safe_dump(SMALL))
    command = [sys.executable, "-m", "flows.cli", "run", "small.yaml"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("MLFLOW_TRACKING_URI", None)
    ended = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which `dps run` has recorded an experiment."""
    here = tmp_path_factory.mktemp("recorded")
    run(here)
    return here


@pytest.fixture
def here(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "here"))


def record(here: Path, trial: str = STRUCK) -> Path:
    return here / "results" / "small" / trial / EVENTS_FILE


def described(here: Path) -> Path:
    """The description beside the checkpoints of the trial that is struck."""
    (found,) = record(here).parent.glob("checkpoints/*/run.json")
    return found


# -- what is promised --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [(b'"accuracy":0.', b'"accuracy":1.'), (b'"staleness":[0,', b'"staleness":[0.')],
)
def test_one_flipped_bit_is_found_and_named(here: Path, before: bytes, after: bytes) -> None:
    data = record(here).read_bytes()
    assert sum((a ^ b).bit_count() for a, b in zip(before, after, strict=True)) == 1
    number = data[: data.index(before)].count(b"\n") + 1
    record(here).write_bytes(data.replace(before, after, 1))
    told = f"{EVENTS_FILE}, line {number} does not match its checksum"
    with working_in(here), noted(here / "results" / "small"):
        results, report = dps("results", "small"), dps("report", "small")
        compare = dps("compare", f"small/{STRUCK}", f"small/{OTHER}")
        status = dps("status", "small")
    for ended, code in ((results, 0), (report, 0), (compare, 2)):
        assert (ended.code, ended.trace) == (code, "")
        assert DAMAGED in ended.err
        assert told in ended.err
    assert OTHER in results.out
    assert f"small/{STRUCK}: no record of it is whole" in compare.err
    assert status.code == 0
    assert f"{STRUCK}  damaged" in status.out
    assert "1 done, 1 damaged" in status.out


def test_a_record_that_is_a_link_to_itself_is_damaged(here: Path) -> None:
    record(here).unlink()
    record(here).symlink_to(EVENTS_FILE)
    with working_in(here), noted(here / "results" / "small"):
        status, results = dps("status", "small"), dps("results", "small")
    for ended in (status, results):
        assert (ended.code, ended.trace) == (0, "")
    assert f"{STRUCK}  damaged" in status.out
    assert DAMAGED in results.err
    assert OTHER in results.out


def test_a_damaged_record_is_set_aside_and_its_trial_runs_again(here: Path) -> None:
    struck = flipped(record(here).read_bytes()[:-1], random.Random(SEED)) + b"\n"
    record(here).write_bytes(struck)
    old = without_checksums(record(here, OTHER).read_bytes())
    record(here, OTHER).write_bytes(old)
    said = run(here)
    kept = here / "results" / "small" / EARLIER / f"{STRUCK}.damaged"
    assert "for it is damaged" in said
    assert (kept / EVENTS_FILE).read_bytes() == struck
    assert read_trial(record(here)).ended is not None
    assert record(here, OTHER).read_bytes() == old, "a record without checksums counts as before"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        b"3",
        b"[]",
        b"{}",
        DEEP.encode(),
        b"\xff\xfe",
        b'{"!":"annotations","v":"x"}',
        b'{"@":"Run","v":[]}',
        b'{"@":"Run","v":3}',
        b'{"@":"SGD","v":[0.1]}',
        b'{"@":"Unheard","v":[0.1]}',
        b'{"@":["Run"],"v":[0.1]}',
        b'{"@":"%s","v":[]}' % (b"x" * 100_000),
        b'{"@":"\\u001b[2J","v":[]}',
        b'{"$":7}',
        b'{"%":3}',
    ],
)
def test_resume_says_what_is_wrong_with_a_description(here: Path, text: bytes) -> None:
    path = described(here)
    path.write_bytes(text)
    with working_in(here):
        ended = dps("resume", f"small/{STRUCK}")
    assert (ended.code, ended.trace) == (2, "")
    assert str(path) in ended.err
    assert len(ended.err) < 2000
    assert ended.err.rstrip("\n").isprintable()


def test_every_flipped_bit_of_the_checksum_of_a_description_is_found(here: Path) -> None:
    path = described(here)
    whole = path.read_bytes()
    for at, bit in product(range(len(whole) - 20, len(whole)), range(8)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
        with pytest.raises((CheckpointCorrupt, ConfigurationError), match=r"run\.json"):
            find_saved(str(path.parent))


@pytest.mark.parametrize("place", range(10))
def test_resume_names_each_part_of_an_old_description_that_is_of_another_type(
    here: Path, place: int
) -> None:
    path = described(here)
    said = json.loads(unsealed(path.read_bytes())[0])
    said["v"][place] = {"@": "ASP", "v": []} if place in (3, 4, 6) else ["odd"]
    path.write_text(json.dumps(said))
    with working_in(here):
        ended = dps("resume", f"small/{STRUCK}")
    assert (ended.code, ended.trace) == (2, "")
    assert f"{path} is damaged" in ended.err


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(here: Path) -> None:
    path = str(described(here).parent)
    newest, before, *_ = sorted(described(here).parent.glob("shard-0/*.json"), reverse=True)
    whole = find_saved(path)
    for damage in (b"", b"[]", b'{"file": "/"}', DEEP.encode(), newest.read_bytes()[:-40]):
        newest.write_bytes(damage)
        saved = find_saved(path)
        assert [Path(refused.path) for refused in saved.refused] == [newest]
        assert saved.updates <= whole.updates
    before.write_bytes(b"{}")
    with pytest.raises(StoreUnavailable, match="no whole checkpoint of every shard"):
        find_saved(path)


# -- anything anywhere -------------------------------------------------------------------------


@dataclass
class Lab:
    """An experiment whose files are damaged one at a time, and what came of it."""

    here: Path
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    change: str = ""

    def tried(self, case: str, *arguments: str) -> Ended:
        """Run a command, and note if it does what none may do."""
        ended = dps(*arguments)
        self.counts[f"dps {arguments[0]}"] += 1
        self.slowest = max(self.slowest, ended.seconds)
        if ended.trace:
            self.note(case, ended, ended.trace)
        elif ended.code not in (0, 2):
            self.note(case, ended, f"exit code {ended.code}")
        elif ended.code == 2 and not ended.err.startswith("dps: "):
            self.note(case, ended, "no message")
        elif ended.seconds > SECONDS:
            self.note(case, ended, f"it took {ended.seconds:.1f} s")
        elif max(len(ended.out), len(ended.err)) > 50_000:
            self.note(case, ended, "more than anybody reads")
        return ended

    def note(self, case: str, ended: Ended | None, what: str) -> None:
        said = ""
        if ended is not None:
            said = f"{' '.join(ended.arguments)}: {ended.code}: {ended.out} {ended.err}"
        self.wrong.append(f"{case}: {self.change}\n{said[:3000]}\n{what}")

    @contextmanager
    def with_file(self, path: Path, data: bytes) -> Iterator[None]:
        """Have other bytes in a file for a time."""
        before = path.read_bytes()
        path.write_bytes(data)
        pairs = enumerate(zip(before, data, strict=False))
        at = next((at for at, (old, new) in pairs if old != new), min(len(before), len(data)))
        self.change = f"from byte {at} on {before[at : at + 100]!r} became {data[at : at + 100]!r}"
        try:
            yield
        finally:
            path.write_bytes(before)
            self.change = ""

    # -- kinds of damage -------------------------------------------------------------------

    def bytes_of_a_record(self, number: int) -> None:
        path = record(self.here)
        data = path.read_bytes()
        way = self.rng.choice(BYTES)
        damaged = way(data, self.rng)
        whole, rest = damaged.rpartition(b"\n")[::2]
        # Whole lines that are missing, or there twice, are whole.
        found = bool(rest) or not set(whole.split(b"\n")) <= set(data.split(b"\n"))
        self._look(f"{number}: record, {way.__name__}", path, damaged, number, found)

    def values_of_a_record(self, number: int) -> None:
        path, seal = record(self.here), self.rng.random() < 0.5
        damaged = with_changed_line(path.read_bytes(), self.rng, seal)
        case = f"{number}: record, changed, {'sealed' if seal else 'old'}"
        # Values may be such as a run could have written.
        self._look(case, path, damaged, number, found=False)

    def _look(self, case: str, path: Path, damaged: bytes, number: int, found: bool) -> None:
        with self.with_file(path, damaged):
            results = self.tried(case, "results", "small")
            self._names(case, results, found)
            with noted(path.parent.parent):
                status = self.tried(case, "status", "small")
            if OTHER not in status.out:
                self.note(case, status, "the other trial is not shown")
            if DAMAGED in results.err and "sealed" not in case and "damaged" not in status.out:
                self.note(case, status, "the damaged trial is not told")
            self.tried(case, "compare", f"small/{STRUCK}", f"small/{OTHER}")
            if number % 10 == 0:
                self.tried(case, "results", "small", "--format", "csv")
            if number % EVERY == 0:
                self._names(case, self.tried(case, "report", "small"), found, shown=False)
                self._names(case, self.tried(case, "sync", "small"), found, shown=False)

    def _names(self, case: str, ended: Ended, found: bool, shown: bool = True) -> None:
        told = DAMAGED in ended.err or f"{STRUCK} is failed and left out" in ended.out
        if shown and found and not told:
            self.note(case, ended, "the damaged trial is not named")
        if ended.code or (shown and OTHER not in ended.out):
            self.note(case, ended, "the other trial is not shown")

    def description(self, number: int) -> None:
        path = described(self.here)
        data = path.read_bytes()
        if self.rng.random() < 0.5:
            way = self.rng.choice(BYTES)
            case, damaged = f"{number}: run.json, {way.__name__}", way(data, self.rng)
        else:
            text = changed(unsealed(data)[0].decode(), self.rng)
            text = sealed(text) if self.rng.random() < 0.5 else text
            case, damaged = f"{number}: run.json, changed", text.encode()
        with self.with_file(path, damaged):
            ended = self.tried(case, "resume", f"small/{STRUCK}")
            if ended.code != 2:  # its record has an end, so it never goes on
                self.note(case, ended, "no refusal")
            if "changed" not in case and damaged != data and str(path) not in ended.err:
                self.note(case, ended, "the damaged file is not named")

    def checkpoint(self, number: int) -> None:
        folder = described(self.here).parent
        path = self.rng.choice(sorted(folder.glob("shard-*/*")))
        way = self.rng.choice(BYTES)
        case = f"{number}: {path.name}, {way.__name__}"
        data = path.read_bytes()
        damaged = way(data, self.rng)
        with self.with_file(path, damaged):
            self.tried(case, "resume", f"small/{STRUCK}")
            try:
                saved = find_saved(str(folder))
            except StoreUnavailable:
                self.counts["no checkpoint left"] += 1
            except Exception as error:  # noqa: BLE001 (whatever it is)
                self.note(case, None, repr(error))
            else:
                self.counts["fell back to the one before"] += bool(saved.refused)

    def small_file(self, number: int) -> None:
        folder = self.here / "results" / "small"
        name = self.rng.choice([GRID_FILE, "comparison.json", "claims.json", NOTE])
        with noted(folder):
            path = folder / name
            data = path.read_bytes()
            if self.rng.random() < 0.5:
                way = self.rng.choice(BYTES)
                case, damaged = f"{number}: {name}, {way.__name__}", way(data, self.rng)
            else:
                text = changed(unsealed(data)[0].decode(), self.rng)
                case, damaged = f"{number}: {name}, changed", text.encode()
            with self.with_file(path, damaged):
                for arguments in (["results", "small"], ["status", "small"], ["status"]):
                    ended = self.tried(case, *arguments)
                    named = name in ended.err or NOTE in ended.err
                    if name == GRID_FILE and "changed" not in case and not named:
                        self.note(case, ended, "the damaged list is not named")

    def tracking_store(self, number: int) -> None:
        mlruns = self.here / "mlruns"
        kept = self.here / "kept"
        mlruns.rename(kept)
        # Another folder each time, for MLflow keeps what it has open.
        place = self.here / f"try-{number}"
        place.mkdir()
        (place / "results").symlink_to(self.here / "results")
        shutil.copytree(kept, place / "mlruns")
        path = place / "mlruns" / "mlflow.db"
        data = path.read_bytes()
        way = self.rng.choice([*BYTES, _other_schema, _no_database])
        case = f"{number}: mlflow.db, {way.__name__}"
        path.write_bytes(way(data, self.rng))
        try:
            with working_in(place):
                ended = self.tried(case, "sync", "small")
            if ended.code == 2 and "tracking store" not in ended.err:
                self.note(case, ended, "the store is not named")
            self.counts[f"store refused: {ended.code == 2}"] += 1
        finally:
            shutil.rmtree(place)
            kept.rename(mlruns)


def _no_database(data: bytes, rng: random.Random) -> bytes:
    return rng.choice([b"", b"no database", bytes(8192), b"SQLite format 3\0" + rng.randbytes(99)])


def _other_schema(data: bytes, rng: random.Random) -> bytes:
    import sqlite3

    with sqlite3.connect(":memory:") as connection:
        connection.deserialize(data)
        table = rng.choice(["runs", "tags", "experiments", "alembic_version", "params"])
        connection.execute(
            rng.choice([f"DROP TABLE {table}", f"DELETE FROM {table}"])
            if rng.random() < 0.7
            else "UPDATE alembic_version SET version_num = 'later'"
        )
        connection.commit()
        return connection.serialize()


def test_whatever_is_damaged_is_named_and_the_rest_is_shown(here: Path) -> None:
    print(f"DPS_DAMAGED_SEED={SEED}")
    lab = Lab(here, random.Random(SEED))
    kinds: list[tuple[int, Callable[[Lab, int], None]]] = [
        (33, Lab.bytes_of_a_record),
        (38, Lab.values_of_a_record),
        (12, Lab.description),
        (7, Lab.checkpoint),
        (9, Lab.small_file),
        (1, Lab.tracking_store),
    ]
    weights = [weight for weight, _ in kinds]
    with working_in(here):
        for number in range(CASES):
            (kind,) = lab.rng.choices([kind for _, kind in kinds], weights)
            lab.counts[kind.__name__] += 1
            kind(lab, number)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{dict(lab.counts)}; slowest {lab.slowest:.2f} s; peak {peak:.0f} MiB")
    told = "\n\n".join(lab.wrong[:10])
    assert not lab.wrong, f"seed {SEED}: {len(lab.wrong)} wrong of {CASES}\n{told}"
