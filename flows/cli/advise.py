"""The command `dps advise`: which recovery a training of yours should use, and what each costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.console import console
from flows.cli.documents import AsJson, json_output

if TYPE_CHECKING:
    from flows.advice.situation import Situation

app = typer.Typer()

Bytes = Annotated[str, typer.Option(help="Size of the model's parameters, such as 400MB.")]
Price = Annotated[float | None, typer.Option(min=0, help="USD for one hour of one node.")]


@app.command()
def advise(
    model: Bytes,
    mtbf: Annotated[
        str, typer.Option(help="Mean time between failures of one server-side node, such as 6h.")
    ],
    workers: Annotated[int, typer.Option(min=1, max=128, help="How many workers there are.")],
    gradient: Annotated[
        str, typer.Option(help="How long a worker computes a gradient, in seconds or as 200ms.")
    ],
    outage: Annotated[
        str, typer.Option(help="From the loss of a node until a fresh one is started in its place.")
    ] = "60s",
    servers: Annotated[
        int, typer.Option(min=1, max=16, help="How many servers, each with a shard.")
    ] = 2,
    training: Annotated[
        str, typer.Option(help="How long the whole training takes if nothing fails.")
    ] = "24h",
    server_price: Price = None,
    worker_price: Price = None,
    profile: Annotated[
        str, typer.Option(help="What costs time on the nodes: a profile's name, or its file.")
    ] = "cluster-25gbit",
    seeds: Annotated[
        int, typer.Option(min=4, max=100, help="Trials with a failure, for each strategy.")
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Say which recovery to use: what each is expected to cost a training of yours.

    Small trials on virtual time tell what one failure costs under each strategy; how often
    failures come is computed. Prices are those of the price table unless you give them.
    """
    from flows.advice.quantities import parse_duration, parse_size
    from flows.advice.situation import Situation
    from flows.analysis.prices import load_prices
    from flows.config.profile import load_profile

    hourly = load_prices().node_hour
    situation = Situation(
        nbytes=parse_size(model, "--model"),
        workers=workers,
        servers=servers,
        gradient=parse_duration(gradient, "--gradient"),
        mtbf=parse_duration(mtbf, "--mtbf"),
        outage=parse_duration(outage, "--outage"),
        training=parse_duration(training, "--training"),
        server_price=hourly["server"] if server_price is None else server_price,
        worker_price=hourly["worker"] if worker_price is None else worker_price,
        profile=load_profile(profile).build(),
    )
    try:
        _advise(situation, seeds, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _advise(situation: Situation, seeds: int, as_json: bool) -> None:
    from rich.console import Console

    from flows.advice import text
    from flows.advice.estimate import expected, flips
    from flows.advice.situation import STRATEGIES
    from flows.advice.trials import number_of_trials, parallel, run_trials

    situation.check()
    shown, aside = console(), Console(stderr=True, highlight=False)
    count = number_of_trials(STRATEGIES, seeds)
    with aside.status("") as status:

        def tell(over: int) -> None:
            status.update(f"{over} of {count} trials on virtual time")

        with parallel(situation, tell) as run:
            trialled = run_trials(situation, STRATEGIES, seeds, run)
    found, turns = expected(situation, trialled), flips(situation, trialled)
    told = list(text.warnings(situation, found, trialled[0].idle))
    if as_json:
        with json_output(as_json) as out:
            out.write(text.as_data(situation, found, turns, trialled[0].rate, told))
        return
    lines = ("", text.recommendation(situation, found, turns), *(f"- {line}" for line in told))
    shown.print(f"{text.situation_text(situation)}\n", markup=False)
    shown.print(text.table(found))
    for line in lines:
        shown.print(line, markup=False)
