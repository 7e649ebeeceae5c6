"""The command `python -m examples NAME`: solves a problem, and compares it with its reference.

README.md in this folder documents the JSON document of `--json`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dps import ConfigurationError, DpsError
from flows.cli.console import AsJson, json_output, prepare_process

if TYPE_CHECKING:
    from distributed import Client

    from examples.outcome import Outcome, Task

EXAMPLES = {
    "l1_logistic": "L1-regularised logistic regression by delayed block proximal gradient",
    "rica": "reconstruction ICA of image patches",
    "lda": "topics of a corpus by distributed Gibbs sampling",
    "factors": "matrix factorisation with sparse tables of users and items",
}
ALL = "all"
PAGE = "examples.md"
SIZES = ("small", "large")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def example(
    name: Annotated[str, typer.Argument(help=f"{', '.join(EXAMPLES)}, or {ALL}.")],
    data: Annotated[
        Path | None, typer.Option(help="A file of your own instead of the data that is at hand.")
    ] = None,
    size: Annotated[str, typer.Option(help="small: seconds; large: minutes.")] = "small",
    workers: Annotated[int, typer.Option(min=1, help="How many workers.")] = 2,
    shards: Annotated[int, typer.Option(min=1, help="How many servers.")] = 2,
    recovery: Annotated[str, typer.Option(help="none or chain.")] = "none",
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
    output: Annotated[Path, typer.Option(help="Where pictures and lists go.")] = Path(
        "results/examples"
    ),
    as_json: AsJson = False,
) -> None:
    """Solve a problem with a parameter server, and compare the result with an independent
    reference. Exit with code 1 if a target is missed.
    """
    from examples.outcome import Task

    names = _names(name)
    if size not in SIZES:
        raise ConfigurationError(f"--size {size}: expected {' or '.join(SIZES)}")
    if recovery not in ("none", "chain"):
        raise ConfigurationError(f"--recovery {recovery}: expected none or chain")
    if data is not None and (len(names) > 1 or not data.is_file()):
        raise ConfigurationError(
            f"--data {data}: expected a file" if len(names) == 1 else "--data: name one example"
        )
    task = Task(data, size, workers, shards, recovery, seed, output)
    if "rica" in names:  # of all the examples, only its own data may be too small for it
        from examples.rica import check

        check(task)
    with json_output(as_json) as out:
        outcomes = solve_each(names, output, lambda each: solve(each, task))
        out.write([as_data(*each) for each in zip(names, outcomes, strict=True)])
    if not all(outcome.met for outcome in outcomes):
        raise typer.Exit(1)


def solve_each(
    names: Sequence[str], folder: Path, solver: Callable[[str], Outcome]
) -> list[Outcome]:
    """Solve the examples in turn; print each result and add it to the page at once.

    Raises `ConfigurationError` if the folder cannot be written (checked first), or the data of an
    example cannot be used.
    """
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
    outcomes: dict[str, Outcome] = {}
    for name in names:
        began = time.monotonic()
        outcomes[name] = solver(name)
        print(told(name, outcomes[name], time.monotonic() - began), flush=True)
        with _writing(folder):
            write_page(outcomes, folder)
    return list(outcomes.values())


def told(name: str, outcome: Outcome, seconds: float) -> str:
    """Return the result of an example as text; the last line has the verdict."""
    lines = [
        f"{name}: {EXAMPLES[name]}",
        *outcome.notes,
        *(f"written: {path}" for path in outcome.files),
        f"{verdict(outcome)} ({seconds:.0f} s)",
    ]
    return "\n  ".join(lines)


def as_data(name: str, outcome: Outcome) -> dict[str, Any]:
    """Return the result of an example for JSON."""
    found = {"reference_name" if key == "named" else key: v for key, v in asdict(outcome).items()}
    return {**found, "example": name, "excess": outcome.excess, "within_tolerance": outcome.met}


def verdict(outcome: Outcome) -> str:
    """Reached, reference and target in one line."""
    return (
        f"{outcome.measure} {outcome.reached:.6g}, {outcome.named} {outcome.reference:.6g}: "
        f"{outcome.excess:+.3%}, target ≤ {outcome.tolerance:+.1%}: "
        f"{'met' if outcome.met else 'MISSED'}"
    )


def write_page(outcomes: dict[str, Outcome], folder: Path) -> None:
    """Write the results as a page of Markdown, with their pictures."""
    parts = ["# Examples"]
    for name, outcome in outcomes.items():
        pictures = [f"![{path.stem}]({path.name})" for path in outcome.files if _is_picture(path)]
        notes = [f"- {note}" for note in outcome.notes]
        parts += [f"## {name}", f"{EXAMPLES[name]}.", verdict(outcome), "\n".join(notes), *pictures]
    (folder / PAGE).write_text("\n\n".join(parts) + "\n", "utf-8")


def solve(name: str, task: Task) -> Outcome:
    """Start a cluster on this machine, and solve a problem on it."""
    from dps import LocalCluster, NodeSpec

    nodes = [NodeSpec(f"server-{i}", "server") for i in range(task.shards)]
    if task.recovery == "chain":
        nodes += [NodeSpec(f"replica-{i}-1", "server") for i in range(task.shards)]
    nodes += [NodeSpec(f"worker-{i}", "worker") for i in range(task.workers)]
    module = f"examples.{name}"
    solver: Callable[[Client, Task], Outcome] = import_module(module).solve
    with LocalCluster(nodes, ("dps.cluster.driver.parameter_server", module)) as cluster:
        return solver(cluster.client, task)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"--output {folder}: nothing can be written there: {error.strerror or error}; name a "
            "folder of yours"
        ) from error


def _names(name: str) -> list[str]:
    if name not in (*EXAMPLES, ALL):
        raise ConfigurationError(
            f"example {name!r} is unknown; there are: {', '.join(EXAMPLES)} and {ALL}"
        )
    return list(EXAMPLES) if name == ALL else [name]


def _is_picture(path: Path) -> bool:
    return path.suffix in (".png", ".svg")


def main() -> None:
    """Run the command; exit with code 2 at an error that dps raises on purpose."""
    prepare_process()
    try:
        app(prog_name="python -m examples")
    except DpsError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
