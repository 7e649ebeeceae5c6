"""How local files are read that somebody else may have put there: only if they are regular ones.

Opening a pipe blocks until there is a writer, and a device may have no end.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO


class NotAFile(OSError):
    """There is something at a path, but no file: a folder, a device or a pipe."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a local file to be read.

    Raises
    ------
    NotAFile
        It is something else than a file.
    OSError
        It cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        what = "a folder" if stat.S_ISDIR(kind) else "a device or a pipe"
        raise NotAFile(errno.EINVAL, f"It is {what}, not a file", os.fspath(path))
    return open(descriptor, "rb")
