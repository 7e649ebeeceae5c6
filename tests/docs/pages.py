"""What the tests of the documentation read from its pages: fences, and lines for a shell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
# Pages whose Python is run by tests of what they show, with a cluster as a user starts it.
RUN_ELSEWHERE = {
    "README.md": "tests/cluster/driver/test_facade.py",
    "docs/howto/own-data.md": "tests/flows/execution/test_own_tutorial.py",
    "docs/filters.md": "tests/cluster/driver/test_filters.py",
    "docs/sparse-tables.md": "tests/cluster/driver/test_facade.py",
}

# Pages whose Python needs what no machine of ours has: it is only compiled.
NOT_RUN = {"docs/howto/kubernetes.md", "docs/howto/coiled.md"}
OPTIONAL = ("torch", "jax")  # each installed by the make target of its name

_FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:dps|make) [^`]+)`")
_INDENTED = re.compile(r"^ {4}((?:dps|make) .+)$", re.MULTILINE)


@dataclass(frozen=True)
class Fence:
    """A block of code on a page: its language, and what it says."""

    page: str
    language: str
    title: str
    text: str

    @property
    def is_script(self) -> bool:
        """Whether it is a whole program, rather than a part of what its page shows."""
        return "if __name__ ==" in self.text

    @property
    def needs(self) -> list[str]:
        """The optional packages that it imports."""
        imported = re.findall(r"^(?:import|from) (\w+)", self.text, re.MULTILINE)
        return [package for package in OPTIONAL if package in imported]

    @property
    def is_file(self) -> bool:
        """Whether its page has the reader save it, under the name that is its title."""
        return self.title.startswith("title=")

    @property
    def file_name(self) -> str:
        """The name under which it is saved."""
        return self.title.removeprefix('title="').removesuffix('"')


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def fences(language: str) -> list[Fence]:
    """The blocks of a language on all pages, in order."""
    return [
        Fence(name_of(page), language, info.strip(), text)
        for page in PAGES
        for kind, info, text in _FENCE.findall(page.read_text())
        if kind == language
    ]


def programs() -> list[Fence]:
    """All Python that is run by the tests of the documentation."""
    return [fence for fence in fences("python") if fence.page not in {*RUN_ELSEWHERE, *NOT_RUN}]


def scripts() -> list[Fence]:
    """The whole programs."""
    return [fence for fence in programs() if fence.is_script]


def examples() -> dict[str, Fence]:
    """For each page, what it shows in Python piece by piece, as one program."""
    found: dict[str, Fence] = {}
    for fence in programs():
        if not fence.is_script:
            before = found[fence.page].text if fence.page in found else ""
            found[fence.page] = Fence(fence.page, "python", "", before + fence.text)
    return found


def shell_lines() -> Iterator[tuple[str, list[str]]]:
    """The page and the words of each command of ours, from blocks and from within sentences."""
    for page in PAGES:
        text = _FENCE.sub("", page.read_text())
        for line in (*_INDENTED.findall(text), *_INLINE.findall(text)):
            words = shlex.split(line, comments=True)
            yield name_of(page), words[: words.index("|")] if "|" in words else words
