"""The commands of the benchmarks: `python -m benchmarks transport`, and so on.

README.md in this folder documents the JSON documents of `--json`.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dps.errors import DpsError
from flows.cli.console import AsJson, json_output, prepare_process

if TYPE_CHECKING:
    from benchmarks.torch import Row

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure the speed of dps on this machine.",
)


@app.command()
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
    as_json: AsJson = False,
) -> None:
    """Time push and pull between two processes, beside raw TCP, shared memory, Dask, Ray, torch."""
    from benchmarks import throughput as bench_throughput
    from benchmarks import transport as bench_transport

    transports = (transport,) if transport else bench_transport.TRANSPORTS
    with json_output(as_json) as out:
        if throughput:
            rounds = rounds or bench_throughput.ROUNDS
            rates = bench_throughput.throughput(transports, rounds, _notify)
            print(bench_throughput.table(rates, rounds))
            out.write([{**asdict(each.cell), "gradients_per_second": each.rates} for each in rates])
            return
        rounds = rounds or bench_transport.ROUNDS
        systems = bench_transport.systems(transports)
        sizes = bench_transport.SIZES
        found = [bench_transport.measure(size, systems, rounds, _notify) for size in sizes]
        print(bench_transport.table(found, rounds))
        if judged := bench_transport.verdicts(found):
            print(f"\n{judged}")
        out.write([{"bytes": each.size.nbytes, "seconds": each.seconds} for each in found])


@app.command()
def recovery(
    repeats: Annotated[int, typer.Option(min=1, help="Faults of each kind on each strategy.")] = 30,
    as_json: AsJson = False,
) -> None:
    """Time recoveries from real faults, and what each strategy costs without any."""
    from benchmarks import overhead as bench_cost
    from benchmarks import recovery as bench_recovery

    with json_output(as_json) as out:
        rows = bench_recovery.recovery_times(repeats, _notify)
        turns, summed = bench_cost.costs(_notify), bench_cost.sums(_notify)
        tables = bench_recovery.table(rows), bench_cost.table(turns), bench_cost.sums_table(summed)
        print(*tables, sep="\n\n")
        times = [{"strategy": r.strategy, "kind": r.kind, "rto_seconds": r.totals} for r in rows]
        out.write({"recoveries": times, "costs": turns, "sums": summed})


@app.command()
def elastic(
    moves: Annotated[int, typer.Option(min=1, help="Moves of a shard with each strategy.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Time how long a training is held up by shards that move between servers."""
    from benchmarks import elastic as bench_elastic

    with json_output(as_json) as out:
        rows = bench_elastic.moves(moves, _notify)
        print(bench_elastic.table(rows))
        out.write(
            [
                {
                    "strategy": row.strategy,
                    "move_seconds": [move.seconds for move in row.moves],
                    "pause_seconds": [move.pause_seconds for move in row.moves],
                    "gap_seconds": row.gaps,
                    "usual_seconds": row.usual,
                }
                for row in rows
            ]
        )


@app.command()
def measuring(
    rounds: Annotated[int, typer.Option(min=1, help="Turns with and without measuring.")] = 20,
    as_json: AsJson = False,
) -> None:
    """Compare gradients per second with and without recording and evaluation."""
    from benchmarks import measuring as bench_measuring

    with json_output(as_json) as out:
        found = bench_measuring.measuring(_notify, rounds)
        print(bench_measuring.table(found))
        out.write([{**asdict(each), "ratio": each.ratio} for each in found])


@app.command()
def sparse(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each system.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Count keys per second of sparse tables, beside a dictionary of arrays and Ray actors."""
    from benchmarks import sparse as bench_sparse

    with json_output(as_json) as out:
        rows = bench_sparse.sparse(_notify, rounds)
        print(bench_sparse.table(rows, rounds))
        out.write(rows)


@app.command()
def torch(
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each loop.")] = 7,
    as_json: AsJson = False,
) -> None:
    """Train modules of torch beside the bare loop of the same, also on CUDA if it is there."""
    from benchmarks import torch as bench_torch

    with json_output(as_json) as out:
        rows = bench_torch.measure(_notify, rounds)
        print(bench_torch.table(rows))
        out.write([_torch_row(row) for row in rows])


@app.command()
def baselines(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, each with and without a kill.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Write all trials there as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train beside a single process, Ray, torch RPC and torchft; kill the server of each."""
    from benchmarks.baselines import comparison

    with json_output(as_json) as out:
        found = comparison.compare(range(seeds), _notify)
        print(comparison.table(found))
        if output is not None:
            comparison.write(found, output)
        out.write(comparison.as_data(found))


@app.command()
def examples(
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, each without and with kills.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Count the examples that each system loses or repeats if a process is killed."""
    from benchmarks.baselines import counting

    with json_output(as_json) as out:
        found = counting.count(range(seeds), _notify)
        print(counting.table(found))
        out.write([asdict(each) for each in found])


def _torch_row(row: Row) -> dict[str, Any]:
    return {
        "model": row.model.name,
        "device": row.model.device,
        "variant": row.variant.name,
        "bytes": row.nbytes,
        "bare_seconds": row.bare,
        "replica_seconds": row.replica,
        "share": row.share,
        "phases": row.phases,
    }


def _notify(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run the command; exit with code 2 at an error that dps raises on purpose."""
    prepare_process()
    try:
        app(prog_name="python -m benchmarks")
    except DpsError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
