"""The command `dps advise`: which recovery a training should use, and what each costs."""

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
Price = Annotated[float | None, typer.Option(min=0, help="USD for one hour of one node.")]


def advise(
    model: Annotated[str, typer.Option(help="Size of the model's parameters, such as 400MB.")],
    mtbf: Annotated[
        str, typer.Option(help="Mean time between failures of one server-side node, such as 6h.")
    ],
    workers: Annotated[int, typer.Option(min=1, max=128, help="Number of workers.")],
    gradient: Annotated[
        str, typer.Option(help="How long a worker computes a gradient, in seconds or as 200ms.")
    ],
    outage: Annotated[
        str, typer.Option(help="From the loss of a node until a fresh one is started in its place.")
    ] = "60s",
    servers: Annotated[int, typer.Option(min=1, max=16, help="Number of servers.")] = 2,
    training: Annotated[
        str, typer.Option(help="How long the whole training takes if nothing fails.")
    ] = "24h",
    every: Annotated[int, typer.Option(min=1, help="Updates between two checkpoints.")] = 100,
    server_price: Price = None,
    worker_price: Price = None,
    profile: Annotated[
        str, typer.Option(help="Cost model of the nodes: a profile's name or its file.")
    ] = "cluster-25gbit",
    seeds: Annotated[int, typer.Option(min=3, max=100, help="Number of seeds.")] = 5,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Where to write the experiment.")
    ] = Path("advice.yaml"),
    as_json: AsJson = False,
) -> None:
    """Recommend a recovery: what each is expected to cost your training.

    An experiment on virtual time measures what one failure costs under each strategy; how often
    failures come is computed. Prices are those of the price table unless you give them.
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
        print(f"\nReport: {ran.done.report}\nThe experiment, to go on with: dps run {output}")
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
        raise ConfigurationError(f"{path}: is there already; name another file by --output")
    command = shlex.join(["dps", *sys.argv[1:]])
    write_whole(path, f"{WRITTEN}: {command}\n\n{text}", "the experiment")


def _table(found: pd.DataFrame) -> str:
    """Return what is expected, as text: shares in percent, times for people."""
    from dask.utils import format_time

    def setback(seconds: float) -> str:
        return "begins again" if math.isinf(seconds) else format_time(seconds) if seconds else "0"

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
