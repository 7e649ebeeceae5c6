"""The commands that check and time dps itself: `dps soak`, `dps simulate` and `dps bench`."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from flows.cli.console import console

app = typer.Typer()
bench = typer.Typer(no_args_is_help=True, help="Measure the speed of dps on this machine.")
app.add_typer(bench, name="bench")


@app.command()
def soak(
    minutes: Annotated[
        float, typer.Option(min=0, help="How long; each strategy once at least.")
    ] = 30,
    seed: Annotated[int, typer.Option(help="Draws the faults.")] = 0,
    first: Annotated[int, typer.Option(help="The number of the first round.")] = 1,
    faults: Annotated[int, typer.Option(min=1, help="Faults in a round.")] = 8,
    only: Annotated[list[str], typer.Option(help="A strategy to take; may be given again.")] = [],  # noqa: B006
) -> None:
    """Kill and pause nodes at random for as long as you like; whatever is promised must hold."""
    from flows.verification.soak import soak as run_soak

    raise typer.Exit(run_soak(minutes, seed, first, faults, only))


@app.command()
def returns(
    kill: Annotated[
        list[str],
        typer.Option(help="Whom to kill; may be given again."),
    ] = ["driver", "scheduler"],  # noqa: B006
    times: Annotated[int, typer.Option(min=1, help="How often each.")] = 20,
    seed: Annotated[int, typer.Option(help="Draws the moments.")] = 0,
    every: Annotated[
        int, typer.Option(min=1, help="The interval of checkpoints, in updates.")
    ] = 100,
    standby: Annotated[bool, typer.Option("--standby", help="Keep the next driver ready.")] = False,
) -> None:
    """Kill the driver or the scheduler of supervised trainings; each must go on by itself."""
    from flows.verification.returns import run_returns

    raise typer.Exit(run_returns(kill, times, seed, every, standby))


@app.command()
def simulate(
    schedules: Annotated[int, typer.Option(min=1, help="How many, over all strategies.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Which series of schedules.")] = 0,
    replay: Annotated[
        str, typer.Option(metavar="CASE:SEED", help="Repeat one schedule, as in 'chain(2):12'.")
    ] = "",
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Have every deliberately broken variant caught.")
    ] = False,
    fresh: Annotated[
        str | None,
        typer.Option(metavar="COMMIT", help="Take the series of a commit, given its hash."),
    ] = None,
) -> None:
    """Run the protocol on virtual time under random faults; every promise must hold."""
    from flows.verification import simulate as simulation

    if fresh is not None:
        seed = _series_of(fresh)
        print(f"series {seed}; again: dps simulate --schedules {schedules} --seed {seed}")
    if replay:
        failed = simulation.replay(replay, console())
    elif mutants:
        failed = bool(simulation.run_mutants(console()))
    else:
        failed = bool(simulation.run_many(schedules, seed, console()))
    if failed:
        raise typer.Exit(1)


def _series_of(commit: str) -> int:
    """The series of schedules that a commit stands for, another one for each."""
    if re.fullmatch("[0-9a-f]{8,64}", commit) is None:
        raise typer.BadParameter(
            f"--fresh {commit!r}: expected the hash of a commit, as `git rev-parse HEAD` prints it"
        )
    return int(commit[:8], 16)


@bench.callback()
def _bench() -> None:
    pass


@bench.command()
def transport(
    transport: Annotated[
        Literal["auto", "shared_memory", "stream", "dask"] | None,
        typer.Option(help="Measure dps with this one alone; else with each of the last three."),
    ] = None,
    throughput: Annotated[
        bool,
        typer.Option(
            "--throughput", help="Count gradients per second against workers and shards instead."
        ),
    ] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each system.")] = None,
) -> None:
    """Time push and pull between two processes, beside raw TCP, shared memory, Dask, Ray, torch."""
    from flows.benchmarks import throughput as bench_throughput
    from flows.benchmarks import transport as bench_transport

    tell = partial(print, file=sys.stderr, flush=True)
    transports = (transport,) if transport else bench_transport.TRANSPORTS
    if throughput:
        rounds = rounds or bench_throughput.ROUNDS
        rates = bench_throughput.throughput(transports, rounds, tell)
        print(bench_throughput.table(rates, rounds))
        return
    rounds = rounds or bench_transport.ROUNDS
    systems = bench_transport.systems(transports)
    found = [bench_transport.measure(size, systems, rounds, tell) for size in bench_transport.SIZES]
    print(bench_transport.table(found, rounds))
    if judged := bench_transport.verdicts(found):
        print(f"\n{judged}")


@bench.command()
def recovery(
    repeats: Annotated[int, typer.Option(min=1, help="Faults of each kind on each strategy.")] = 30,
) -> None:
    """Time recoveries from real faults, and what each strategy costs without any."""
    from flows.benchmarks import overhead as bench_cost
    from flows.benchmarks import recovery as bench_recovery

    tell = partial(print, file=sys.stderr, flush=True)
    rows = bench_recovery.recovery_times(repeats, tell)
    turns, summed = bench_cost.costs(tell), bench_cost.sums(tell)
    tables = bench_recovery.table(rows), bench_cost.table(turns), bench_cost.sums_table(summed)
    print(*tables, sep="\n\n")


@bench.command()
def elastic(
    moves: Annotated[int, typer.Option(min=1, help="Moves of a shard with each strategy.")] = 50,
) -> None:
    """Time how long a training is held up by shards that move between servers."""
    from flows.benchmarks import elastic as bench_elastic

    tell = partial(print, file=sys.stderr, flush=True)
    print(bench_elastic.table(bench_elastic.moves(moves, tell)))


@bench.command()
def measuring(
    rounds: Annotated[int, typer.Option(min=1, help="Turns with and without measuring.")] = 20,
) -> None:
    """Compare gradients per second with everything recorded and evaluated, and with neither."""
    from flows.benchmarks import measuring as bench_measuring

    tell = partial(print, file=sys.stderr, flush=True)
    print(bench_measuring.table(bench_measuring.measuring(tell, rounds)))


@bench.command()
def sparse(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each system.")] = 7,
) -> None:
    """Count keys per second of sparse tables, beside a dictionary of arrays and Ray actors."""
    from flows.benchmarks import sparse as bench_sparse

    tell = partial(print, file=sys.stderr, flush=True)
    print(bench_sparse.table(bench_sparse.sparse(tell, rounds), rounds))


@bench.command()
def torch(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each loop.")] = 7,
) -> None:
    """Train modules of torch beside the bare loop of the same, also on CUDA if it is there."""
    from flows.benchmarks import torch as bench_torch

    tell = partial(print, file=sys.stderr, flush=True)
    print(bench_torch.table(bench_torch.measure(tell, rounds)))


@bench.command()
def baselines(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, each with and without a kill.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Write all trials there as JSON.")] = None,
) -> None:
    """Train beside a single process, Ray, torch RPC and torchft; kill the server of each."""
    from flows.benchmarks.baselines import comparison

    tell = partial(print, file=sys.stderr, flush=True)
    found = comparison.compare(range(seeds), tell)
    print(comparison.table(found))
    if output is not None:
        comparison.write(found, output)
