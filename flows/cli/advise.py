"""The command `dps advise`: the recovery strategy for a training, and the cost of each."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import runs
from flows.cli.console import AsJson, console, exit_if_failed, json_output

if TYPE_CHECKING:
    import pandas as pd

WRITTEN = "# Written by `dps advise`"


def advise(
    model: Annotated[str, typer.Option(help="Size of the model's parameters, such as 400MB.")],
    mtbf: Annotated[
        str, typer.Option(help="Mean time between failures of one server-side node, such as 6h.")
    ],
    workers: Annotated[int, typer.Option(min=1, max=128, help="Number of workers.")],
    gradient: Annotated[
        str, typer.Option(help="Time of one gradient, in seconds or such as 200ms.")
    ],
    outage: Annotated[
        str, typer.Option(help="Time from the loss of a node until a fresh node replaces it.")
    ] = "60s",
    servers: Annotated[int, typer.Option(min=1, max=16, help="Number of servers.")] = 2,
    training: Annotated[
        str, typer.Option(help="Length of the whole training without failures.")
    ] = "24h",
    every: Annotated[int, typer.Option(min=1, help="Updates between two checkpoints.")] = 100,
    server_price: Annotated[
        float | None, typer.Option(min=0, help="USD per hour of a server-side node.")
    ] = None,
    worker_price: Annotated[
        float | None, typer.Option(min=0, help="USD per hour of a worker's node.")
    ] = None,
    profile: Annotated[
        str, typer.Option(help="Profile with the times of nodes: a name or a YAML file.")
    ] = "cluster-25gbit",
    seeds: Annotated[int, typer.Option(min=3, max=100, help="Number of seeds.")] = 5,
    output: Annotated[Path, typer.Option("--output", "-o", help="File of the experiment.")] = Path(
        "advice.yaml"
    ),
    as_json: AsJson = False,
) -> None:
    """Recommend a recovery strategy, with the expected cost of each for your training.

    An experiment on virtual time measures the cost of one failure under each strategy. The failure
    rate follows from --mtbf. Default prices are those of the price table.
    """
    import yaml

    from flows import advice
    from flows.config.document import read_document
    from flows.config.profile import load_profile
    from flows.metrics.prices import load_prices
    from flows.report.terminal import print_study

    hourly = load_prices().node_hour
    situation = advice.Situation(
        nbytes=advice.bytes_of(model, "--model"),
        workers=workers,
        servers=servers,
        gradient=advice.seconds_of(gradient, "--gradient"),
        mtbf=advice.seconds_of(mtbf, "--mtbf"),
        outage=advice.seconds_of(outage, "--outage"),
        training=advice.seconds_of(training, "--training"),
        every=every,
        server_price=hourly["server"].usd if server_price is None else server_price,
        worker_price=hourly["worker"].usd if worker_price is None else worker_price,
        profile=load_profile(profile).build(),
    )
    situation.check()
    costs = output.with_name(f"{output.stem}-profile.yaml")
    _write(costs, yaml.safe_dump(advice.scaled_profile(situation), sort_keys=False))
    _write(output, advice.configuration(situation, seeds, output.stem, costs.name))
    with json_output(as_json) as out:
        ran = runs.run_missing(str(output), read_document(output))
        outcomes = ran.done.outcomes
        print_study(ran.study, None, console())
        exit_if_failed(outcomes)
        found = advice.expected(situation, ran.trials, outcomes)
        said = list(advice.warnings(situation, found, outcomes))
        recommended = advice.recommendation(found)
        print(f"\n{_table(found)}\n\n{recommended}", *(f"- {line}" for line in said), sep="\n")
        print(f"\nReport: {ran.done.report}\nTo continue with the experiment: dps run {output}")
        out.write(
            {
                **ran.document,
                "configuration": output,
                "strategies": found.rename_axis("strategy").reset_index().to_dict("records"),
                "recommendation": recommended,
                "warnings": said,
            }
        )


def _write(path: Path, text: str) -> None:
    """Write YAML with the command that made it; a file of other origin is not replaced."""
    from dps.errors import ConfigurationError
    from flows.files import write_whole

    if path.exists() and not path.read_text("utf-8", "replace").startswith(WRITTEN):
        raise ConfigurationError(
            f"{path}: exists, and was not written by `dps advise`. Choose another file: --output"
        )
    command = shlex.join(["dps", *sys.argv[1:]])
    write_whole(path, f"{WRITTEN}: {command}\n\n{text}", "the experiment")


def _table(found: pd.DataFrame) -> str:
    from dask.utils import format_time

    def setback(seconds: float) -> str:
        return "restarts" if math.isinf(seconds) else format_time(seconds) if seconds else "0"

    header = ["nodes", "pace %", "kept %", "setback by a loss", "updates lost", "USD/million"]
    forms = [
        "{:.0f}".format,
        "{:.1%}".format,
        "{:.2%}".format,
        setback,
        "{:.1f}".format,
        "{:.3g}".format,
    ]
    return str(found.drop(columns="lost_time").to_string(header=header, formatters=forms))
