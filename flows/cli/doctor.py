"""The command `dps doctor`: check this machine or a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.arguments import Settings, configurations
from flows.cli.console import AsJson, console, json_output, store, warn


def doctor(
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG",
            help="Check the cluster of this configuration instead, by a small job on it.",
            autocompletion=configurations,
        ),
    ] = None,
    settings: Settings = [],  # noqa: B006 (typer makes its own list)
    limit: Annotated[
        float, typer.Option(min=1, help="Seconds until the nodes of the cluster must have started.")
    ] = 300.0,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, cores, memory, data sets and tracking store.

    With --cluster, also check that nodes start with the same versions, share the checkpoint folder
    and reach each other.
    """
    from flows.config.trials import load_trials
    from flows.execution.doctor import examine, examine_cluster

    here = Path.cwd()
    with json_output(as_json) as out:
        looked = examine(here, store())
        if cluster:
            looked = examine_cluster(load_trials(cluster, settings)[1], here, limit, warn)
        findings = []
        for each in looked:
            findings.append(each)
            mark = "[green]ok[/]" if each.good else "[bold red]!![/]"
            if each.good and each.found.startswith("not installed"):  # an optional package
                mark = "[dim]--[/]"
            console().print(f"{mark}  {each.subject:22}", end="")
            console().print(each.found, markup=False, soft_wrap=True)
        good = all(each.good for each in findings)
        out.write({"ok": good, "findings": findings})
    if not good:
        raise typer.Exit(1)
