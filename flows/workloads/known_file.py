"""Files and folders that a trial depends on, each identified by the SHA-256 of its contents."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import cast

from dps.errors import ConfigurationError
from dps.protocol.storage.regular import open_regular
from flows.readers.files import files_of


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
    """Return the SHA-256 of a file, or of the names and contents of the files of a folder.

    Raises
    ------
    ConfigurationError
        It cannot be read.
    """
    try:
        if not Path(path).is_dir():
            return _sha256_of_file(path)
        lines = (
            f"{_sha256_of_file(str(file))} {file.relative_to(path)}\n"
            for file in files_of(Path(path))
        )
        return hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error


def _sha256_of_file(path: str) -> str:
    status = Path(path).stat()
    return _sha256(path, status.st_mtime_ns, status.st_size)


# Every trial of a grid asks for it; by its time and size a file that was changed is read again.
@lru_cache(maxsize=64)
def _sha256(path: str, changed: int, size: int) -> str:
    with open_regular(Path(path)) as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()
