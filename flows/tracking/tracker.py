"""Recorded trials in MLflow: a run per strategy and condition, with its trials as children.

A run of the experiment itself has the report, the claims' verdicts and all files as artifacts. Runs
are written from finished records; the records are the truth, so writing one again changes nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from dps.errors import DpsError
from dps.observe.history import EVALUATOR, numbers_of
from dps.observe.tracking import (
    TAG_LENGTH,
    Point,
    Writer,
    as_name,
    flat,
    reason,
    store_errors,
    unavailable,
)
from flows.metrics import BY_KEY, TRACKED, Metric
from flows.metrics.metric import SHARES
from flows.metrics.outcome import Outcome
from flows.metrics.score import Score
from flows.records.record import Record
from flows.report.claims import title, verdict_sentence
from flows.statistics.claims import judge
from flows.statistics.comparison import read_questions
from flows.statistics.finished import Finished
from flows.statistics.groups import by_place
from flows.tracking.store import Refused, create_database, default_uri, directory_id, prepare_mlflow

PREFIX = "dps/"
KIND, DIRECTORY, RECORD, ORDER = "dps.kind", "dps.directory", "dps.record", "dps.order"
TRIAL, STRATEGY, CONDITION, DIGEST = "dps.trial", "dps.strategy", "dps.condition", "dps.digest"
PARENT, NOTE = "mlflow.parentRunId", "mlflow.note.content"  # MLflow shows the note as description
EARLIER = "earlier"  # the kind of runs of a configuration that has changed since
COMPUTE = "compute_seconds"  # reported by each worker for idle times, no curve of the training


class Delivered(NamedTuple):
    """The number of trials that were written, and the names of trials that the store refused.

    The report may be among these names.
    """

    written: int
    refused: tuple[str, ...]


class Tracker:
    """Writes one experiment to a tracking store.

    Creating one connects to the store, and creates the store and the experiment's run if there are
    none.

    Raises `StoreUnavailable` if the store cannot be used.

    Parameters
    ----------
    experiment
        Name of the experiment; in MLflow it is "dps/<experiment>".
    folder
        The working directory, with `mlruns/`. Runs that were uploaded from other directories are
        left unchanged, regardless of their experiment's name.
    uri
        The tracking store. None: `mlruns/mlflow.db` in `folder`, with artifacts beside it.

    Attributes
    ----------
    written
        Number of trials that it has written; those that were there already do not count.
    """

    def __init__(self, experiment: str, folder: Path, uri: str | None = None) -> None:
        prepare_mlflow()
        self.uri, artifacts = uri or default_uri(folder), None
        if uri is None:
            create_database(folder)
            artifacts = (folder.resolve() / "mlruns" / "artifacts").as_uri()
        self._name = experiment
        self.written = 0
        self._writer = Writer(f"{PREFIX}{experiment}", self.uri, artifacts)
        self._client = self._writer.client
        with store_errors(self.uri):
            self._own = {DIRECTORY: directory_id(folder), "mlflow.source.name": "dps"}
            mine = f"tags.`{DIRECTORY}` = '{self._own[DIRECTORY]}'"
            self._known = self._writer.find(mine)
            self._strategies = {
                _place(tags): run
                for run in self._known
                if (tags := run.data.tags)[KIND] == "strategy"
            }
            runs = (run for run in self._known if run.data.tags[KIND] == "experiment")
            known = next(runs, None)
            tags = {**self._own, KIND: "experiment", ORDER: ""}
            self.run_id = (
                str(known.info.run_id) if known else self._writer.start(experiment, tags, {}, None)
            )
            self._client.update_run(self.run_id, status="RUNNING")

    def track_trial(self, done: Finished) -> str:
        """Write one trial as a run, unless it is there; return the run's id.

        A run of an earlier record of the same trial, and one that was left half written, is
        replaced. A run of another configuration stays, and is no trial of the experiment any more.

        Raises `Refused` if the store works and does not take this trial, and `StoreUnavailable` if
        the store cannot be used.
        """
        own = done.outcome.identity
        fingerprint = hashlib.sha256(done.events_file.read_bytes()).hexdigest()
        with self._errors(f"the trial {own.trial}"):
            found: str | None = None
            for run in [run for run in self._known if run.data.tags.get(TRIAL) == own.trial]:
                tags = run.data.tags
                if tags.get(RECORD) == fingerprint and tags[DIGEST] == own.digest:
                    found = str(run.info.run_id)
                    if tags[KIND] != "trial":
                        self._client.set_tag(found, KIND, "trial")
                    continue
                self._known.remove(run)
                if RECORD in tags and tags[DIGEST] != own.digest:
                    self._client.set_tag(run.info.run_id, KIND, EARLIER)
                else:
                    self._client.delete_run(run.info.run_id)
            return found or self._enter(done, fingerprint)

    def _enter(self, done: Finished, fingerprint: str) -> str:
        record, outcome, own = done.record, done.outcome, done.outcome.identity
        shift = _shift(done)
        settings = record.started.settings if record.started else {}
        # Parallel coordinates begin with the first params by name.
        shared = {f"axis.{axis}": label for axis, label in own.labels.items()} | record.config
        shared.pop("seed", None)
        began, ended = record.events[0].t + shift, record.events[-1].t + shift
        tags = {
            **self._own,
            KIND: "trial",
            PARENT: self._strategy(own.strategy, own.condition, shared, began),
            TRIAL: own.trial,
            STRATEGY: own.strategy,
            CONDITION: own.condition,
            DIGEST: own.digest,
            "dps.experiment": self._name,
            "dps.seed": str(own.seed),
            "dps.status": outcome.status,
            "dps.reason": outcome.reason,
            "dps.transport": "" if outcome.virtual else ", ".join(outcome.transports),
            "dps.virtual": outcome.virtual,
            "dps.parallel": str(settings.get("circumstances", {}).get("parallel", "")),
        }
        params = {
            **shared,
            "seed": own.seed,
            "axis.seed": own.seed,
            "versions": record.started.versions if record.started else {},
        }
        set_tags = {name: text for name, text in tags.items() if text}
        run = self._writer.start(own.trial, set_tags, params, began)
        try:
            figures = (Point(k, v, ended, 0) for k, v in figures_of(outcome).items())
            # The page of a run lists metrics in the order in which they were logged.
            self._writer.log(run, [*figures, *_curves(record, outcome, shift)])
            self._client.log_artifact(run, str(done.events_file))
            self._client.log_dict(run, dict(outcome.row()), "figures.json")
            self._writer.end(run, outcome.valid, ended)
        except Exception:
            with suppress(Exception):  # it may have failed because the store is down
                self._client.delete_run(run)
            raise
        # Last, so that a run whose writing was interrupted is not taken for a whole one.
        self._client.set_tag(run, RECORD, fingerprint)
        self._known.append(self._client.get_run(run))
        self.written += 1
        return run

    def track_experiment(self, trials: Sequence[Finished], folder: Path) -> None:
        """Write what is known only of all trials together, and end the experiment's run.

        These are the effects of faults, the means of each strategy, the claims' verdicts, and the
        report, figures and other files of the experiment's `folder` as artifacts.

        Raises `Refused` if the store works and does not take the report, and `StoreUnavailable` if
        the store cannot be used.
        """
        import pandas as pd

        outcomes = [done.outcome for done in trials]
        now = max((done.record.events[-1].t + _shift(done) for done in trials), default=0.0)
        with self._errors("the report"):
            self._log_effects(trials)
            places = set[tuple[str, str]]()
            for number, ((condition, strategy), group) in enumerate(by_place(outcomes).items()):
                self._log_means(self._strategy(strategy, condition), group, number, now)
                places.add((strategy, condition))
            for place in self._strategies.keys() - places:
                self._client.set_tag(self._strategies[place].info.run_id, KIND, EARLIER)
            for path in sorted(folder.iterdir()):
                if path.is_file() and not path.name.startswith("."):
                    self._client.log_artifact(self.run_id, str(path))
            if (folder / "figures").is_dir():
                self._client.log_artifacts(self.run_id, str(folder / "figures"), "figures")
            rows = pd.DataFrame([dict(outcome.row()) for outcome in outcomes])
            self._client.log_text(self.run_id, rows.to_csv(index=False), "results.csv")
            self._describe(outcomes, folder)
            valid = any(outcome.valid for outcome in outcomes)
            self._writer.end(self.run_id, valid)

    def _log_effects(self, trials: Sequence[Finished]) -> None:
        """Log the figures that a trial has only beside its control, unless its run has them.

        A run that is no trial of the experiment any more is marked.
        """
        by_name = {done.outcome.identity.trial: done for done in trials}
        for run in self._known:
            done = by_name.get(run.data.tags.get(TRIAL, ""))
            if done is None:
                if TRIAL in run.data.tags:
                    self._client.set_tag(run.info.run_id, KIND, EARLIER)
                continue
            new = _changed(figures_of(done.outcome), run)
            t = done.record.events[-1].t + _shift(done)
            self._writer.log(run.info.run_id, [Point(k, v, t, 0) for k, v in new.items()])

    def _log_means(self, run: str, group: Sequence[Outcome], number: int, now: float) -> None:
        trials, means = [outcome for outcome in group if outcome.valid], dict[str, float]()
        for name, metric in named_figures(group[0].score):
            values = [v for trial in trials if (v := _number(trial, metric)) is not None]
            if values:
                means[name] = _scale(metric) * fmean(values)
        new = _changed(means, self._client.get_run(run))
        self._writer.log(run, [Point(name, value, now, 0) for name, value in new.items()])
        counts = Counter(outcome.status for outcome in group).most_common()
        tags = {
            ORDER: f"{number:04}",
            "dps.trials": ", ".join(f"{n} {status}" for status, n in counts),
        }
        self._writer.set(run, tags, {})
        self._writer.end(run, bool(trials), now)

    def _describe(self, outcomes: Sequence[Outcome], folder: Path) -> None:
        """Describe the experiment and its run, unless a user has described the experiment."""
        judged = judge(
            outcomes, read_questions(folder).claims, np.random.default_rng(0)
        )  # same seed as in the report
        facts = {
            "Strategies": dict.fromkeys(o.identity.strategy for o in outcomes),
            "Conditions": dict.fromkeys(filter(None, (o.identity.condition for o in outcomes))),
            "Seeds": dict.fromkeys(str(o.identity.seed) for o in outcomes),
        }
        asked = "; ".join(f"**{what}:** {', '.join(of)}" for what, of in facts.items() if of)
        tags, lines = {}, []
        for number, each in enumerate(judged, 1):
            name, verdict = title(each.claim, each.score), each.decision.verdict
            tags[f"dps.claim.{number}"] = f"{verdict}: {name}"
            lines.append(f"- *{name}*: **{verdict}**. {verdict_sentence(each)}")
        note = "\n\n".join([asked, *lines])[:TAG_LENGTH]
        self._writer.set(self.run_id, {**tags, NOTE: note}, {})
        experiment = self._client.get_experiment(self._writer.experiment_id)
        if experiment.tags.get(NOTE, "**Strategies:**").startswith("**Strategies:**"):
            self._client.set_experiment_tag(self._writer.experiment_id, NOTE, note)

    def _strategy(
        self,
        strategy: str,
        condition: str,
        settings: Mapping[str, Any] | None = None,
        began: float | None = None,
    ) -> str:
        """Return the run of a strategy in a condition with these settings; start a missing one."""
        place = strategy, condition
        run = self._strategies.get(place)
        if run is not None and settings is not None and run.data.params != flat(settings):
            self._client.set_tag(run.info.run_id, KIND, EARLIER)  # params cannot be changed
            run = None
        if run is None:
            tags = {**self._own, KIND: "strategy", STRATEGY: strategy, CONDITION: condition}
            # Without axes, a strategy has the name of the experiment.
            name = "all seeds" if strategy == self._name else " · ".join(filter(None, place))
            started = self._writer.start(name, tags, settings or {}, began)
            run = self._strategies[place] = self._client.get_run(started)
        return str(run.info.run_id)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn an error into `Refused` if the store still has the experiment and answers."""
        try:
            yield
        except DpsError:
            raise
        except Exception as error:
            if self._works():
                why = reason(self.uri, error)
                raise Refused(f"the tracking store refuses {what}: {why}.") from error
            raise unavailable(self.uri, error) from error

    def _works(self) -> bool:
        """Whether the store answers, and still has the experiment and its run."""
        with suppress(Exception):
            experiment = self._client.get_experiment(self._writer.experiment_id)
            run = self._client.get_run(self.run_id).info
            return bool(experiment.lifecycle_stage == run.lifecycle_stage == "active")
        return False


def deliver(
    folder: Path,
    here: Path,
    store: str | None,
    trials: Sequence[Finished],
    complete: bool,
    warn: Callable[[str], None],
) -> Delivered:
    """Upload what the tracking store is missing of the experiment in `folder`.

    The `trials` have the effects of their faults. Report and means are written only if these are
    all trials of the experiment. Raises `StoreUnavailable` if the store cannot be used: it keeps
    its runs, and a repetition continues from there.
    """
    tracker, refused = Tracker(folder.name, here, store), list[str]()
    for done in (*trials, None):
        try:
            if done is not None:
                tracker.track_trial(done)
            elif complete:
                tracker.track_experiment(trials, folder)
        except Refused as error:
            warn(str(error))
            refused.append(done.outcome.identity.trial if done else "the report")
    return Delivered(tracker.written, tuple(refused))


def named_figures(score: Score) -> list[tuple[str, Metric]]:
    """Return the metrics of trials in MLflow, with their names there."""
    shown = ((key, name) for key, name in TRACKED.items() if key != score.same_as)
    return [(score.tracked(name), score.of(BY_KEY[key])) for key, name in shown]


def figures_of(outcome: Outcome) -> dict[str, float]:
    """Return the values of these metrics that a trial has, by name; shares are in per cent."""
    named = named_figures(outcome.score)
    values = ((name, metric, _number(outcome, metric)) for name, metric in named)
    return {name: _scale(metric) * v for name, metric, v in values if v is not None}


def _number(outcome: Outcome, metric: Metric) -> float | None:
    value = outcome.row()[metric.key]
    return float(value) if value is not None and math.isfinite(value) else None


def _scale(metric: Metric) -> float:
    return 100.0 if metric.unit in SHARES else 1.0  # bars have two decimals


def _changed(figures: Mapping[str, float], run: Any) -> dict[str, float]:
    return {name: v for name, v in figures.items() if run.data.metrics.get(name) != v}


def _curves(record: Record, outcome: Outcome, shift: float) -> Iterator[Point]:
    """Reports of workers and scores of evaluators, over the versions of the weights."""
    for number in (number for event in record.events for number in numbers_of(event)):
        name, kind, value = number.metric, "train", number.value
        if number.source == EVALUATOR:
            kind = "eval"
            if name == "accuracy":
                name, value = outcome.score.key, value * (100 if outcome.score.share else 1)
                if name == "loss":
                    continue  # there twice
        if name != COMPUTE:
            step = number.step if number.step >= 0 else number.report
            yield Point(as_name(f"{kind}/{name}"), value, number.t + shift, step)


def _shift(done: Finished) -> float:
    """Return the seconds to add to the times in a trial's record for MLflow.

    Virtual time begins at one moment for all trials, years ago; such a trial is shown as having
    ended when its record was written.
    """
    end = done.record.events[-1].t
    return done.events_file.stat().st_mtime - end if done.outcome.virtual else 0.0


def _place(tags: Mapping[str, str]) -> tuple[str, str]:
    return tags.get(STRATEGY, ""), tags.get(CONDITION, "")


def tracked_experiments(uri: str) -> dict[str, str]:
    """Return the ids of the experiments in a tracking store by their names.

    Raises `StoreUnavailable` if the store cannot be read.
    """
    prepare_mlflow()
    from mlflow import MlflowClient

    with store_errors(uri):
        found = MlflowClient(uri).search_experiments(
            filter_string=f"name LIKE '{PREFIX}%'", order_by=["name"]
        )
        return {each.name.removeprefix(PREFIX): str(each.experiment_id) for each in found}
