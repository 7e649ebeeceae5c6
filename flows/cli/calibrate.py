"""The flow behind `dps calibrate`: a cluster, its measurement, and the profile in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from dps.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dps.virtual.profile import Profile
    from flows.cli.documents import JsonOutput
    from flows.verification.calibration import Measured


def calibrate(
    config: str | None,
    settings: Sequence[str],
    output: Path,
    folder: str | None,
    console: Console,
    warn: Callable[[str], None],
    out: JsonOutput,
) -> None:
    """Measure, write the profile, and show what calls take by it.

    Raises
    ------
    ConfigurationError
        The configuration's trials are on virtual time, or the name of the file is none of a
        profile.
    StoreUnavailable
        The file cannot be written.
    """
    import yaml

    from flows.config.cluster import LocalSection
    from flows.config.profile import ProfileSection
    from flows.config.trials import load_trials
    from flows.execution.preload import preload_of
    from flows.files import write_whole
    from flows.verification import calibration

    if output.suffix not in (".yaml", ".yml"):
        raise ConfigurationError(f"--output {output}: expected the name of a YAML file")
    trial = load_trials(config, settings)[1][0] if config is not None else None
    section = trial.config.cluster if trial is not None else LocalSection()
    if section.kind == "virtual":
        raise ConfigurationError(
            "cluster.kind: trials on virtual time have no nodes to measure; name the cluster that "
            "the profile is to be of, as by --set cluster.kind=local"
        )
    preload = preload_of(trial.config) if trial is not None else ()
    with section.open(calibration.NODES, (*calibration.PRELOAD, *preload), warn) as cluster:
        measured = calibration.calibrate(cluster, trial, folder, console.print)
    profile = calibration.fitted(output.stem, measured)
    where = f"cluster {section.kind}, driven from {calibration.here()}"
    data = calibration.as_yaml(profile, measured, where, f"{datetime.now(UTC).date()}")
    ProfileSection.model_validate(data)
    text = yaml.safe_dump(data, sort_keys=False, width=100, allow_unicode=True)
    write_whole(output, text, "the profile")
    calls = [
        {"bytes": nbytes, "measured_seconds": measured.calls[nbytes], "profile_seconds": seconds}
        for nbytes, seconds in calibration.predicted(profile).items()
    ]
    out.write({"file": output, "profile": data, "calls": calls})
    console.print(_table(measured, profile))
    console.print(
        f"\n{output}: run an experiment with it by --set cluster.kind=virtual --set "
        f"cluster.profile={output}, and compare it with real nodes by dps validate NAME --profile "
        f"{output}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _table(measured: Measured, profile: Profile) -> Table:
    from rich.table import Table

    from flows.verification.calibration import predicted, size_told

    shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    shown.add_column("push and pull")
    for heading in ("measured, ms", "by the profile, ms", "error"):
        shown.add_column(heading, justify="right")
    for nbytes, seconds in predicted(profile).items():
        real = measured.calls[nbytes]
        cells = f"{real * 1e3:.2f}", f"{seconds * 1e3:.2f}", f"{seconds / real - 1:+.0%}"
        shown.add_row(size_told(nbytes), *cells)
    return shown
