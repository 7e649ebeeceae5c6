"""The emulation of the published system, on real processes, and what becomes of its records."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps.errors import ConfigurationError
from dps.events import Applied, CheckpointWritten, Killed, Promoted, Restored
from flows.prices import load_prices
from flows.published.drive import run_published
from flows.published.settings import PublishedConfig, PublishedTrial, cells, load_published
from flows.record import EVENTS_FILE, Record, read_record
from flows.replicate_ttf import JUDGED, PUBLISHED, SHOWN, experiment, findings, published_trials
from flows.results import RESULTS, is_recorded, read_finished
from flows.ttf.measures import measure

TINY = {
    "emulation": "ttf-published",
    "workload": {"kind": "softmax"},
    "dataset": {"kind": "digits"},
    "scale": 60,
    "copy_every": 10,
    "repeats": 1,
}


def ran(configuration: str, kills: int, here: Path, **changes: object) -> Record:
    config = PublishedConfig.model_validate({**TINY, **changes})
    trial = PublishedTrial(configuration, kills, 0, config)
    folder = here / RESULTS / config.emulation
    run_published(trial, folder / trial.name)
    record = read_record(folder / trial.name / EVENTS_FILE)
    assert record.ended is not None
    assert (record.ended.status, record.ended.reason) == ("valid", "")
    assert is_recorded(trial, folder)
    return record


@pytest.mark.cluster
def test_only_the_last_recovery_restores_the_checkpoint(tmp_path: Path) -> None:
    record = ran("sync checkpoint", 2, tmp_path, seconds=400.0)  # also if starting takes long
    assert all(kill.gone for kill in record.of(Killed))
    assert [event.source for event in record.of(Restored)] == ["initial", "initial", "checkpoint"]
    saved = [event.version for event in record.of(CheckpointWritten)]
    assert record.of(Restored)[-1].version in saved


@pytest.mark.cluster
def test_the_successor_goes_on_from_the_last_copy_and_loses_the_rest(tmp_path: Path) -> None:
    record = ran("async chain", 1, tmp_path, copy_every=50)
    (taken_over,) = record.of(Promoted)
    (kill,) = record.of(Killed)
    assert taken_over.version % 50 == 0
    assert taken_over.version <= kill.updates
    written = findings(False, tmp_path)
    assert "| async chain | k=1 | 1 |" in written
    assert "**not resolved**" in written
    assert (tmp_path / RESULTS / "replicate-ttf" / "accuracy-1.svg").stat().st_size > 1000


@pytest.mark.cluster
def test_the_stateless_server_sums_what_was_queued_while_it_was_down(tmp_path: Path) -> None:
    record = ran("stateless", 1, tmp_path)
    (kill,) = record.of(Killed)
    restored = record.of(Restored)[-1]
    assert restored.source == "store"
    after = next(e for e in record.of(Applied) if e.epoch == restored.epoch)
    assert len(after.times) > 1
    place = tmp_path / RESULTS / "ttf-published" / "stateless.kills-1.seed-0" / EVENTS_FILE
    done = read_finished(place, load_prices())
    found = measure(done.record, done.outcome)
    assert found is not None
    assert (found.kills, len(found.changes), found.lost) == (1, 1, 0)
    assert kill.updates < restored.version + len(after.times)


# -- cells and configurations ------------------------------------------------------------------


def test_the_pairs_share_out_the_seeds_and_stateless_has_them_all() -> None:
    config = PublishedConfig.model_validate({**TINY, "repeats": 4})
    seeds: dict[str, set[int]] = {}
    for trial in cells(config):
        seeds.setdefault(trial.configuration, set()).add(trial.seed)
    assert seeds["sync chain"] == {0, 2}
    assert seeds["async chain"] == {1, 3}
    assert seeds["stateless"] == {0, 1, 2, 3}
    assert len(cells(config)) == 4 * 3 * 3


def test_a_trial_is_the_same_however_often_it_is_repeated() -> None:
    few, many = (
        cells(PublishedConfig.model_validate({**TINY, "repeats": n}))[0].digest for n in (1, 9)
    )
    assert few == many


@pytest.mark.torch
def test_the_short_version_is_a_part_of_the_full_one() -> None:
    pytest.importorskip("torch")
    full = {trial.digest for trial in published_trials(True)}
    short = {trial.digest for trial in published_trials(False)}
    assert short < full
    for name in (*JUDGED.values(), *SHOWN.values()):
        trials = list(experiment(name, False).trial_configs())
        every = [config for _, config in experiment(name, True).trial_configs()]
        assert 0 < len(trials) < len(every)
        assert all(config in every for _, config in trials)


def test_a_wrong_key_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / f"{PUBLISHED}.yaml"
    path.write_text("emulation: x\nworkload: {kind: softmax}\ndataset: {kind: digits}\nspeed: 3\n")
    with pytest.raises(ConfigurationError, match="line 4: speed: unknown key"):
        load_published(path)


def test_findings_without_records_say_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="dps replicate ttf"):
        findings(False, tmp_path)
