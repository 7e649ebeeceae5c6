"""The tracking of experiments in MLflow: a parent run per experiment, a child run per trial.

Runs are written from finished records, by the driver only, and by explicit run id: nothing here
depends on MLflow's notion of a current run. Tracking the same record again changes nothing. The
step of every series is the number of gradients pushed, so that runs of different speed align.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from flows.analysis.comparison import compared, read_comparison
from flows.analysis.outcome import Identity, Outcome
from flows.analysis.series import series
from flows.analysis.statistics.claims import judge, read_claims
from flows.analysis.steps import Steps
from flows.analysis.system_metrics import system_metrics
from flows.config.trials import flat
from flows.metrics import COLUMNS
from flows.metrics.effects import EFFECTS
from flows.records.record import Record, read_configuration
from flows.report.claims import title
from flows.report.export import exported, to_csv
from flows.report.reproduce import experiment_yaml
from flows.tracking.names import REST, named
from flows.tracking.notes import experiment_note, trial_note
from flows.tracking.server import ORDER_TAG
from flows.tracking.store import (
    Refused,
    create_database,
    default_uri,
    directory_id,
    prepare_mlflow,
    refuse_other_schema,
    refused,
    refuses,
    require_reachable,
    scheme,
    store_errors,
)

PARAM_LENGTH = 6000
TAG_LENGTH = 5000

PREFIX = "dps/"
KIND_TAG = "dps.kind"
DIGEST_TAG = "dps.digest"
TRIAL_TAG = "dps.trial"
EXPERIMENT_DIGEST_TAG = "dps.experiment.digest"
DIGEST_LENGTH = 12
DIRECTORY_TAG = "dps.directory"
RECORD_TAG = "dps.record"
CONTROL_TAG = "dps.control"
EFFECTS_TAG = "dps.effects"
TRANSPORT_TAG = "dps.transport"
VIRTUAL_TAG = "dps.virtual"
NOTE_TAG = "mlflow.note.content"  # what MLflow shows as the description
NOTE_DIGEST_TAG = "dps.note"
CLAIM_TAG = "dps.claim"
NOTHING_WRITTEN = "# Of the last run of this experiment, nothing that was written is kept.\n"
NO_NAME = re.compile(r"[^\w .:/-]")  # what MLflow takes in no name: the * of filters, for one

Point = tuple[str, float, int, int]  # name, value, milliseconds since the Unix epoch, step


class Tracker:
    """Writes one experiment to a tracking store.

    Creating one connects to the store, initialises it when it is new, and finds or starts the
    parent run.

    Parameters
    ----------
    experiment
        Name of the experiment; in MLflow it is "dps/<experiment>".
    folder
        Where `mlruns/` is or will be: the working directory of the command. Runs that others have
        entered from elsewhere are none of its, whatever their experiment's name.
    uri
        Another tracking store, such as the value of MLFLOW_TRACKING_URI. None:
        `mlruns/mlflow.db` in `folder`, with artifacts beside it.

    Attributes
    ----------
    written
        How many trials it has written; those that were there already do not count.

    Raises
    ------
    StoreUnavailable
        The store cannot be reached or written.
    """

    def __init__(self, experiment: str, folder: Path, uri: str | None = None) -> None:
        self.uri = uri or default_uri(folder)
        self.written = 0
        self._name = experiment
        require_reachable(self.uri)
        prepare_mlflow()
        from mlflow import MlflowClient

        with store_errors(self.uri):
            if scheme(self.uri) == "sqlite":
                refuse_other_schema(Path(self.uri.removeprefix("sqlite:///")))
            if uri is None:
                create_database(folder.resolve() / "mlruns" / "mlflow.db")
            self._directory = directory_id(folder)
            self._client = MlflowClient(tracking_uri=self.uri)
            self._experiment_id = self._enter_experiment(None if uri else _artifacts(folder))
            self.parent_id = self._enter_parent()

    def track_trial(
        self,
        record: Record,
        outcome: Outcome,
        events_file: Path,
        dataset_digest: str | None = None,
    ) -> str:
        """Write one trial as a child run and return the run's id.

        The child of an earlier run of the same trial is replaced, as is one that was left half
        written; if it holds the same record, it is left as it is, but for the effects of its
        faults: these depend on the control as well.

        Raises
        ------
        Refused
            The store is well and does not take this trial; nothing of it is left there.
        StoreUnavailable
            The store cannot be used.
        """
        try:
            return self._enter_trial(record, outcome, events_file, dataset_digest)
        except Refused:
            with store_errors(self.uri):
                self._delete(run for run in self._children(outcome) if not _is_whole(run))
            raise

    def _enter_trial(
        self, record: Record, outcome: Outcome, events_file: Path, dataset_digest: str | None
    ) -> str:
        with self._errors(f"the trial {outcome.identity.trial}"):
            fingerprint = hashlib.sha256(events_file.read_bytes()).hexdigest()
            known = self._children(outcome)
            same = (run for run in known if run.data.tags.get(RECORD_TAG) == fingerprint)
            whole = next(same, None)
            self._delete(run for run in known if run is not whole)
            if whole is not None:
                self._enter_effects(whole, whole.info.end_time, outcome)
                return str(whole.info.run_id)
            shift = _shift(record, outcome, events_file)
            run = self._start_child(record, outcome, shift)
            run_id = str(run.info.run_id)
            # All in one call, which divides what is too much for one request.
            points, params = _points(record, outcome, shift), _params(record, outcome.identity)
            self._client.log_batch(run_id, _as_metrics(points), params)
            self._log_dataset(run_id, record, dataset_digest)
            self._log_trial_files(run_id, record, outcome, events_file)
            status = "FINISHED" if outcome.valid else "FAILED"
            ended = _milliseconds(record.events[-1].t + shift)
            self._client.set_terminated(run_id, status, ended)
            # Last, so that a child whose writing was interrupted is not taken for a whole one.
            self._client.set_tag(run_id, RECORD_TAG, fingerprint)
            self._enter_effects(run, ended, outcome)
            self.written += 1
            return run_id

    def track_experiment(
        self, trials: Sequence[tuple[Record, Outcome]], report: Path, figures: Path
    ) -> None:
        """Write the counts of trials, report, figures and configuration to the parent run; end it.

        The `report` is in the folder of the experiment, whose claims the description tells, and
        with what the comparison by condition shows.

        Children get the effects of their faults, which could not be told while their controls had
        not run. Parent and children get the digest of the experiment, so that what earlier
        configurations of the same name have left can be told from it.

        Means are a table in the description and an artifact: as metrics of the parent they would
        be charts of their own beside every comparison of the trials.

        Raises
        ------
        Refused
            The store is well and does not take the report.
        StoreUnavailable
            The store cannot be used.
        """
        outcomes = [outcome for _, outcome in trials]
        now = max((_milliseconds(record.events[-1].t) for record, _ in trials), default=0)
        with self._errors("the report"):
            scalars = _counts(outcomes)
            counts = _as_metrics([(name, v, now, 0) for name, v in scalars.items()])
            self._client.log_batch(self.parent_id, counts)
            self._client.log_artifact(self.parent_id, str(report))
            self._client.log_artifacts(self.parent_id, str(figures), "figures")
            self._log_configuration([record for record, _ in trials], report.parent)
            children = self._search(f"tags.`mlflow.parentRunId` = '{self.parent_id}'")
            by_trial = {(each.identity.digest, each.identity.trial): each for each in outcomes}
            for run in filter(_is_whole, children):
                tags = run.data.tags
                outcome = by_trial.get((tags.get(DIGEST_TAG, ""), tags.get(TRIAL_TAG, "")))
                if outcome is not None:
                    self._enter_effects(run, run.info.end_time, outcome)
            self._tag_experiment(outcomes, children)
            self._describe(outcomes, report.parent)
            failed = not any(outcome.valid for outcome in outcomes)
            self._client.set_terminated(self.parent_id, "FAILED" if failed else "FINISHED")

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """As `store_errors`; but what the store does not take is refused, if it is well."""
        with store_errors(self.uri):
            try:
                yield
            except Exception as error:
                if refuses(error) and self._has_its_runs():
                    raise refused(self.uri, what, error) from error
                raise

    # -- finding runs --------------------------------------------------------------------------

    def _enter_experiment(self, artifacts: str | None) -> str:
        name = f"{PREFIX}{self._name}"
        known = self._client.get_experiment_by_name(name)
        if known is None:
            tags = {"mlflow.experimentKind": "custom_model_development"}
            return str(self._client.create_experiment(name, artifacts, tags))
        if known.lifecycle_stage == "deleted":
            self._client.restore_experiment(known.experiment_id)
        return str(known.experiment_id)

    def _enter_parent(self) -> str:
        own = f"tags.`{KIND_TAG}` = 'experiment' and tags.`{DIRECTORY_TAG}` = '{self._directory}'"
        for run in self._search(own):
            self._client.update_run(run.info.run_id, status="RUNNING")
            return str(run.info.run_id)
        tags = {
            KIND_TAG: "experiment",
            DIRECTORY_TAG: self._directory,
            "dps.experiment": self._name,
            "mlflow.source.name": "dps",
        }
        run = self._client.create_run(self._experiment_id, tags=tags, run_name=self._name)
        return str(run.info.run_id)

    def _children(self, outcome: Outcome) -> list[Any]:
        # By name too: two labels may stand for the same configuration, to see what chance does.
        wanted = {
            "mlflow.parentRunId": self.parent_id,
            DIGEST_TAG: outcome.identity.digest,
            TRIAL_TAG: outcome.identity.trial,
        }
        return self._search(" and ".join(f"tags.`{tag}` = '{v}'" for tag, v in wanted.items()))

    def _has_its_runs(self) -> bool:
        """Whether experiment and parent are still there, without which nothing is taken."""
        experiment = self._client.get_experiment(self._experiment_id)
        parent = self._client.get_run(self.parent_id).info
        return bool(experiment.lifecycle_stage == parent.lifecycle_stage == "active")

    def _delete(self, runs: Iterable[Any]) -> None:
        for run in runs:
            self._client.delete_run(run.info.run_id)

    def _search(self, query: str) -> list[Any]:
        """Return all runs that match; a store gives a page of them at a time."""
        found: list[Any] = []
        token: str | None = ""
        while token is not None:
            page = self._client.search_runs([self._experiment_id], query, page_token=token or None)
            found += page
            token = page.token or None
        return found

    # -- writing runs --------------------------------------------------------------------------

    def _start_child(self, record: Record, outcome: Outcome, shift: float) -> Any:
        identity = outcome.identity
        tags = {
            "mlflow.parentRunId": self.parent_id,
            "mlflow.source.name": "dps",
            KIND_TAG: "trial",
            DIRECTORY_TAG: self._directory,
            DIGEST_TAG: identity.digest,
            "dps.experiment": self._name,
            TRIAL_TAG: identity.trial,
            "dps.strategy": identity.strategy,
            "dps.condition": identity.condition,
            "dps.seed": str(identity.seed),
            NOTE_TAG: trial_note(record, outcome),
            ORDER_TAG: _order(identity),
            "dps.status": outcome.status,
            "dps.reason": outcome.reason,
            **_transports(outcome),
            **({VIRTUAL_TAG: outcome.virtual} if outcome.virtual else {}),
            **_circumstances(record),
            **{f"dps.label.{axis}": label for axis, label in identity.labels.items()},
        }
        return self._client.create_run(
            self._experiment_id,
            start_time=_milliseconds(record.events[0].t + shift),
            tags={name: value[:TAG_LENGTH] for name, value in tags.items()},
            run_name=identity.trial,
        )

    def _log_dataset(self, run_id: str, record: Record, dataset_digest: str | None) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        config = record.config
        kind = config.get("dataset", {}).get("kind")
        if kind:
            dataset = Dataset(
                name=kind,
                digest=(dataset_digest or "unknown")[:DIGEST_LENGTH],
                source_type="dps",
                source=json.dumps(config["dataset"]),
            )
            context = InputTag("mlflow.data.context", "training")
            self._client.log_inputs(run_id, [DatasetInput(dataset, [context])])

    def _enter_effects(self, run: Any, ended: int, outcome: Outcome) -> None:
        """Log the effects of a trial's faults, unless the run has these already."""
        from mlflow.entities import RunTag

        if outcome.effects.control is None:
            return
        row = outcome.row()
        finals = dict(named(EFFECTS, row))
        digest = hashlib.sha256(json.dumps(finals, sort_keys=True).encode()).hexdigest()
        if run.data.tags.get(EFFECTS_TAG) == digest[:DIGEST_LENGTH]:
            return
        metrics = _as_metrics([(name, v, ended, 0) for name, v in finals.items()])
        control = RunTag(CONTROL_TAG, outcome.effects.control[:TAG_LENGTH])
        self._client.log_batch(run.info.run_id, metrics, tags=[control])
        # Last, so that an interruption does not leave some of them out for good.
        self._client.set_tag(run.info.run_id, EFFECTS_TAG, digest[:DIGEST_LENGTH])

    def _log_trial_files(
        self, run_id: str, record: Record, outcome: Outcome, events_file: Path
    ) -> None:
        from flows.report.figures.recovery import trial_figure

        self._client.log_artifact(run_id, str(events_file))
        self._client.log_figure(run_id, trial_figure(record, outcome), "trial.png")

    def _log_configuration(self, records: Sequence[Record], folder: Path) -> None:
        """Log what was written to configure the experiment, and what it came to."""
        configurations = {
            # Said even if nothing was, for an earlier run may have left what was written for it.
            "as_written": read_configuration(folder) or NOTHING_WRITTEN,
            "resolved": experiment_yaml(records, read_claims(folder), read_comparison(folder)),
        }
        for name, text in configurations.items():
            if text:
                self._client.log_text(self.parent_id, text, f"configuration/{name}.yaml")

    def _describe(self, outcomes: Sequence[Outcome], folder: Path) -> None:
        """Describe the experiment and its run, unless somebody has written a description.

        What is compared is an artifact too, whole and as numbers.
        """
        # Drawn as for the report, so that both say the same.
        judged = judge(outcomes, read_claims(folder), np.random.default_rng(0))
        rows = compared(outcomes, read_comparison(folder), np.random.default_rng(0))
        scores = [outcome.score for outcome in outcomes[:1]]
        self._client.log_text(
            self.parent_id, to_csv(exported(rows, judged, *scores)), "comparison.csv"
        )
        note = experiment_note(outcomes, judged, rows, TAG_LENGTH)
        digest = _digest(note)
        client, experiment, parent = self._client, self._experiment_id, self.parent_id
        if _ours(client.get_experiment(experiment).tags):
            client.set_experiment_tag(experiment, NOTE_TAG, note)
            client.set_experiment_tag(experiment, NOTE_DIGEST_TAG, digest)
        for number, each in enumerate(judged, 1):
            verdict = f"{each.decision.verdict}: {title(each.claim, each.score)}"
            client.set_tag(parent, f"{CLAIM_TAG}.{number}", verdict[:TAG_LENGTH])
        if _ours(client.get_run(parent).data.tags):
            client.set_tag(parent, NOTE_TAG, note)
            client.set_tag(parent, NOTE_DIGEST_TAG, digest)

    def _tag_experiment(self, outcomes: Sequence[Outcome], runs: Iterable[Any]) -> None:
        digests = sorted(outcome.identity.digest for outcome in outcomes)
        digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()[:DIGEST_LENGTH]
        children = [
            run.info.run_id
            for run in runs
            if run.data.tags.get(DIGEST_TAG) in digests
            if run.data.tags.get(EXPERIMENT_DIGEST_TAG) != digest
        ]
        for run_id in (self.parent_id, *children):
            self._client.set_tag(run_id, EXPERIMENT_DIGEST_TAG, digest)


def tracked_experiments(uri: str) -> dict[str, str]:
    """Return the ids of the experiments in a tracking store by their names.

    Raises
    ------
    StoreUnavailable
        The store cannot be read.
    """
    prepare_mlflow()
    from mlflow import MlflowClient

    with store_errors(uri):
        found = MlflowClient(tracking_uri=uri).search_experiments(
            filter_string=f"name LIKE '{PREFIX}%'", order_by=["name"]
        )
        return {each.name.removeprefix(PREFIX): str(each.experiment_id) for each in found}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]


def _ours(tags: Mapping[str, str]) -> bool:
    """Whether there is no description yet, or the one that was written here."""
    note = tags.get(NOTE_TAG)
    return not note or _digest(note) == tags.get(NOTE_DIGEST_TAG)


def _order(identity: Identity) -> str:
    """What trials are sorted by, so that the strategies of one seed stand beside each other."""
    seed = 0 if identity.seed is None else identity.seed
    return f"{seed:010} {identity.condition} {identity.strategy}"


def _artifacts(folder: Path) -> str:
    return (folder.resolve() / "mlruns" / "artifacts").as_uri()


def _counts(outcomes: Sequence[Outcome]) -> dict[str, float]:
    statuses = [outcome.status for outcome in outcomes]
    return {f"trials/{s}": float(statuses.count(s)) for s in ("valid", "invalid", "failed")}


def _circumstances(record: Record) -> dict[str, str]:
    """How the trial was run: as tags, for it is no part of what it depends on."""
    settings = record.started.settings if record.started else {}
    return {f"dps.{name}": str(v) for name, v in settings.get("circumstances", {}).items()}


def _transports(outcome: Outcome) -> dict[str, str]:
    """By what the trial's nodes sent each other arrays, if that was recorded."""
    found = ", ".join(outcome.transports)
    return {TRANSPORT_TAG: found} if found and not outcome.virtual else {}


def _is_whole(run: Any) -> bool:
    return RECORD_TAG in run.data.tags


def _shift(record: Record, outcome: Outcome, events_file: Path) -> float:
    """Seconds by which MLflow is to show a trial later than its record says.

    Virtual time begins at one moment for all trials; MLflow would show runs of another year, so one
    is shown as having ended when its record was written.
    """
    return events_file.stat().st_mtime - record.events[-1].t if outcome.virtual else 0.0


def _points(record: Record, outcome: Outcome, shift: float) -> list[Point]:
    """The series and figures of a trial that are finite, and how many are not."""
    steps = Steps(record)
    end = _milliseconds(record.events[-1].t + shift)
    points = [(name, value, end, 0) for name, value in _figures(outcome)]
    points += [
        (point.name, point.value, _milliseconds(point.t + shift), steps.at(point.t))
        # What processes used goes by the names of MLflow's system metrics.
        for point in (*series(record), *system_metrics(record))
    ]
    finite = [point for point in points if math.isfinite(point[1])]
    dropped = float(len(points) - len(finite))
    return [*finite, (f"{REST}non_finite_values_dropped", dropped, end, 0)]


def _figures(outcome: Outcome) -> Iterator[tuple[str, float]]:
    """The figures of a trial by their names in MLflow, but for the effects of its faults."""
    score = outcome.score
    known = [c for c in COLUMNS if c not in EFFECTS and c.key not in score.same_as]
    for name, value in named(known, outcome.row()):
        yield score.tracked(name), value


def _as_metrics(points: Iterable[Point]) -> list[Any]:
    from mlflow.entities import Metric

    return [Metric(*point) for point in points]


def _params(record: Record, identity: Identity) -> list[Any]:
    """The settings of a trial, and the versions of the software that it ran on."""
    from mlflow.entities import Param

    if record.started is None:
        return []
    # The labels are params as well as tags: parallel coordinates show params only, and begin
    # with the first ones by name.
    labels = {f"axis.{axis}": label for axis, label in identity.labels.items()}
    seed = {} if identity.seed is None else {"axis.seed": identity.seed}
    known = {**labels, **seed, **flat(record.config)}
    named = {NO_NAME.sub("_", key): value for key, value in known.items()}
    versions = {f"versions.{k}": str(v) for k, v in record.started.versions.items()}
    return [Param(key, _shortened(value)) for key, value in {**named, **versions}.items()]


def _milliseconds(seconds: float) -> int:
    return round(1000 * seconds)


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= PARAM_LENGTH else text[: PARAM_LENGTH - 1] + "…"
