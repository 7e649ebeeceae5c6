"""Files with results: there whole or not at all, and a message where they cannot be written."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from dps.errors import StoreUnavailable
from flows.analysis.comparison import COMPARISON_FILE, read_comparison, write_comparison
from flows.analysis.finished import Finished
from flows.analysis.outcome import outcome
from flows.analysis.statistics.claims import CLAIMS_FILE, write_claims
from flows.config.base import ComparisonSection
from flows.execution.experiment import exclusive
from flows.files import open_own, read_bytes, write_whole
from flows.records.record import GRID_FILE, Record, write_grid
from flows.replication.charts import Chart, Dot
from flows.replication.findings import TEXT, Findings
from flows.replication.ttf import findings as ttf
from flows.replication.verdicts import Verdicts
from flows.replication.version import Version
from tests.flows.replication.test_ttf_claims import study
from tests.support.records import PRICES

CHART = Chart("curve", "A curve.", "x", "y", {"ours": [Dot(0, 0), Dot(1, 1)]})
VERDICTS = Verdicts(paper="ttf", command="", virtual=False, claims=())
DONE = Finished(Path(), Record(()), outcome(Record(()), PRICES))
STUDY = ttf.Study(ttf.CORRECTED, (DONE,), tuple(study()), (), 1)

WRITERS: dict[str, Callable[[Path], object]] = {
    "the list of trials": lambda folder: write_grid(folder, ["t"], 0),
    "what is compared by": lambda folder: write_comparison(folder, ComparisonSection()),
    "what is claimed": lambda folder: write_claims(folder, ()),
    "a chart": CHART.write,
    "findings": Findings("A paper", [], [], [], [], VERDICTS).write,
    "findings with charts": Findings("A paper", [], [], [], [CHART], VERDICTS).write,
    "findings of the first paper": lambda folder: ttf.write(
        {STUDY.title: STUDY}, [], [], folder, None, Version(full=False)
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_results_that_cannot_be_written_are_said_so(tmp_path: Path, writer: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreUnavailable, match=r"cannot be written to .*/file/.*what is recorded"):
        WRITERS[writer](tmp_path / "file" / "folder")


@pytest.mark.parametrize("name", [TEXT])
def test_every_file_of_the_findings_can_be_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(StoreUnavailable, match=f"cannot be written to .*/{name}"):
        ttf.write({STUDY.title: STUDY}, [], [], tmp_path, None, Version(full=False))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        (GRID_FILE, lambda folder: write_grid(folder, ["t"], 0)),
        (COMPARISON_FILE, lambda folder: write_comparison(folder, ComparisonSection())),
        (CLAIMS_FILE, lambda folder: write_claims(folder, ())),
    ],
)
def test_an_older_file_stays_until_the_new_one_is_whole(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    (tmp_path / name).write_text("older")
    room, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, most))
    try:
        with pytest.raises(StoreUnavailable, match="File too large"):
            write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))
    assert (tmp_path / name).read_text() == "older"
    assert [path.name for path in tmp_path.iterdir()] == [name], "what is torn takes up room"


def test_what_others_have_put_beside_a_file_is_not_written_to(tmp_path: Path) -> None:
    """A link with the name that a file had until it was whole, and one in its own place."""
    shared, mine = tmp_path / "shared", tmp_path / "mine"
    shared.mkdir()
    mine.write_text("mine")
    for name in (".report.html.part", "report.html", ".lock", "linked"):
        (shared / name).symlink_to(mine)
    write_whole(shared / "report.html", "a report", "the report")
    assert (shared / "report.html").read_text() == "a report"
    assert not (shared / "report.html").is_symlink()
    with pytest.raises(StoreUnavailable, match="cannot be written"), exclusive(shared):
        pass
    for how in ("w", "a", "r+b"):
        with pytest.raises(OSError, match="symbolic links"), open_own(shared / "linked", how):
            pass
    assert mine.read_text() == "mine"


def test_what_was_written_is_all_that_is_there(tmp_path: Path) -> None:
    write_comparison(tmp_path, ComparisonSection(baseline="chain"))
    assert read_comparison(tmp_path).baseline == "chain"
    write_whole(tmp_path / "deep" / "file", "text", "a text")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [COMPARISON_FILE, "deep", "file"]


@pytest.mark.parametrize("folder", ["/", ".", "..", "there"])
def test_a_folder_is_no_file_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    with pytest.raises(StoreUnavailable, match=r"^the report cannot be written to"):
        write_whole(Path(folder), "text", "the report")
    assert [*tmp_path.iterdir()] == [tmp_path / "there"]


def test_what_is_read_is_all_of_a_file_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100_000)
    assert read_bytes(path, 100_000) == b"x" * 100_000
    with pytest.raises(OSError, match="more than 99,999 bytes"):
        read_bytes(path, 99_999)


def test_a_file_that_would_have_to_be_waited_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As /proc/kmsg, which passes for a file.
    path = tmp_path / "file"
    os.mkfifo(path)
    monkeypatch.setattr(stat, "S_ISREG", lambda mode: True)
    writer = os.open(path, os.O_RDWR)
    try:
        with pytest.raises(BlockingIOError):
            read_bytes(path, 100)
    finally:
        os.close(writer)
