"""What docs/statistics.md says of how many claims there are, against the configurations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from scipy.stats import binom

ROOT = Path(__file__).parents[3]
ONE_WRONG = 0.05  # the probability that any verdict of a family is wrong, at most
STATEMENTS, BY_STATEMENTS = 99, 7  # in code, of the replications; and their families


def found(pattern: str) -> tuple[float, ...]:
    """Return the numbers that a pattern finds on the page, which has it once."""
    page = " ".join((ROOT / "docs/statistics.md").read_text("utf-8").split())
    [numbers] = re.findall(pattern, page)
    return tuple(map(float, numbers if isinstance(numbers, tuple) else (numbers,)))


def test_the_page_tells_how_many_claims_and_families_there_are() -> None:
    paths = sorted((ROOT / "flows/configs").rglob("*.yaml"))
    claims = [len(yaml.safe_load(path.read_text("utf-8")).get("claims", ())) for path in paths]
    families = sum(count > 0 for count in claims)
    assert found(r"fix (\d+) claims in (\d+) families") == (sum(claims), families)
    everything = families + BY_STATEMENTS
    assert found(r"and virtual: (\d+) in all\. In each of these (\d+) families") == (
        STATEMENTS,
        everything,
    )
    assert found(r"most striking of (\d+) verdicts") == (sum(claims) + STATEMENTS,)
    [wrong] = found(r"at most ([\d.]+) families with a wrong verdict")
    assert wrong == pytest.approx(ONE_WRONG * everything)
    most, percent = found(r"no more than (\d+) with a probability of (\d+)%")
    assert percent == round(100 * binom.cdf(most, everything, ONE_WRONG))
