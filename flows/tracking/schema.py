"""Owns the check that a tracking database was made by this version of MLflow.

MLflow itself brings some older databases up to date without a word or a copy, and refuses others.
Here none is touched unasked: whoever has years of runs in one wants to have a copy first.
"""

from __future__ import annotations

import shlex
import sqlite3
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from dps.errors import StoreUnavailable


def refuse_other_schema(path: Path) -> None:
    """Refuse a SQLite database of another version of MLflow, and leave it as it is.

    Raises
    ------
    StoreUnavailable
        It is of another version; the message says what to do.
    sqlite3.Error
        It cannot be read.
    """
    found = _schema_of(path)
    if found is None:
        return
    from alembic.script import ScriptDirectory

    spec = find_spec("mlflow.store")
    assert spec is not None
    assert spec.submodule_search_locations
    scripts = ScriptDirectory(str(Path(spec.submodule_search_locations[0]) / "db_migrations"))
    wanted = scripts.get_current_head()
    if found == wanted:
        return
    told = f"the tracking store {path} has the database schema {found}, and this MLflow {wanted}: "
    if found in {script.revision for script in scripts.walk_revisions()}:
        copy = shlex.join(["cp", str(path), f"{path}.bak"])
        upgrade = shlex.join(["mlflow", "db", "upgrade", f"sqlite:///{path}"])
        raise StoreUnavailable(
            f"{told}it was made by an older MLflow, and is left as it was. Keep a copy and bring "
            f"it up to date ({copy} && {upgrade}), or name another store with MLFLOW_TRACKING_URI."
        )
    raise StoreUnavailable(
        f"{told}it was made by a newer MLflow, and is left as it was. Install that version here, "
        "or name another store with MLFLOW_TRACKING_URI."
    )


def _schema_of(path: Path) -> str | None:
    """The schema that a database says it has; None: it says none, as one that is new."""
    if not path.exists():
        return None
    with closing(sqlite3.connect(path)) as connection:
        try:
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" in str(error):
                return None
            raise
    return None if row is None else str(row[0])
