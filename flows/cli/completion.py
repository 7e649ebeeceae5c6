"""What the shell completes after `dps …`: configurations, experiments recorded here, their trials.

It looks at names of files only, and imports nothing that takes time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from flows.configs import packaged_names

RESULTS = "results"  # `flows.analysis.finished.RESULTS`, which takes a second to import
GRID = "grid.json"
EVENTS = "events.jsonl"


def configurations(incomplete: str) -> list[str]:
    """Packaged configurations, and YAML files and folders here, that begin like this."""
    folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    found = packaged_names()
    if folder.is_dir():
        files = (each for each in folder.iterdir() if not each.name.startswith("."))
        found += [f"{each}/" if each.is_dir() else str(each) for each in files if _is_offered(each)]
    return _beginning(incomplete, found)


def experiments(incomplete: str) -> list[str]:
    """Experiments that are recorded in this working directory."""
    return _beginning(incomplete, (folder.name for folder in _recorded()))


def runs(incomplete: str) -> list[str]:
    """What `dps compare` takes: experiments, and the beginnings of the names of their trials."""
    name, slash, _ = incomplete.partition("/")
    found = (
        f"{folder.name}/{part}"
        for folder in _recorded()
        if folder.name == name
        for trial in _trials(folder)
        for part in accumulate(trial.split("."), "{}.{}".format)
    )
    return _beginning(incomplete, found) if slash else experiments(incomplete)


def trials(incomplete: str) -> list[str]:
    """Trials that are recorded in this working directory."""
    found = (f"{folder.name}/{name}" for folder in _recorded() for name in _trials(folder))
    return _beginning(incomplete, found)


def _beginning(incomplete: str, names: Iterator[str] | list[str]) -> list[str]:
    return sorted({name for name in names if name.startswith(incomplete)})


def _is_offered(path: Path) -> bool:
    return path.is_dir() or path.suffix in (".yaml", ".yml")


def _recorded() -> Iterator[Path]:
    for folder in Path(RESULTS).glob("*"):
        if (folder / GRID).is_file() or any(folder.glob(f"*/{EVENTS}")):
            yield folder


def _trials(folder: Path) -> list[str]:
    return [path.parent.name for path in folder.glob(f"*/{EVENTS}")]
