"""The tracking store as a file: made whole, refused if damaged or of another version of MLflow."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dps.errors import StoreUnavailable
from flows.tracking.store import (
    default_uri,
    refuse_other_schema,
    require_database,
    require_reachable,
)
from flows.tracking.tracker import Tracker
from tests.support.damage import database_with_a_name_that_is_no_text
from tests.support.stores import with_store


@pytest.fixture(scope="module")
def made_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("here")
    Tracker("demo", here)
    return here


def relabel(here: Path, schema: str) -> tuple[Path, bytes]:
    path = here / "mlruns" / "mlflow.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (schema,))
        connection.commit()
    return path, path.read_bytes()


def test_one_of_this_version_and_a_new_one_are_fine(made_here: Path, tmp_path: Path) -> None:
    refuse_other_schema(made_here / "mlruns" / "mlflow.db")
    refuse_other_schema(tmp_path / "none.db")
    sqlite3.connect(tmp_path / "empty.db").close()
    refuse_other_schema(tmp_path / "empty.db")


def test_whether_a_new_one_can_be_written_is_tried_without_making_it(tmp_path: Path) -> None:
    require_reachable(default_uri(tmp_path))
    assert not list((tmp_path / "mlruns").iterdir())


def test_a_name_that_is_no_text_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "mlruns" / "mlflow.db"
    database_with_a_name_that_is_no_text(path)
    with pytest.raises(
        StoreUnavailable,
        match=r"mlflow\.db cannot be used: a name in it is no text.*Move the file away",
    ):
        require_reachable(default_uri(tmp_path))
    with pytest.raises(StoreUnavailable, match="Move the file away"):
        require_database(path)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("451aebb31d03", r"older MLflow.*cp .*mlflow\.db\.bak && mlflow db upgrade sqlite:///"),
        ("ffffffffffff", "newer MLflow.*Install that version"),
    ],
)
def test_another_version_is_refused_and_left_as_it_is(
    made_here: Path, schema: str, told: str
) -> None:
    path, before = relabel(made_here, schema)
    with pytest.raises(StoreUnavailable, match=told):
        Tracker("demo", made_here)
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "zeros", "no table", "no schema", "no database"])
def test_a_damaged_one_is_named_with_what_to_do(
    tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    here = with_store(tmp_path)
    path = here / "mlruns" / "mlflow.db"
    with closing(sqlite3.connect(path)) as connection:
        if damage == "no table":
            connection.execute("DROP TABLE runs")
        if damage == "no schema":
            connection.execute("ALTER TABLE alembic_version RENAME COLUMN version_num TO number")
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'alembic_version'"
        ).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        connection.commit()
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    if damage == "zeros":
        path.write_bytes(data[: size * (root - 1)] + bytes(size) + data[size * root :])
    if damage == "no database":
        path.write_bytes(b"what was here before")
    capfd.readouterr()
    with pytest.raises(StoreUnavailable, match=r"mlflow\.db cannot be used: .* Move the file away"):
        Tracker("demo", here)
    assert capfd.readouterr().err == "", "not even MLflow says more"
