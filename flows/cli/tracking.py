"""The commands of MLflow: `dps ui`, and `dps sync`, which uploads what its store is missing."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from flows.cli.arguments import experiments
from flows.cli.console import curves, store, warn


def ui(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 5000,
) -> None:
    """Open the MLflow UI on 127.0.0.1 until Ctrl-C; the printed address holds an access token."""
    from flows.tracking.store import default_uri
    from flows.tracking.tracker import tracked_experiments
    from flows.tracking.ui_server import (
        TRAINING_VIEW,
        child,
        comparison_view,
        page,
        ui_command,
        wait_until_served,
    )

    token = secrets.token_urlsafe(24)  # impossible to guess
    command, environment = ui_command(Path.cwd(), store(), port, token)
    print("MLflow starts, which takes about 10 s (Ctrl-C ends it)", flush=True)
    with child(command, environment) as process:
        ids = tracked_experiments(store() or default_uri(Path.cwd()))
        wait_until_served(process, port)
        print(f"MLflow UI: {page(TRAINING_VIEW, port, token)}", flush=True)
        for name, number in ids.items():
            print(f"Comparison of {name}: {page(comparison_view(number), port, token)}", flush=True)
        code = process.wait()
    raise typer.Exit(code)


def sync(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT",
            help="Experiments recorded in this directory; default: all.",
            autocompletion=experiments,
        ),
    ] = [],  # noqa: B006 (typer makes its own list)
) -> None:
    """Upload recorded trials that are missing in MLflow, such as after an outage of its server."""
    for name in upload(names, Path.cwd(), store(), print):
        print(f"{name}: {curves(name, True)}")


def upload(
    names: Sequence[str], here: Path, store: str | None, notify: Callable[[str], None]
) -> list[str]:
    """Write recorded experiments to a store; return the names of those that are in it.

    Without names: all, except those that another command is writing, of which it warns.

    Raises `ConfigurationError` if there is no such experiment or a command is writing to it,
    `StoreUnavailable` if the store cannot be used, and `Refused` if it does not take all of it.
    """
    from dps.errors import ConfigurationError
    from flows.statistics.finished import experiment_folder, recorded_experiments
    from flows.tracking.store import Refused

    refused: list[str] = []
    done: list[str] = []
    for name in names or recorded_experiments(here):
        try:
            missing = _upload_one(experiment_folder(name, here), here, store, notify)
        except ConfigurationError as error:
            if names:
                raise
            warn(f"{name} is left out: {error}")
        else:
            refused += [f"{what} of {name}" for what in missing or ()]
            done += [name] if missing is not None else []
    if refused:
        raise Refused(
            f"the tracking store refused {', '.join(refused)}, and has the rest. Change its "
            "limits, such as the size of files, and repeat: dps sync"
        )
    return done


def _upload_one(
    folder: Path, here: Path, store: str | None, notify: Callable[[str], None]
) -> tuple[str, ...] | None:
    """Write one experiment; return what the store refused, None if nothing can be written."""
    from flows.metrics.prices import load_prices
    from flows.monitor.estimate import trials_text
    from flows.records.owner import exclusive
    from flows.records.record import trial_names
    from flows.report.html import write_report
    from flows.statistics.finished import REPORT, read_experiment
    from flows.tracking.tracker import deliver

    with exclusive(folder):
        prices, damaged = load_prices(), list[str]()
        recorded = read_experiment(folder, prices, damaged.append)
        for text in damaged:
            warn(text)
        whole = [each for each in recorded if each.record.started and each.record.ended]
        if not whole:
            notify(f"{folder.name}: no trial is finished")
            return None
        missing = set(trial_names(folder)) - {e.outcome.identity.trial for e in whole}
        if not missing:
            write_report(folder, folder / REPORT, prices, recorded=recorded, left_out=damaged)
        delivered = deliver(folder, here, store, whole, not missing, warn)
        there = len(whole) - len(set(delivered.refused) - {"the report"})
        notify(f"{folder.name}: {trials_text(delivered.written)} written, {there} in the store")
        if missing:
            notify(f"{folder.name}: {trials_text(len(missing))} missing, so no report is written")
        return delivered.refused
