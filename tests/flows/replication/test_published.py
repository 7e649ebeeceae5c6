"""The emulation of the published system, on real processes, and what becomes of its records."""

from __future__ import annotations

from pathlib import Path

import pytest

from dps.cluster.backends.local import LocalCluster
from dps.cluster.names import NodeSpec
from dps.core.names import replacement
from dps.errors import ConfigurationError
from dps.events import Acked, Applied, CheckpointWritten, Killed, NodeJoined, Promoted, Restored
from flows.analysis.finished import RESULTS, Finished, is_recorded, read_finished
from flows.analysis.outcome import outcome
from flows.analysis.prices import load_prices
from flows.records.record import EVENTS_FILE, Record, read_record
from flows.replication.ttf.emulation import drive, nodes
from flows.replication.ttf.emulation.drive import run_published
from flows.replication.ttf.emulation.settings import (
    PublishedConfig,
    PublishedTrial,
    cells,
    load_published,
)
from flows.replication.ttf.findings import AS_PUBLISHED, study, write
from flows.replication.ttf.measures import lost_gradients, measure
from flows.replication.ttf.run import (
    JUDGED,
    PUBLISHED,
    SHOWN,
    experiment,
    findings,
    published_trials,
)
from flows.replication.version import Version
from tests.support.records import acked, applied, restored, start
from tests.support.waiting import eventually

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


@pytest.mark.slow
@pytest.mark.cluster
def test_only_the_last_recovery_restores_the_checkpoint(tmp_path: Path) -> None:
    record = ran("sync checkpoint", 2, tmp_path, seconds=400.0)  # also if starting takes long
    assert all(kill.gone for kill in record.of(Killed))
    assert [event.source for event in record.of(Restored)] == ["initial", "initial", "checkpoint"]
    saved = [event.version for event in record.of(CheckpointWritten)]
    assert record.of(Restored)[-1].version in saved
    told = [ack for ack in record.of(Acked) if ack.t < record.of(Killed)[-1].t]
    at_kill = max(told, key=lambda ack: ack.t)
    assert record.of(Killed)[-1].updates == at_kill.versions[0]
    assert at_kill.versions[0] < at_kill.seqs[0], "it started afresh after the first kill"


@pytest.mark.slow
@pytest.mark.cluster
def test_the_successor_goes_on_from_the_last_copy_and_loses_the_rest(tmp_path: Path) -> None:
    record = ran("async chain", 1, tmp_path, copy_every=50)
    (taken_over,) = record.of(Promoted)
    (kill,) = record.of(Killed)
    assert taken_over.version % 50 == 0
    assert taken_over.version <= kill.updates
    done = Finished(tmp_path, record, outcome(record, load_prices()))
    judged = study(AS_PUBLISHED, [done], 1)
    written = write({AS_PUBLISHED: judged}, [], [], tmp_path / "text", None, Version())
    assert "| async chain | k=1 | 1 |" in written
    assert "**not resolved**" in written
    assert (tmp_path / "text" / "accuracy-1.svg").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.cluster
def test_a_trial_may_end_before_the_new_replica_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never_up(cluster: LocalCluster, node: NodeSpec) -> None:
        if node.name != replacement(drive.CHAIN[0]):
            start_node(cluster, node)

    start_node = LocalCluster.start
    monkeypatch.setattr(LocalCluster, "start", never_up)
    record = ran("async chain", 1, tmp_path)
    assert [event.node for event in record.of(Promoted)] == [drive.CHAIN[1]]
    assert {event.node for event in record.of(NodeJoined)} == {*drive.CHAIN, "worker-0"}


@pytest.mark.slow
@pytest.mark.cluster
def test_the_stateless_server_sums_what_was_queued_while_it_was_down(tmp_path: Path) -> None:
    record = ran("stateless", 1, tmp_path)
    (kill,) = record.of(Killed)
    back = record.of(Restored)[-1]
    assert back.source == "store"
    after = next(e for e in record.of(Applied) if e.epoch == back.epoch)
    assert len(after.times) > 1
    place = tmp_path / RESULTS / "ttf-published" / "stateless.kills-1.seed-0" / EVENTS_FILE
    done = read_finished(place, load_prices())
    found = measure(done.record, done.outcome)
    assert found is not None
    assert (found.kills, len(found.changes)) == (1, 1)
    assert found.lost == after.seqs[0] - back.version, "what the killed server had taken"
    assert kill.updates <= back.version


# -- losses ------------------------------------------------------------------------------------


def test_gradients_that_a_killed_server_had_taken_are_lost() -> None:
    """The stateless server had taken 3, 4 and 5 out of the queue; 8 and 9 are still in it."""
    record = Record(
        (
            start(),
            applied([0, 1, 2], [1, 2, 3]),
            restored(3),
            applied([6, 7], [4, 5], epoch=2, t=21.0),
            acked(list(range(10)), outcome="buffered", t=30.0),
        )
    )
    assert lost_gradients(record) == 3


def test_gradients_after_the_last_copy_are_lost_by_the_same_rule() -> None:
    """The server had been given 0 to 4, and could not report 3 and 4; a copy held 0 and 1."""
    before = (start(), applied([0, 1, 2], [1, 2, 3]), acked(list(range(5)), t=15.0))
    assert lost_gradients(Record((*before, restored(2)))) == 3
    went_on = (restored(2), applied([5, 6], [3, 4], epoch=2, t=21.0), acked([5, 6], [3, 4], t=21.0))
    assert lost_gradients(Record((*before, *went_on))) == 3


def test_nothing_is_lost_without_a_failure() -> None:
    record = Record((start(), applied([0, 1], [1, 2]), acked([0, 1, 2], outcome="buffered")))
    assert lost_gradients(record) == 0


def failed_for(strategy: str, folder: Path) -> str:
    """Run a tiny trial, which must fail, and return why it did."""
    run_published(PublishedTrial(strategy, 0, 0, PublishedConfig.model_validate(TINY)), folder)
    ended = read_record(folder / EVENTS_FILE).ended
    assert ended is not None
    assert ended.status == "failed"
    return ended.reason


@pytest.mark.cluster
def test_what_an_actor_raises_fails_the_trial_and_not_what_comes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_nonsense(run: drive._Run) -> None:
        run.ask(run._up("store-0", "store", nodes.Saver), "save", "no state")

    monkeypatch.setattr(drive._Run, "_checkpoint", save_nonsense)
    reason = failed_for("sync checkpoint", tmp_path)
    assert "AttributeError: 'str' object has no attribute 'version'" in reason
    assert "see traceback.txt beside the record" in reason
    assert "in save" in (tmp_path / "traceback.txt").read_text()


@pytest.mark.slow
@pytest.mark.cluster
def test_a_stateless_server_that_cannot_go_on_ends_the_training_and_fails_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply_nonsense(run: drive._Run) -> None:
        store = run._up("store-0", "store", nodes.Store, nodes.State({}, 0))
        run._up("server-0", "server", nodes.StatelessServer, run.config, 1, store)
        nonsense = nodes.Gradient(0, {}, "no version", 0.0, 0.0)  # type: ignore[arg-type]
        eventually(lambda: not run.ask(store, "push", nonsense), 5)

    monkeypatch.setattr(drive._Run, "_stateless", apply_nonsense)
    reason = failed_for("stateless", tmp_path)
    assert "unsupported operand type(s) for -: 'int' and 'str'" in reason


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
@pytest.mark.slow
def test_the_short_version_is_a_part_of_the_full_one() -> None:
    pytest.importorskip("torch")
    full = {trial.digest for trial in published_trials(True)}
    short = {trial.digest for trial in published_trials(False)}
    assert short < full
    for name in (*JUDGED.values(), *SHOWN.values()):
        trials = list(experiment(name, Version()).trial_configs())
        every = [config for _, config in experiment(name, Version(full=True)).trial_configs()]
        assert 0 < len(trials) < len(every)
        assert all(config in every for _, config in trials)


def test_a_wrong_key_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / f"{PUBLISHED}.yaml"
    path.write_text("emulation: x\nworkload: {kind: softmax}\ndataset: {kind: digits}\nspeed: 3\n")
    with pytest.raises(ConfigurationError, match="line 4: speed: unknown key"):
        load_published(path)


@pytest.mark.torch
def test_findings_without_records_say_what_to_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(ConfigurationError, match="dps replicate ttf"):
        findings(Version(), tmp_path)
