"""How npz files are opened: what is damaged, or no array of numbers, is refused for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dps.errors import ConfigurationError

Arrays = dict[str, npt.NDArray[Any]]


def open_npz(path: Path, names: Callable[[list[str]], Iterable[str]], write: str) -> Arrays:
    """Read arrays of an npz file; pickles are never loaded.

    Parameters
    ----------
    names
        Picks the arrays to read from the names of all that are there.
    write
        How such a file is written, for the message, as "x=…, y=…".

    Raises
    ------
    ConfigurationError
        The file cannot be read, or something that is picked is no array.
    """
    try:
        with path.open("rb") as raw, np.lib.npyio.NpzFile(raw, allow_pickle=False) as file:
            arrays = {name: file[name] for name in names(file.files)}
            strange = [name for name, read in arrays.items() if not isinstance(read, np.ndarray)]
            if strange:
                raise ValueError(f"{strange[0]} is no array of numpy")
    except ConfigurationError:
        raise
    # For damage, zipfile, what unpacks and numpy raise a dozen kinds that nothing else unites.
    except Exception as error:
        raise ConfigurationError(
            f"{path} cannot be read as npz: {error or type(error).__name__}; "
            f"write it with numpy.savez(path, {write})"
        ) from error
    return arrays
