"""The verdicts of one version of a replication, as a file: what another version is set beside."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import Field, ValidationError

from dps.errors import ConfigurationError
from flows.analysis.statistics import Interval
from flows.analysis.statistics.decisions import Verdict
from flows.config.base import Section
from flows.config.limits import MOST_CURVE_BYTES
from flows.files import read_bytes, write_whole

VERDICTS = "verdicts.json"
NO_FIGURE = "–"  # in the place of an effect of which no trial tells anything


class ClaimVerdict(Section):
    """One claim as it was judged.

    Attributes
    ----------
    study
        The part of the replication whose trials it was judged on; "" where there is one only.
    claim, measured
        The claim, and the statement that stands for it; "" where the claim is the statement.
    found
        The effect with its interval and the number of seeds, in words.
    verdict
        What it shows.
    mean, low, high, n
        The same effect in numbers, with the interval at the level of the verdict. None where there
        is none, or where the effect is only a bound.
    turn
        The effect at which its direction turns: 0 of a difference, 1 of a ratio.
    note
        What is to be known of the verdict: that the claim was fixed after the data, say.
    """

    study: str = ""
    claim: str
    measured: str = ""
    found: str
    verdict: Verdict
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    turn: float = 0.0
    note: str = ""

    @classmethod
    def of(
        cls,
        claim: str,
        found: str,
        verdict: Verdict,
        effect: Interval | None,
        *,
        study: str = "",
        measured: str = "",
        turn: float = 0.0,
        note: str = "",
    ) -> ClaimVerdict:
        """Return a verdict whose effect is in numbers as well; None: it has none, or is a bound."""
        words = {"study": study, "claim": claim, "measured": measured, "found": found}
        numbers = {} if effect is None else asdict(effect)
        known = {"verdict": verdict, **numbers, "turn": turn, "note": note}
        return cls.model_validate({**words, **known})

    @property
    def told(self) -> str:
        """The verdict, and what is to be known of it."""
        return f"{self.verdict} ({self.note})" if self.note else self.verdict

    @property
    def has_figure(self) -> bool:
        """Whether a number was found, if only a bound."""
        return self.found.partition(";")[0] != NO_FIGURE

    @property
    def key(self) -> tuple[str, str, str]:
        """What the same claim of another version has as well."""
        return self.study, self.claim, self.measured

    @property
    def effect(self) -> Interval | None:
        """The effect in numbers."""
        return None if self.mean is None else Interval(self.mean, self.low, self.high, self.n)


class CellFigure(Section):
    """One figure of one cell, the trials that differ in their seeds alone.

    Attributes
    ----------
    study, configuration, condition
        The cell.
    figure
        Its name, as `flows.replication.cells.FIGURES` has it.
    seeds
        Of its trials.
    mean
        Over them.
    values
        Of each of them; empty where only the mean was kept.
    """

    study: str
    configuration: str
    condition: str
    figure: str
    seeds: tuple[int, ...] = Field(strict=False)
    mean: float
    values: tuple[float, ...] = Field(default=(), strict=False)

    @classmethod
    def of(
        cls, study: str, configuration: str, condition: str, figure: str, by_seed: dict[int, float]
    ) -> CellFigure:
        """Return a figure with what each seed has of it."""
        return cls(
            study=study,
            configuration=configuration,
            condition=condition,
            figure=figure,
            seeds=tuple(by_seed),
            mean=fmean(by_seed.values()),
            values=tuple(by_seed.values()),
        )

    @property
    def cell(self) -> tuple[str, str, str]:
        """What all figures of the cell have in common."""
        return self.study, self.configuration, self.condition

    @property
    def by_seed(self) -> dict[int, float]:
        """What each seed has; empty where only the mean was kept."""
        return dict(zip(self.seeds, self.values, strict=True)) if self.values else {}


class Verdicts(Section):
    """All verdicts of one version of a replication.

    Attributes
    ----------
    paper
        "ttf" or "ftps".
    command
        What has judged them.
    virtual
        Whether on virtual time.
    source
        Where they come from if not straight from records; "" if they do.
    claims
        In the order of the paper.
    cells
        Figures of the single cells, seed by seed, for those of another version.
    """

    paper: Literal["ttf", "ftps"]
    command: str
    virtual: bool
    source: str = ""
    claims: tuple[ClaimVerdict, ...] = Field(strict=False)
    cells: tuple[CellFigure, ...] = Field(default=(), strict=False)

    def write(self, folder: Path) -> None:
        """Write `verdicts.json`.

        Raises
        ------
        StoreUnavailable
            The folder cannot be written.
        """
        write_whole(folder / VERDICTS, self.model_dump_json(indent=1) + "\n", "the verdicts")


def read_verdicts(path: Path, paper: str) -> Verdicts:
    """Read the verdicts of real processes on a paper's claims, as `Verdicts.write` has them.

    Raises
    ------
    ConfigurationError
        There is no such file, it is none of that kind, or of another paper or of virtual time.
    """
    found = _read(path)
    if found.paper != paper or found.virtual:
        raise ConfigurationError(
            f"{path}: the verdicts of `{found.command}`; expected those of {paper} on real "
            f"processes, as `dps replicate {paper}` writes them"
        )
    return found


def _read(path: Path) -> Verdicts:
    try:
        return Verdicts.model_validate_json(read_bytes(path, MOST_CURVE_BYTES))
    except OSError as error:
        raise ConfigurationError(f"{path}: the verdicts cannot be read: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigurationError(
            f"{path}: {place}: {first['msg']}; expected the verdicts.json of a `dps replicate`"
        ) from error
