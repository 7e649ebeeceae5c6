"""Owns the replication of "Training Through Failure": what is run, in which order, and what comes of it.

Two studies answer the paper's claims: (a) an emulation of the system as published, flaws included,
and (b) the real dps under the same questions, on a small model and on the paper's CNN. Two more go
where the paper did not: (c) the store, or the path of checkpoints, is hit as well; (d) the hybrids of
its future work. What is recorded is not run again; claims and figures come from the records alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from flows.compare import compare
from flows.config import load_experiment
from flows.prices import load_prices
from flows.progress import PlainView
from flows.published.drive import run_published
from flows.published.settings import PublishedTrial, cells, load_published
from flows.record import EVENTS_FILE, write_grid
from flows.results import RESULTS, is_recorded, read_experiment, read_finished
from flows.trial import run_trial
from flows.ttf.findings import AS_PUBLISHED, CNN, CORRECTED, Study, study, write
from flows.workloads import load_dataset

FOLDER = "replicate-ttf"
PUBLISHED = "ttf-published"
# What the short version leaves out of each configuration, which is the whole replication.
SHORT_REPEATS = 3
TWO_WORKERS = "axes.training.workers=[2]"
SHORT = {
    "ttf-corrected": (TWO_WORKERS, "seeds=[0, 1, 2]"),
    "ttf-cnn": (
        "axes.recovery={chain: chain, async checkpoint: {preset: checkpoint, durability: "
        "{every: 100}}, stateless: {preset: stateless, outage: {limit: 256}, replay: {policy: published}}}",
        "axes.faults={k=1: [{kind: kill, target: {shard: 0, position: head}, at_updates: 150, "
        "back_after: 2.0}]}",
        "seeds=[0, 1, 2]",
    ),
    "ttf-store-lost": ("seeds=[0, 1]",),
    "ttf-path-damaged": ("seeds=[0, 1]",),
    "ttf-hybrids": ("seeds=[0, 1]",),
}
JUDGED = {CORRECTED: "ttf-corrected", CNN: "ttf-cnn"}
SHOWN = {
    "(c) the store is lost": "ttf-store-lost",
    "(c) the path of checkpoints is damaged": "ttf-path-damaged",
    "(d) hybrids and replay policies": "ttf-hybrids",
}


def replicate(
    full: bool,
    here: Path,
    view: PlainView,
    store: str | None = None,
    published: Path | None = None,
    run: bool = True,
) -> str:
    """Run what is not recorded yet, and return the findings as Markdown.

    Parameters
    ----------
    full
        The whole replication, or a short version: fewer seeds, two workers.
    here
        The working directory: `results/` and `mlruns/` are in it.
    view
        Is told how it goes.
    store
        URI of the tracking store; None: `mlruns/mlflow.db`.
    published
        The CSV with the published curves (`flows.ttf.figures.read_published`).
    run
        Whether to run anything, or to use what is recorded.
    """
    trials = published_trials(full)
    if run:
        run_emulation(trials, here, view)
        for name in (*JUDGED.values(), *SHOWN.values()):
            compare(load_experiment(config_file(name), _overrides(name, full)), here, view, run_trial, store)
    judged = {AS_PUBLISHED: _study(AS_PUBLISHED, PUBLISHED, here)}
    judged.update({title: _study(title, name, here) for title, name in JUDGED.items()})
    others = [_study(title, name, here) for title, name in SHOWN.items()]
    command = "dps replicate ttf --full" if full else "dps replicate ttf"
    return write(
        {title: each for title, each in judged.items() if each.trials},
        [each for each in others if each.trials],
        folder(here),
        published,
        command,
    )


def folder(here: Path) -> Path:
    """Where text and figures are written."""
    return here / RESULTS / FOLDER
