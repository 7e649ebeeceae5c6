"""How much of a replication is run, and on which time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flows.analysis.finished import RESULTS


@dataclass(frozen=True, slots=True)
class Version:
    """One version of a replication; records of one on virtual time are never read by another.

    Attributes
    ----------
    full
        All cells and seeds, or some of them.
    virtual
        On virtual time, or on real processes.
    """

    full: bool = False
    virtual: bool = False

    @property
    def options(self) -> list[str]:
        """The options of `dps replicate` that ask for it."""
        return [*(["--full"] if self.full else []), *(["--virtual"] if self.virtual else [])]

    def command(self, paper: str) -> str:
        """Return the command that runs it."""
        return " ".join(["dps", "replicate", paper, *self.options])

    def named(self, name: str) -> str:
        """Return what an experiment or a folder of this version is called."""
        return name + ("" if self.full else "-short") + ("-virtual" if self.virtual else "")

    def folder(self, paper: str, here: Path) -> Path:
        """Return where text, figures and verdicts are written."""
        return here / RESULTS / self.named(f"replicate-{paper}")
