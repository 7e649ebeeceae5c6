"""What a training shows of itself while it runs and after it: views, history, progress, files."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

from dps import (
    SGD,
    SSP,
    Checkpoint,
    Given,
    Momentum,
    ParameterServer,
    Recovery,
    Scheduled,
    SparseSpec,
    StepDecay,
    WarmUp,
    Worker,
    load,
)
from dps.errors import ConfigurationError, StoreUnavailable
from dps.events import EvaluationMissed
from tests.support.training import (
    COUNTING,
    PATIENT,
    SECONDS,
    Events,
    count,
    counts,
    ones,
    params,
    patient_server,
    results,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.cluster

STEPS = 12
TABLE = {"rows": (np.array([3, 200]), -np.ones((2, 4), np.float32))}


def count_and_report(worker: Worker) -> str:
    """Push and report; return what the worker shows of itself at the end."""
    gradients = ones(worker.pull())
    for step in range(STEPS):
        worker.push_pull(gradients)
        worker.report(loss=1.0 / (step + 1), rate=0.5)
    return repr(worker)


def count_when_told(flag: str, worker: Worker) -> None:
    """Push once, again when there is a file `flag`, and again when there is another, "… ends"."""
    count(1, worker)
    worker.report(loss=0.5)
    for each in (flag, f"{flag} ends"):
        eventually(Path(each).exists, SECONDS)
        count(1, worker)


def mean(weights: Mapping[str, np.ndarray]) -> tuple[float, float]:
    return float(weights["w"].mean()), 0.25


def test_what_workers_report_and_evaluators_score_is_kept_without_a_sink(plain: Client) -> None:
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        ps.evaluate(mean, every=60.0)
        shown = results(ps.run(count_and_report, workers=2))
        frame = ps.history()
        of_workers = frame[frame["source"] != "evaluator"]
        assert len(of_workers) == 2 * 2 * STEPS  # all of it is there when the futures are done
        for worker in ("worker-0", "worker-1"):
            own = of_workers[of_workers["source"] == worker]
            losses = own[own["metric"] == "loss"]
            np.testing.assert_array_equal(losses["report"], np.arange(1, STEPS + 1))
            # The weights that it had read, as for the evaluator: with its own updates at least.
            assert losses["step"].is_monotonic_increasing
            assert all(losses["report"] <= losses["step"])
            assert losses["step"].iloc[-1] <= 2 * STEPS
            np.testing.assert_array_equal(losses["value"], 1 / np.arange(1, STEPS + 1))
        assert ps.workers[0].reported == {"loss": 1 / STEPS, "rate": 0.5}
    scores = ps.history().query("source == 'evaluator' and metric == 'loss'")
    np.testing.assert_array_equal(scores["value"], [0.0, 2 * STEPS])  # the last at the very end
    np.testing.assert_array_equal(scores["step"], [0, 2 * STEPS])
    assert all(f"pushed {STEPS}" in text for text in shown)


SCHEDULE = WarmUp(5, StepDecay(3, 0.5), start=0.1)


def report_and_push(worker: Worker) -> None:
    worker.report(early=1.0)
    weights = worker.pull()
    for _ in range(STEPS):
        worker.report(loss=1.0)
        weights = worker.push_pull(ones(weights))


def report_on_rows(worker: Worker) -> None:
    worker.pull_rows("rows", [3])
    worker.report(loss=2.0)


def test_the_history_has_the_learning_rate_of_each_number(plain: Client) -> None:
    choices = {"optimizer": Scheduled(SGD(0.5), SCHEDULE), "tables": [SparseSpec("rows", 4)]}
    with patient_server(plain, params(), shards=2, **choices) as ps:
        ps.evaluate(mean, every=600.0)
        results(ps.run(report_and_push))
        results(ps.run(report_on_rows))
    history = ps.history()
    expected = [0.5 * SCHEDULE.factor(version) for version in range(STEPS)]
    assert len(set(expected)) > 6
    found = history.query("source == 'worker-0' and metric == 'loss'")
    np.testing.assert_array_equal(found["learning_rate"], expected)
    assert history.query("metric == 'early'")["learning_rate"].isna().all()
    scores = history.query("source == 'evaluator' and metric == 'loss'")
    last = 0.5 * SCHEDULE.factor(STEPS)
    np.testing.assert_array_equal(scores["learning_rate"], [expected[0], last])
    assert history.query("source == 'worker-1'")["learning_rate"].tolist() == [last]


def raising(weights: Mapping[str, np.ndarray]) -> tuple[float, float]:
    raise ZeroDivisionError("of no examples")


def test_a_score_that_fails_is_not_silent(plain: Client) -> None:
    """It is a warning, or an event where somebody takes events."""
    with (
        pytest.warns(RuntimeWarning, match="because the score raised.*of no examples"),
        patient_server(plain, params()) as ps,
    ):
        ps.evaluate(raising, every=60.0)
    events = Events()
    with patient_server(plain, params(), on_event=events) as ps:
        ps.evaluate(raising, every=60.0)
    assert "ZeroDivisionError" in events.of(EvaluationMissed)[-1].reason


def report_what_is_no_number(worker: Worker) -> None:
    for odd in ("low", None, np.ones(2), 1j, [1.0]):
        with pytest.raises(ConfigurationError, match=r"^report: loss=.*, expected a number$"):
            worker.report(loss=odd, other=1.0)  # type: ignore[arg-type]
    worker.report(loss=np.float32(0.5), other=np.array([2.0]), odd=float("nan"))


def test_a_report_is_of_numbers(plain: Client) -> None:
    with patient_server(plain, params()) as ps:
        results(ps.run(report_what_is_no_number))
    frame = ps.history().set_index("metric")["value"]
    assert frame.to_dict() == pytest.approx({"loss": 0.5, "other": 2.0, "odd": np.nan}, nan_ok=True)


def tensor_of(weights: Mapping[str, np.ndarray]) -> Any:
    import torch

    return torch.tensor(weights["w"].mean(), requires_grad=True)


def in_place(weights: Mapping[str, np.ndarray]) -> float:
    """Score weights that are changed: they are the score's own."""
    weights["w"][:] += 7.0
    return float(weights["w"].mean())


SCORES: dict[str, tuple[Any, dict[str, float]]] = {
    "a number": (lambda weights: 3, {"loss": 3.0}),
    "in place": (in_place, {"loss": 7.0}),
    "a pair": (lambda weights: [1, np.float32(0.5)], {"loss": 1.0, "accuracy": 0.5}),
    "names": (lambda weights: {"recall@10": 0.25, "auc": np.nan}, {"recall@10": 0.25}),
    "a tensor": (tensor_of, {"loss": 0.0}),
}


@pytest.mark.parametrize("kind", SCORES)
def test_a_score_may_be_a_number_a_pair_or_numbers_by_name(plain: Client, kind: str) -> None:
    if kind == "a tensor":
        pytest.importorskip("torch")
    score, expected = SCORES[kind]
    with patient_server(plain, params(), shards=2) as ps:
        ps.evaluate(score, every=600.0)
    history = ps.history().query("source == 'evaluator'")
    for name, value in expected.items():
        assert history[history["metric"] == name]["value"].tolist() == [value, value]
    assert set(history["metric"]) >= set(expected)


def test_a_score_that_is_no_number_is_told_once(plain: Client) -> None:
    with (
        warnings.catch_warnings(record=True) as told,
        patient_server(plain, params()) as ps,
    ):
        warnings.simplefilter("always")
        ps.evaluate(lambda weights: "good", every=0.05)  # type: ignore[arg-type, return-value]
        results(ps.run(partial(count, 30)))
    assert len(ps.history()) == 0
    (text,) = (str(w.message) for w in told if "the score returned" in str(w.message))
    assert "'good', expected a number" in text


async def later(weights: Mapping[str, np.ndarray]) -> float:
    return 0.0


def test_what_cannot_be_evaluated_is_refused_at_once(plain: Client) -> None:
    with patient_server(plain, params()) as ps:
        for every in ("1", None, 0, -1, float("nan"), float("inf"), True):
            with pytest.raises(ConfigurationError, match=r"^every=.*, expected a number above 0$"):
                ps.evaluate(mean, every)  # type: ignore[arg-type]
        for score, text in (
            (None, "expected a function"),
            (later, "async"),
            (lambda: 0.0, "does not accept the call"),
        ):
            with pytest.raises(ConfigurationError, match=f"^score=.*{text}"):
                ps.evaluate(score)  # type: ignore[arg-type]


def test_shards_and_workers_are_shown_as_they_are(plain: Client, tmp_path: Path) -> None:
    flag = tmp_path / "go on"
    choices = {"consistency": SSP(4), "tables": [SparseSpec("rows", 4)]}
    with patient_server(plain, params(), shards=2, optimizer=COUNTING, **choices) as ps:
        assert (ps.group.rule, ps.group.consistency) == (COUNTING, SSP(4))
        assert (ps.group.recovery, ps.name) == (ps.group.recovery, ps.group.name)
        assert ps.workers == ()
        futures = ps.run(partial(count_when_told, str(flag)), workers=2)
        eventually(lambda: [w.updates for w in ps.workers] == [1, 1], SECONDS)
        eventually(lambda: len(ps.history()) == 2, SECONDS)
        first, _ = ps.workers
        assert (first.worker, first.status, first.clock, first.loss) == (
            "worker-0",
            "running",
            1,
            0.5,
        )
        assert first.rate is not None  # and 0, if the last look before its push is long ago
        nodes = {node.name for node in ps.nodes}
        addresses = {node.name: node.address for node in ps.nodes}
        for shard, layout in zip(ps.shards, ps.group.layout.shards, strict=True):
            assert shard.node in nodes
            assert shard.address == addresses[shard.node]
            assert (shard.version, shard.epoch, shard.nbytes) == (2, 1, layout.nbytes)
        assert "workers=2 (2 running)" in repr(ps)
        html = ps._repr_html_()
        flag.touch()
        # Looks have shown one push until now, so the first that shows two shows a rate.
        first = eventually(lambda: each if (each := ps.workers[0]).updates > 1 else None, SECONDS)
        assert first.rate is not None
        assert first.rate > 0
        flag.with_name("go on ends").touch()
        results(futures)
        assert [(w.status, w.updates, w.rate) for w in ps.workers] == [("finished", 3, None)] * 2
    assert "running" in html
    assert [shard.version for shard in ps.shards] == [6, 6]
    assert "closed" in repr(ps)


def fail(worker: Worker) -> None:
    raise ValueError("[as] it was told")


def test_a_worker_that_failed_or_was_stopped_is_shown_so(plain: Client, tmp_path: Path) -> None:
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        (failed,) = ps.run(fail)
        failed.exception(timeout=SECONDS)
        (waiting,) = ps.run(partial(count_until_stopped, str(tmp_path / "never")))
        eventually(lambda: ps.workers[1].updates > 0, SECONDS)
        ps.stop()
        waiting.exception(timeout=SECONDS)
        assert [worker.status for worker in ps.workers] == ["failed", "stopped"]


def count_until_stopped(flag: str, worker: Worker) -> None:
    gradients = ones(worker.pull())
    while not Path(flag).exists():
        worker.push(gradients)


def test_progress_ends_with_the_workers(
    plain: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with patient_server(plain, params(), shards=2, optimizer=COUNTING) as ps:
        results(ps.run(partial(count, 3)))  # is not counted: it has ended
        futures = ps.run(count_and_report, workers=2)
        ps.progress(total=2 * STEPS)
        assert all(future.done() for future in futures)
        said = capsys.readouterr().out
        assert f"{2 * STEPS} of {2 * STEPS} gradients" in said
        assert f"loss {1 / STEPS:.4g}" in said
        ps.progress()  # none runs: those of the last run
        said = capsys.readouterr().out
        assert f"{2 * STEPS} gradients · 0.0/s · ended" in said
        assert "ended after" not in said  # it is not known when
        with pytest.raises(ConfigurationError, match="total=0"):
            ps.progress(total=0)


def push_rows(worker: Worker) -> None:
    gradients = ones(worker.pull())
    for _ in range(STEPS):
        worker.push(gradients, TABLE)


def test_a_saved_model_is_loaded_without_a_cluster_and_gone_on_from(
    plain: Client, tmp_path: Path
) -> None:
    rows = np.arange(40, dtype=np.float32).reshape(10, 4)
    tables = [SparseSpec("rows", 4, initial=rows)]
    with patient_server(plain, params(), shards=2, optimizer=COUNTING, tables=tables) as ps:
        np.testing.assert_array_equal(ps.pull_range("rows")[1], rows)
        results(ps.run(push_rows))
        ps.save(tmp_path / "model")
        weights, table = ps.pull(), ps.pull_range("rows")
        (tmp_path / "file").touch()
        with pytest.raises(StoreUnavailable):
            ps.save(tmp_path / "file")
    model = load(tmp_path / "model")
    expected = rows.copy()
    expected[3] += STEPS
    np.testing.assert_array_equal(table[0], [*range(10), 200])
    np.testing.assert_array_equal(table[1], [*expected, np.full(4, STEPS)])
    for name, array in weights.items():
        np.testing.assert_array_equal(model[name], array)
    assert model.versions == (STEPS, STEPS)
    choices = {"optimizer": Momentum(1.0, 0.0), "tables": model.tables}
    with patient_server(plain, model, shards=3, **choices) as ps:
        assert isinstance(model.tables[0].initial, Given)
        for got, wanted in zip(ps.pull_range("rows"), table, strict=True):
            np.testing.assert_array_equal(got, wanted)
        results(ps.run(push_rows))
        assert counts(ps) == [2 * STEPS] * 3
        np.testing.assert_array_equal(ps.pull_rows("rows", [200])[0], np.full(4, 2 * STEPS))


def count_to_the_end(steps: int, worker: Worker) -> int:
    """Push what is still to be pushed of `steps`; return how many were done before."""
    gradients = ones(worker.pull())
    for _ in range(worker.done, steps):
        worker.push(gradients)
    return worker.done


def test_a_worker_is_told_how_far_it_was(plain: Client, tmp_path: Path) -> None:
    saved = Recovery(Checkpoint(every=5, path=str(tmp_path)))
    with patient_server(plain, params(), shards=2, optimizer=COUNTING, recovery=saved) as ps:
        assert results(ps.run(partial(count_to_the_end, 7), workers=2)) == [0, 0]
    with ParameterServer.resume(plain, str(tmp_path), shards=3) as ps:
        assert results(ps.run(partial(count_to_the_end, 20), workers=2)) == [7, 7]
        assert counts(ps) == [40] * 3
        assert [worker.updates for worker in ps.workers] == [20, 20]


@pytest.mark.slow
def test_a_training_is_logged_to_mlflow_as_it_goes(plain: Client, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with patient_server(plain, params(), optimizer=COUNTING, labels={"model": "counter"}) as ps:
        results(ps.run(count_and_report))
        run_id = ps.log_to_mlflow("counting", "first", tracking_uri=uri)
        results(ps.run(count_and_report))
    store = mlflow.MlflowClient(uri)
    run = store.get_run(run_id)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "first")
    assert run.data.params["optimizer.kind"] == type(COUNTING).__name__
    assert run.data.params["recovery.durability.kind"] == "NoDurability"
    assert run.data.tags["dps.model"] == "counter"
    assert (run.data.metrics["updates_lost"], run.data.metrics["failovers"]) == (0, 0)
    for worker in ("worker-0", "worker-1"):
        logged = store.get_metric_history(run_id, f"{worker}/loss")
        first = 1 if worker == "worker-0" else STEPS + 1
        assert [metric.step for metric in logged] == list(range(first, first + STEPS))
    with patient_server(plain, params(), optimizer=COUNTING) as ps:
        run_id = ps.log_to_mlflow("counting", "fails", tracking_uri=uri)
        ps.run(fail)[0].exception(timeout=SECONDS)
    assert store.get_run(run_id).info.status == "FAILED"


@pytest.mark.slow
def test_a_training_that_is_resumed_goes_on_with_its_run(plain: Client, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri, path = f"sqlite:///{tmp_path}/mlflow.db", str(tmp_path / "saved")
    saved = Recovery(Checkpoint(every=100, path=path))
    with patient_server(plain, params(), optimizer=COUNTING, recovery=saved) as ps:
        first = ps.log_to_mlflow("counting", tracking_uri=uri)
        results(ps.run(count_and_report))
    store = mlflow.MlflowClient(uri)
    store.update_run(first, status="RUNNING")  # as a driver that was killed leaves it
    with ParameterServer.resume(plain, path, shards=2, timings=PATIENT) as ps:
        assert ps.log_to_mlflow("counting", tracking_uri=uri) == first
        assert store.get_run(first).info.status == "RUNNING"
        results(ps.run(count_and_report))
    assert store.get_run(first).info.status == "FINISHED"
    logged = store.get_metric_history(first, "worker-0/loss")
    assert [metric.step for metric in logged] == list(range(1, 2 * STEPS + 1))
    with ParameterServer.resume(plain, path, timings=PATIENT) as ps:
        assert ps.log_to_mlflow("counting", "another", tracking_uri=uri) != first
