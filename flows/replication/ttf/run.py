"""The replication of "Training Through Failure": what is run, in what order, what comes of it.

Two studies answer the paper's claims: (a) an emulation of the system as published, flaws included,
and (b) the real dps under the same questions, on a small model and on the paper's CNN. Two more go
where the paper did not: (c) the store, or the path of checkpoints, is hit as well; (d) the hybrids
of its future work. (e) asks the questions again by design, on virtual time, where enough seeds can
be had. What is recorded is not run again; claims and figures come from the records.

On virtual time run (b) to (d), and of (e) what the full version alone has; `findings.NOT_VIRTUAL`
says what does not, and why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from flows.analysis.finished import RESULTS, Identified, is_recorded, read_finished, read_whole
from flows.analysis.outcome import Outcome
from flows.analysis.prices import load_prices
from flows.config.experiment import ExperimentConfig, load_experiment
from flows.config.trials import expand
from flows.execution.attempt import failures, set_aside, start_again, take_back
from flows.execution.drivers import Drivers
from flows.execution.experiment import exclusive, run_experiment
from flows.execution.plan import at_once_by_default
from flows.monitor.progress import PlainView
from flows.records.record import EVENTS_FILE, write_grid
from flows.replication.ttf.claims import fixed
from flows.replication.ttf.emulation.drive import run_published
from flows.replication.ttf.emulation.settings import PublishedTrial, cells, load_published
from flows.replication.ttf.figures import read_published
from flows.replication.ttf.findings import (
    AS_PUBLISHED,
    CNN,
    CORRECTED,
    NO_SPACE,
    Designed,
    Study,
    study,
    write,
)
from flows.replication.verdicts import Verdicts
from flows.replication.version import Version

PAPER = "ttf"
PUBLISHED = "ttf-published"
SHORT_REPEATS = 3  # of (a)


@dataclass(frozen=True, slots=True)
class Short:
    """What the short version keeps of a configuration: so many seeds, these labels of an axis."""

    seeds: int
    keep: Mapping[str, Sequence[str]] = field(default_factory=dict)


SHORT = {
    "ttf-corrected": Short(
        6,
        {
            "recovery": ("async checkpoint", "chain", "stateless"),
            "training.workers": ("2",),
        },
    ),
    "ttf-cnn": Short(
        3, {"recovery": ("async checkpoint", "chain", "stateless"), "faults": ("k=1",)}
    ),
    "ttf-store-lost": Short(2),
    "ttf-path-damaged": Short(2),
    "ttf-hybrids": Short(2),
    "ttf-by-design": Short(10),
}
JUDGED = {CORRECTED: "ttf-corrected", CNN: "ttf-cnn"}
SHOWN = {
    "(c) the store is lost": "ttf-store-lost",
    "(c) the path of checkpoints is damaged": "ttf-path-damaged",
    "(d) hybrids and replay policies": "ttf-hybrids",
}
BY_DESIGN = {"(e) by design": "ttf-by-design"}
# Of part (e) as well; too long for the short version, whose real processes are those of (b).
OF_THE_FULL = {
    "(e) by design, on real processes": "ttf-by-design-real",
    "(e) by design, waiting and going on": "ttf-by-design-continue",
    "(e) by design, CNN": "ttf-by-design-cnn",
}

# Of those, what is on virtual time.
VIRTUAL = {title: name for title, name in OF_THE_FULL.items() if name != "ttf-by-design-real"}


def run(
    version: Version,
    here: Path,
    view: PlainView,
    store: str | None = None,
    csv: Path | None = None,
) -> Sequence[Outcome]:
    """Run what is not recorded yet, and return what came of the trials that failed.

    Parameters
    ----------
    version
        The whole replication, or a short version: fewer seeds and cells of the same configurations;
        on real processes or on virtual time.
    here
        The working directory: `results/` and `mlruns/` are in it.
    view
        Is told how it goes.
    store
        URI of the tracking store; None: `mlruns/mlflow.db`.
    csv
        The published curves (`flows.replication.ttf.figures.read_published`), which must be
        readable before anything runs.
    """
    if csv is not None:
        read_published(csv)
    failed = [] if version.virtual else [*run_published_trials(version.full, here, view)]
    for name in (*JUDGED.values(), *SHOWN.values(), *by_design(version).values()):
        part = experiment(name, version)
        trials = expand(part)
        with Drivers(at_once_by_default(trials)) as drivers:
            ran = run_experiment(
                part,
                here,
                view,
                drivers,
                store,
                trials=trials,
                resume=False,
                also_fixed=fixed() if name in JUDGED.values() else {},
            )
        failed += ran.failed
    return failed


def findings(
    version: Version,
    here: Path,
    csv: Path | None = None,
    warn: Callable[[str], None] = lambda _: None,
    beside: Verdicts | None = None,
) -> str:
    """Return the findings as Markdown and write them with their figures, from records alone.

    They go by the trials that this version consists of, whatever was run last in their folders, and
    say how many of them are recorded. Damaged records are left out; `warn` is told of each of them.
    On virtual time, verdicts of real processes are set `beside` its own.

    Raises
    ------
    ConfigurationError
        Nothing is recorded here, or the published curves cannot be read.
    """
    published = {} if version.virtual else {AS_PUBLISHED: PUBLISHED}
    judged = {
        title: _study(title, name, version, here, warn)
        for title, name in {**published, **JUDGED}.items()
    }
    alike = {} if beside is None else alike_of(version, beside, here, warn)
    others = [_study(title, name, version, here, warn) for title, name in SHOWN.items()]
    designed = [
        Designed(_study(title, name, version, here, warn), experiment(name, version).claims)
        for title, name in by_design(version).items()
    ]
    place = version.folder(PAPER, here)
    return write(judged, others, designed, place, csv, version, beside, alike)


def by_design(version: Version) -> Mapping[str, str]:
    """Return the experiments of part (e), by their titles."""
    if version.virtual:
        return VIRTUAL if version.full else {}
    return {**BY_DESIGN, **OF_THE_FULL} if version.full else BY_DESIGN


def alike_of(
    version: Version, real: Verdicts, here: Path, warn: Callable[[str], None]
) -> Mapping[str, Study]:
    """Those trials of a full version on virtual time that a short one on real processes has too."""
    if not (version.full and version.virtual) or real.command != Version().command(PAPER):
        return {}
    short = Version(virtual=True)
    return {title: _study(title, name, short, here, warn) for title, name in JUDGED.items()}


def experiment(name: str, version: Version) -> ExperimentConfig:
    """Return the configuration of a part; short, its trials are some of those of the full one."""
    whole = load_experiment(str(_file(name)))
    if version.virtual and whole.cluster.kind != "virtual":
        whole = _on_virtual_time(name, whole)
    if version.full:
        return whole
    short = SHORT[name]
    axes = {
        axis: {label: values[label] for label in short.keep.get(axis, values)}
        for axis, values in whole.axes.items()
    }
    return whole.model_copy(update={"axes": axes, "seeds": whole.seeds[: short.seeds]})


def published_trials(full: bool) -> tuple[PublishedTrial, ...]:
    """Return the trials of the emulation."""
    config = load_published(_file(PUBLISHED))
    repeats = config.repeats if full else min(SHORT_REPEATS, config.repeats)
    return cells(config.model_copy(update={"repeats": repeats}))


def run_published_trials(full: bool, here: Path, view: PlainView) -> Sequence[Outcome]:
    """Run those trials of the emulation that are not recorded yet, and return those that failed.

    Records of other configurations and of attempts that failed are kept, as `run_experiment` does.
    """
    trials, failed = published_trials(full), list[Outcome]()
    place = here / RESULTS / PUBLISHED
    with exclusive(place):
        trials[0].config.dataset.load()  # missing data are found now
        for trial in trials:
            take_back(trial, place / trial.name, view.say)
        left = [trial for trial in trials if not is_recorded(trial, place)]
        for trial in left:
            set_aside(trial, place / trial.name, view.say)
        write_grid(place, (trial.name for trial in trials), 0)
        view.say(f"{PUBLISHED}: {len(trials)} trials, {len(left)} to run")
        for number, trial in enumerate(left, 1):
            own = place / trial.name
            start_again(trial, own, view.say)
            run_published(trial, own, len(failures(trial, own)))
            done = read_finished(own / EVENTS_FILE, load_prices()).outcome
            accuracy = (
                "" if done.accuracy.final is None else f", accuracy {done.accuracy.final:.1%}"
            )
            view.say(f"[{number}/{len(left)}] {trial.name}: {done.status}{accuracy} {done.reason}")
            if done.status == "failed":
                failed.append(done)
    return failed


def _study(
    title: str, name: str, version: Version, here: Path, warn: Callable[[str], None]
) -> Study:
    planned: Sequence[Identified]
    if name == PUBLISHED:
        folder, planned = name, published_trials(version.full)
    else:
        part = experiment(name, version)
        folder, planned = part.experiment, expand(part)
    place = here / RESULTS / folder
    digests = {place / trial.name / EVENTS_FILE: trial.digest for trial in planned}
    recorded = read_whole(filter(Path.exists, sorted(digests)), load_prices(), warn)
    # What is recorded of these very trials, be it of one that failed.
    found = (d for d in recorded if d.outcome.identity.digest == digests[d.events_file])
    return study(title, found, len(planned))


def _on_virtual_time(name: str, whole: ExperimentConfig) -> ExperimentConfig:
    """The same trials on virtual time, under a name of their own, but for what cannot be there."""
    axes = {
        axis: {label: value for label, value in values.items() if label != NO_SPACE}
        for axis, values in whole.axes.items()
    }
    changes = (
        f"experiment={whole.experiment}-virtual",
        "cluster.kind=virtual",
        f"axes={json.dumps(axes)}",
    )
    return load_experiment(str(_file(name)), changes)


def _file(name: str) -> Path:
    return Path(str(files("flows.configs") / "replicate" / f"{name}.yaml"))
