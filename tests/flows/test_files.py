"""Files with results: there whole or not at all, and a message where they cannot be written."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from dps.errors import StoreUnavailable
from flows.config.settings import ComparisonSection
from flows.files import open_own, write_whole
from flows.records.owner import exclusive
from flows.records.record import GRID_FILE, write_grid
from flows.statistics.comparison import QUESTIONS_FILE, Questions, read_questions, write_questions


@pytest.mark.parametrize(
    ("name", "write"),
    [
        (GRID_FILE, lambda folder: write_grid(folder, ["t"], 0)),
        (QUESTIONS_FILE, lambda folder: write_questions(folder, Questions())),
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
    with pytest.raises(StoreUnavailable, match=r"cannot be written to .*it keeps all records"):
        write(tmp_path / name)


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
    write_questions(tmp_path, Questions(comparison=ComparisonSection(baseline="chain")))
    assert read_questions(tmp_path).comparison.baseline == "chain"
    write_whole(tmp_path / "deep" / "file", "text", "a text")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["deep", "file", QUESTIONS_FILE]
