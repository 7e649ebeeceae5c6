"""Which records the replication of the first paper goes by, and what becomes of others."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from dps.events import TrialEnded, TrialStarted
from flows import replicate_ttf
from flows.attempt import EARLIER
from flows.progress import PlainView
from flows.published.settings import PublishedConfig, PublishedTrial
from flows.record import EVENTS_FILE, EventWriter
from flows.replicate_ttf import PUBLISHED, run_published_trials
from flows.results import RESULTS, is_recorded

SMALL = {
    "emulation": PUBLISHED,
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "scale": 60,
    "repeats": 1,
}


def small(**changes: object) -> PublishedTrial:
    config = PublishedConfig.model_validate({**SMALL, **changes})
    return PublishedTrial("stateless", 0, 0, config)


def recorded(trial: PublishedTrial, folder: Path) -> None:
    with EventWriter(folder / EVENTS_FILE) as write:
        write(TrialStarted(1.0, trial.name, trial.settings(), {}))
        write(TrialEnded(2.0, "valid", ""))


def test_a_record_of_another_configuration_is_kept_and_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicate_ttf, "run_published", recorded)
    first, other = small(), small(target=0.9)
    place = tmp_path / RESULTS / PUBLISHED
    for trial, aside in ((first, None), (other, first), (first, other)):
        monkeypatch.setattr(replicate_ttf, "published_trials", lambda full, only=trial: (only,))
        run_published_trials(False, tmp_path, PlainView(Console(file=StringIO())))
        assert is_recorded(trial, place)
        kept = [each.name for each in place.glob(f"{EARLIER}/*")]
        assert kept == ([f"{trial.name}.{aside.digest}"] if aside else [])
