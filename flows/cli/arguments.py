"""The arguments that commands share, and what the shell completes for them.

Completion looks at names of files only, and imports nothing that takes time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.console import warn
from flows.configs import packaged_names

if TYPE_CHECKING:
    from flows.config.document import Document
    from flows.config.experiment import ExperimentConfig

RESULTS = "results"  # `flows.statistics.finished.RESULTS`, which takes a second to import
EVENTS = "events.jsonl"


def configurations(incomplete: str) -> list[str]:
    """Packaged configurations, and YAML files and folders here, that begin like this."""
    folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    found = packaged_names()
    for each in folder.glob("[!.]*"):
        if each.is_dir() or each.suffix in (".yaml", ".yml"):
            found.append(f"{each}/" if each.is_dir() else str(each))
    return _beginning(incomplete, found)


def experiments(incomplete: str) -> list[str]:
    """Experiments that are recorded in this working directory."""
    return _beginning(
        incomplete, (path.parent.parent.name for path in Path(RESULTS).glob(f"*/*/{EVENTS}"))
    )


def runs(incomplete: str) -> list[str]:
    """Experiments, and their trials by the beginnings of their names."""
    name, slash, _ = incomplete.partition("/")
    trials = (path.parent.name for path in Path(RESULTS, name).glob(f"*/{EVENTS}"))
    found = (
        f"{name}/{part}"
        for trial in trials
        for part in accumulate(trial.split("."), "{}.{}".format)
    )
    return _beginning(incomplete, found) if slash else experiments(incomplete)


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if name.startswith(incomplete)})


Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="YAML file, or name of a packaged experiment (see `dps list`).",
        autocompletion=configurations,
    ),
]
Experiment = Annotated[
    str,
    typer.Argument(
        metavar="EXPERIMENT",
        help="Name of an experiment recorded in this directory.",
        autocompletion=experiments,
    ),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, such as training.updates=400."
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        metavar="SEEDS", help="Seeds: a count (40), a range (100-139) or a list ([1, 2])."
    ),
]
Virtual = Annotated[
    bool,
    typer.Option(
        "--virtual",
        help="Run on virtual time: real protocol, no processes. Recorded as NAME-virtual.",
    ),
]


def with_options(
    document: Document, settings: Sequence[str], seeds: str | None, virtual: bool
) -> list[str]:
    """Return settings with those of `--seeds` and `--virtual`."""
    added = [] if seeds is None else [f"seeds={seeds}"]
    if virtual:
        name = document.data.get("experiment", document.name)
        cluster = document.data.get("cluster")
        added.append(f"experiment={name}-virtual")
        if (cluster.get("kind") if isinstance(cluster, dict) else cluster) != "virtual":
            added.append("cluster={kind: virtual}")
    return [*added, *settings]  # so that --set can name another profile


def warn_of_claims_left_out(
    document: Document, settings: Sequence[str], experiment: ExperimentConfig
) -> None:
    """Warn of written claims that are not of this grid, as --set has changed it."""
    if any(text.startswith("claims") for text in settings):
        return
    written = document.data.get("claims") or ()
    if (left_out := len(written) - len(experiment.claims)) > 0:
        warn(
            f"{left_out} of the {len(written)} claims in {document.name} are left out: the grid, "
            "as --set has changed it, does not have what they compare"
        )
