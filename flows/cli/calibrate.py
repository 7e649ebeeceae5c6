"""The command `dps calibrate`: measure a cluster, and write its profile for virtual time."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.arguments import Settings, configurations
from flows.cli.console import AsJson, console, json_output, warn


def calibrate(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            help="Configuration whose cluster and gradients to measure; default: this machine.",
            autocompletion=configurations,
        ),
    ] = None,
    settings: Settings = [],  # noqa: B006 (typer makes its own list)
    output: Annotated[Path, typer.Option("--output", "-o", help="File of the profile.")] = Path(
        "calibrated.yaml"
    ),
    folder: Annotated[
        str | None,
        typer.Option(
            help="Folder on the server's node for test files; default: its temporary folder."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure the times of a cluster, and write them as a profile for virtual time."""
    import platform
    from dataclasses import asdict

    import yaml
    from dask.utils import format_bytes

    from dps.errors import ConfigurationError
    from dps.protocol.executor import available_cores
    from flows.config.cluster import LocalSection
    from flows.config.profile import PROFILE
    from flows.config.trials import load_trials
    from flows.execution import calibration
    from flows.execution.attempt import preload_of
    from flows.files import write_whole

    if output.suffix not in (".yaml", ".yml"):
        raise ConfigurationError(f"--output {output}: expected the name of a YAML file")
    trial = load_trials(config, settings)[1][0] if config is not None else None
    section = trial.config.cluster if trial is not None else LocalSection()
    if section.kind == "virtual":
        raise ConfigurationError(
            "cluster.kind: virtual nodes cannot be measured. Choose another cluster, such as "
            "--set cluster.kind=local"
        )
    preload = preload_of(trial.config) if trial is not None else ()
    with json_output(as_json) as out:
        with section.open(calibration.NODES, (*calibration.PRELOAD, *preload), warn) as cluster:
            console().print("Measuring takes about a minute.")
            measured = calibration.calibrate(cluster, trial, folder)
        profile = calibration.fitted(output.stem, measured)
        source = (
            f"dps calibrate on {datetime.now(UTC).date()}: cluster {section.kind}, driven from "
            f"{platform.system()} on {platform.machine()}, {available_cores()} cores, Python "
            f"{platform.python_version()}"
        )
        data = {"sources": [source], **asdict(profile)}
        PROFILE.model_validate(data)
        text = yaml.safe_dump(data, sort_keys=False, width=100, allow_unicode=True)
        write_whole(output, text, "the profile")
        calls = []
        for nbytes, seconds in calibration.predicted(profile).items():
            real = measured.calls[nbytes]
            print(
                f"push and pull {format_bytes(nbytes)}: {real * 1e3:.2f} ms, by the profile "
                f"{seconds * 1e3:.2f} ms ({seconds / real - 1:+.0%})"
            )
            calls.append({"bytes": nbytes, "measured_seconds": real, "profile_seconds": seconds})
        print(f"\nRun with it: --set cluster.kind=virtual --set cluster.profile={output}")
        out.write({"file": output, "profile": data, "calls": calls})
