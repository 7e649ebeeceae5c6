"""What commands share that take a configuration: arguments, and claims that --set leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import completion
from flows.cli.console import warn

if TYPE_CHECKING:
    from flows.config.experiment import ExperimentConfig
    from flows.config.yaml_document import Document

Config = Annotated[
    str,
    typer.Argument(
        help="A YAML file, or the name of a packaged one: demo, fashion, or of a replication, as "
        "replicate/ttf (an unknown name lists them all).",
        autocompletion=completion.configurations,
    ),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a setting, as in training.updates=400."
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask about a very large grid.")]


def tell_of_claims_left_out(
    document: Document, settings: Sequence[str], experiment: ExperimentConfig
) -> None:
    """Say how many of the written claims are not of this grid, as --set has changed it."""
    if any(text.startswith("claims") for text in settings):
        return
    written = document.data.get("claims") or ()
    if (left_out := len(written) - len(experiment.claims)) > 0:
        warn(
            f"{left_out} of the {len(written)} claims in {document.name} are left out: the grid, "
            "as --set has changed it, does not have what they compare"
        )
