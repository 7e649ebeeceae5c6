"""Files that a trial depends on, each known by the SHA-256 of what is in it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dps.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class KnownFile:
    """A file that must still have the SHA-256 that it had when a trial was planned."""

    path: str
    sha256: str

    @staticmethod
    def found(path: str) -> KnownFile:
        """Return the file that is there now; raises `ConfigurationError` if none is."""
        return KnownFile(path, sha256_of(path))

    def check(self) -> None:
        """Raise `ConfigurationError` if the file is gone, or another than it was."""
        if sha256_of(self.path) != self.sha256:
            raise ConfigurationError(
                f"{self.path} has changed since the trial was planned (its SHA-256 was "
                f"{self.sha256[:12]}…): put that file back, or plan new trials with `dps run`"
            )


def sha256_of(path: str) -> str:
    """Return the SHA-256 of what is in a file; raises `ConfigurationError` if it cannot be read."""
    try:
        status = Path(path).stat()
        return _sha256(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error


# Every trial of a grid asks for it; by its time and size a file that was changed is read again.
@lru_cache(maxsize=64)
def _sha256(path: str, changed: int, size: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
