"""A tracking store that is there already: MLflow takes seconds to make the tables of one."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from flows.tracking.store import create_database, prepare_mlflow


def with_store(here: Path) -> Path:
    """Leave an empty store in a working directory, as after an experiment that was removed."""
    folder = here / "mlruns"
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "mlflow.db").write_bytes(_empty())
    return here


@cache
def _empty() -> bytes:
    prepare_mlflow()
    with tempfile.TemporaryDirectory() as folder:
        create_database(Path(folder))
        return (Path(folder) / "mlruns" / "mlflow.db").read_bytes()
