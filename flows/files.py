"""Owns how files with results are written: whole or not at all, and with a message if it fails.

A folder that cannot be written after hours of running must not end in a traceback.
"""

from __future__ import annotations

from pathlib import Path

from dps.errors import StoreUnavailable


def write_whole(path: Path, text: str, what: str) -> None:
    """Write a file, and make its folder; an older file is replaced as a whole.

    Whenever the process is killed, the file is there whole or as it was before.

    Parameters
    ----------
    what
        What the text is, for the message, such as "the report".

    Raises
    ------
    StoreUnavailable
        The file cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        raise StoreUnavailable(
            f"{what} cannot be written to {path}: {error.strerror or error}. Make the folder "
            "writable and repeat the command: what is recorded is kept."
        ) from error
