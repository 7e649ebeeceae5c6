"""`dps top`: views of running trainings, from records of trials or from a Dask scheduler.

Records are read incrementally, and a scheduler is asked once for each view, so watching has no
measurable cost for a training.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dps.cluster.scheduler.plugin import overviews
from dps.errors import ConfigurationError
from dps.observe.views import Listing, Pace, TrainingView
from flows.monitor.course import Course
from flows.monitor.status import running
from flows.records.owner import at_work
from flows.records.record import EVENTS_FILE, GRID_FILE, RecordReader, trial_names
from flows.statistics.finished import RESULTS

if TYPE_CHECKING:
    from distributed import Client

ANSWER_SECONDS = 15.0  # within which a scheduler must answer
APART_SECONDS = 1.0  # between two looks, so that there is a rate


class Ended(ConfigurationError):
    """The watched training does not exist any more."""


class TrialSource:
    """Views of one trial, whose record is read as it grows."""

    def __init__(self, path: Path) -> None:
        self._name = f"{path.parent.parent.name}/{path.parent.name}"
        self._reader = RecordReader(path)
        self._course = Course(self._name)

    @property
    def ended(self) -> bool:
        """Whether the record has an end, as far as it was read."""
        return self._course.state != "running"

    def look(self) -> list[TrainingView]:
        """Read what is new, and return the view; none before the record has a beginning."""
        events, anew = self._reader.read()
        if anew:
            self._course = Course(self._name)
        for event in events:
            self._course.take(event)
        return [] if self._course.started is None else [self._course.view()]


class ExperimentSource:
    """Views of the trials of an experiment that run, from its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trials: dict[Path, TrialSource] = {}

    def look(self) -> list[TrainingView]:
        """Return a view of each trial that runs now; none between two trials."""
        owner = at_work(self._folder)
        if owner is None:
            try:
                running(self._folder.parent.parent, self._folder.name)
            except ConfigurationError as error:
                raise Ended(str(error)) from error
            return []  # it has restarted since
        for name in trial_names(self._folder):
            path = self._folder / name / EVENTS_FILE
            if path not in self._trials and path.exists() and path.stat().st_mtime >= owner.since:
                self._trials[path] = TrialSource(path)
        sources = [source for source in self._trials.values() if not source.ended]
        views = [view for source in sources for view in source.look()]
        return [view for view in views if view.state == "running"]


class Rates:
    """The rates of one training, from successive views."""

    def __init__(self) -> None:
        self._pace = Pace()
        self._versions: dict[int, int] = {}  # of shards, as last known

    def added_to(self, view: TrainingView) -> TrainingView:
        """Observe a view, and return it with the rates of its shards and running workers.

        A shard that does not answer keeps its last version.
        """
        self._versions |= {s.shard: s.version for s in view.shards if s.version is not None}
        counts = {f"shard {shard}": version for shard, version in self._versions.items()}
        counts |= {worker.worker: worker.updates for worker in view.workers}
        self._pace.look(view.t, counts)
        complete = len(self._versions) == len(view.shards) > 0

        def rate(name: str) -> float | None:
            return self._pace.of(name, view.t, counts[name]) if name in counts else None

        return replace(
            view,
            done=min(self._versions.values()) if complete else None,
            shards=Listing(
                replace(s, version=self._versions.get(s.shard), rate=rate(f"shard {s.shard}"))
                for s in view.shards
            ),
            workers=Listing(
                each if each.ended else replace(each, rate=rate(each.worker))
                for each in view.workers
            ),
        )


class SchedulerSource:
    """Views of the groups of a Dask scheduler."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._address = client.scheduler.address
        self._rates: defaultdict[str, Rates] = defaultdict(Rates)

    def look(self) -> list[TrainingView]:
        """Ask the scheduler, for some seconds at most; raises `ConfigurationError` without dps."""
        try:
            views: list[TrainingView] = self._client.sync(
                self._client.run_on_scheduler, overviews, callback_timeout=ANSWER_SECONDS
            )
        except (ImportError, AttributeError) as error:  # it cannot read the function there
            raise ConfigurationError(
                f"the Dask scheduler at {self._address} has no dps, or another version ({error}); "
                "install the same version there as here"
            ) from error
        except (OSError, TimeoutError, ValueError) as error:
            raise Ended(
                f"the Dask scheduler at {self._address} is gone: it does not answer any more"
            ) from error
        return [self._rates[view.name].added_to(view) for view in views]


Source = TrialSource | ExperimentSource | SchedulerSource


def source_of(target: str, here: Path) -> Source:
    """Return the source of a record or an experiment, by its name or its folder.

    Raises `ConfigurationError` if there is no such record or experiment.
    """
    for folder in (Path(target), here / RESULTS / target):
        if (folder / EVENTS_FILE).is_file():
            return TrialSource((folder / EVENTS_FILE).resolve())
        if (folder / GRID_FILE).is_file():
            return ExperimentSource(folder.resolve())
    running(here, target)  # raises, with what there is
    return ExperimentSource(here / RESULTS / target)


def look_twice(source: Source) -> list[TrainingView]:
    """Return views that have rates: of the second of two looks, a second apart."""
    source.look()
    time.sleep(APART_SECONDS)
    return source.look()
