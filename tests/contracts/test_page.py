"""The durability of the page on strategies passes the test that the page shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dps import DpsError, message
from dps.recovery.durability import Durability, Persistence
from tests.contracts.durabilities import DurabilityContract
from tests.docs.pages import fences

SHOWN: dict[str, Any] = {"__name__": "__main__"}
for fence in fences("python"):
    if fence.page == "docs/howto/strategy.md" and "\nclass " in fence.text:
        exec(fence.text, SHOWN)
TestArchive = SHOWN["TestArchive"]


class Broken(Persistence):
    source = "disk"
    immediate = False
    error: Exception

    async def commit(self, epoch: int, state: object) -> None:
        raise self.error


@message
@dataclass(frozen=True)
class OnBrokenDisk(Durability):
    def persistence(self, context: object) -> Persistence:
        return Broken()


@pytest.mark.parametrize("error", [OSError("no space left"), KeyError("no space left")], ids=repr)
def test_the_suite_shows_the_error_of_a_durability(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broken, "error", error, raising=False)
    with pytest.raises((DpsError, KeyError), match="no space left"):
        DurabilityContract().test_where_it_came_back_from_is_recorded(OnBrokenDisk(), "disk")
