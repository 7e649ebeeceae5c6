"""What is closed at the end of a `with` block, or abandoned if something has failed in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self


class Closing(ABC):
    """Something of a training loop that has updates under way."""

    @abstractmethod
    def close(self) -> Any:
        """Take no more updates, and wait for all that is under way."""

    @abstractmethod
    def abandon(self) -> None:
        """Take no more updates, and wait for nothing."""

    def __enter__(self) -> Self:
        """Return this object itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it; if something has failed, without waiting for what is under way."""
        if kind is None:
            self.close()
        else:
            self.abandon()
