"""The configurations of whole replications: which paper, and how much of it.

`dps run` takes one like any experiment: it runs the experiments of the paper and ends with its
claims, as `dps replicate` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from dps.errors import ConfigurationError
from flows.config.base import Section
from flows.config.errors import complaints, placed
from flows.config.experiment import find_document
from flows.config.yaml_document import Document, overridden, parse_overrides, place_of

KEY = "replication"


class ReplicationConfig(Section):
    """A paper's experiments, in short or `full`, on real processes or on `virtual` time.

    `published` is a CSV file of a paper's curves.
    """

    replication: Literal["ttf", "ftps"]
    full: bool = False
    virtual: bool = False
    published: str | None = None

    @property
    def curves(self) -> Path | None:
        """The file of the published curves."""
        return None if self.published is None else Path(self.published)


def load_replication(
    source: str | Document, overrides: Sequence[str] = ()
) -> ReplicationConfig | None:
    """Read a replication; None if what is there is something else.

    Raises
    ------
    ConfigurationError
        Anything in it that cannot work, with the place and what was expected.
    """
    document = source if isinstance(source, Document) else find_document(source)
    if KEY not in document.data:
        return None
    data, assignments = document.data, parse_overrides(overrides)
    for assignment in assignments:
        data = overridden(data, assignment)
    try:
        config = ReplicationConfig.model_validate(data)
    except ValidationError as error:
        raise placed(complaints(error, data), document, assignments) from error
    if config.published is not None and config.replication != "ttf":
        raise ConfigurationError(
            f"{place_of('published', document, assignments)}: only the curves of ttf are drawn"
        )
    return config
