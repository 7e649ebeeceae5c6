"""The check of a machine, or of a cluster: what an experiment runs on, and what is missing."""

from __future__ import annotations

import os
import platform
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from rich.table import Table
from rich.text import Text

from dps import __version__
from dps.cluster.transport.probe import here as place_of_this_process
from dps.core.credentials import masked
from dps.errors import ConfigurationError
from flows.analysis.finished import RESULTS
from flows.tracking.store import MOVE_AWAY, default_uri, is_damaged, reason, scheme
from flows.workloads import SHAPES, find_dataset

if TYPE_CHECKING:
    from rich.console import Console

SUBJECT_WIDTH = 11  # of the findings on a cluster, each of which is printed by itself
PACKAGES = ("dask", "distributed", "mlflow", "numpy", "scikit-learn", "pydantic", "safetensors")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and whether experiments can run with it."""

    subject: str
    found: str
    good: bool = True


def examine(here: Path, store: str | None = None) -> list[Finding]:
    """Look at the machine and at a working directory, without changing anything.

    Parameters
    ----------
    here
        The working directory, where `results/` and `mlruns/` would be written.
    store
        URI of the tracking store; None: `mlruns/mlflow.db`.
    """
    return [
        *_versions(),
        *_machine(),
        _transport(),
        *_datasets(),
        _results(here),
        _store(here, store),
    ]


def examine_cluster(
    config: str,
    settings: Sequence[str],
    limit: float,
    here: Path,
    console: Console,
    tell: Callable[[str], None],
) -> list[Finding]:
    """Try the cluster of a configuration, and print each finding as soon as it is there.

    Raises
    ------
    ConfigurationError
        The configuration cannot work, or has no cluster.
    """
    from flows.config.trials import load_trials
    from flows.execution.cluster_check import check_cluster

    _, trials = load_trials(config, settings)
    findings = []
    for check in check_cluster(trials, here, limit, tell):
        findings.append(Finding(check.subject, check.found, check.good))
        console.print(as_table(findings[-1:], width=SUBJECT_WIDTH))
    return findings


def as_table(findings: Sequence[Finding], width: int | None = None) -> Table:
    """Return the findings as a table; what is not good is marked.

    `width` is that of the subjects; None: as wide as they are.
    """
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column()
    table.add_column(width=width)
    table.add_column()
    for finding in findings:
        mark = Text("ok", style="green") if finding.good else Text("!!", style="bold red")
        table.add_row(mark, Text(finding.subject), Text(finding.found, overflow="fold"))
    return table


def _versions() -> Iterator[Finding]:
    yield Finding("dps", __version__)
    yield Finding("python", platform.python_version())
    for package in PACKAGES:
        try:
            yield Finding(package, version(package))
        except PackageNotFoundError:
            yield Finding(package, "not installed; install dps with its dependencies", good=False)
    try:
        yield Finding("torch", version("torch"))
    except PackageNotFoundError:
        yield Finding(
            "torch",
            "not installed; only the workloads torch and cnn need it: in a clone of dps, "
            "`make torch` or pip install -e '.[torch]'",
        )


def _machine() -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0))
    yield Finding("cores", f"{cores} usable of {psutil.cpu_count()}")
    yield Finding(
        "memory", f"{memory.available / 1e9:.1f} GB available of {memory.total / 1e9:.1f} GB"
    )


def _transport() -> Finding:
    """What nodes on this machine would send each other arrays by."""
    refusal = place_of_this_process().refusal
    if refusal:
        return Finding("transport", f"streams; no shared memory between processes: {refusal}")
    return Finding("transport", "shared memory between processes here, streams to other hosts")


def _datasets() -> Iterator[Finding]:
    for kind in SHAPES:
        try:
            place = find_dataset(kind)
        except ConfigurationError as error:
            yield Finding(f"dataset {kind}", str(error), good=False)
        else:
            yield Finding(f"dataset {kind}", place or "not here yet: downloaded when first used")


def _results(here: Path) -> Finding:
    folder = here / RESULTS
    problem = _unwritable(folder)
    return Finding("results", f"{folder}{problem or ''}", good=problem is None)


def _store(here: Path, store: str | None) -> Finding:
    uri = store or default_uri(here)
    if scheme(uri) != "sqlite":
        return Finding("store", f"{masked(uri)} (from MLFLOW_TRACKING_URI; not contacted)")
    path = Path(uri.removeprefix("sqlite:///"))
    problem = _locked(path) if path.exists() else _unwritable(path.parent)
    state = "" if path.exists() else " (made when first used)"
    return Finding("store", f"{uri}{problem or state}", good=problem is None)


def _unwritable(folder: Path) -> str | None:
    """Return why nothing can be written to a folder that may be still to be made."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f": cannot be written: {error.strerror or error}"


def _locked(database: Path) -> str | None:
    try:
        with closing(sqlite3.connect(database, timeout=1)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("SELECT name FROM sqlite_master")
            connection.rollback()
            return None
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if is_damaged(error):
            return f": damaged: {reason(error)}. {MOVE_AWAY}"
        return f": cannot be written: {error}"
