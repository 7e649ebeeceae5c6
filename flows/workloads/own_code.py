"""Functions and classes of one's own, named as "module:name" in a configuration.

A module is a file beside the configuration, or one that is installed. A file is imported under a
name of its own, so that two experiments may each have, say, a `model.py` in the same process, and
what it imports from its folder is its own as well.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from dps.errors import ConfigurationError
from flows.quoting import meant, quoted, shown
from flows.workloads.known_file import KnownFile, sha256_of

LONGEST_REASON = 300
_REFERENCE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class OwnCode:
    """Something callable in a module.

    Attributes
    ----------
    reference
        "module:name".
    path
        The file, where it is one beside the configuration; None: the module is installed.
    sha256
        Of the module's file. What that imports is not part of it.
    """

    reference: str
    path: str | None
    sha256: str

    def load(self) -> Callable[..., Any]:
        """Return what is named.

        Raises
        ------
        ConfigurationError
            The module cannot be imported, is another than it was, or has nothing of this name that
            can be called.
        """
        place, _, name = self.reference.partition(":")
        with refusing(self.reference):
            if self.path is None:
                module = import_module(place)
                KnownFile(_origin(module), self.sha256).check()
            else:
                KnownFile(self.path, self.sha256).check()
                module = _imported(place, self.path, self.sha256)
        found = getattr(module, name, None)
        if found is None:
            question = meant(name, [each for each in vars(module) if not each.startswith("_")])
            raise ConfigurationError(
                f"{_file(module)} has no {name!r}{'; ' if question else ''}{question}"
            )
        if not callable(found):
            raise ConfigurationError(
                f"{self.reference} is {type(found).__name__}, expected a function or a class"
            )
        called: Callable[..., Any] = found
        return called


def find(reference: str, folder: Path) -> OwnCode:
    """Find a module: beside the configuration, in the working directory, or an installed one.

    Raises
    ------
    ConfigurationError
        It is in none of these, or `reference` names nothing.
    """
    place, _ = module_and_name(reference)
    beside, here = (Path(each, f"{place}.py").absolute() for each in (folder, Path()))
    for path in (beside, here):
        if path.is_file():
            return code_at(reference, str(path))
    try:
        return code_at(reference, None)
    except ConfigurationError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and place.startswith(missing.name or "?"):
            raise ConfigurationError(
                f"there is no module {place!r}: neither {beside}"
                f"{f' nor {here}' * (here != beside)} nor one that is installed"
            ) from error
        raise


def module_and_name(reference: str) -> tuple[str, str]:
    """Return what "module:name" names; raises `ConfigurationError` if it names nothing."""
    matched = _REFERENCE.fullmatch(reference)
    if matched is None:
        raise ConfigurationError(f"{quoted(reference)} names nothing, expected 'module:name'")
    return matched[1], matched[2]


def code_at(reference: str, path: str | None) -> OwnCode:
    """Return what a file, or without one an installed module, has by this name now.

    Raises
    ------
    ConfigurationError
        The module cannot be imported, or its file cannot be read.
    """
    if path is not None:
        return OwnCode(reference, path, sha256_of(path))
    with refusing(reference):
        origin = _origin(import_module(reference.partition(":")[0]))
    return OwnCode(reference, None, sha256_of(origin))


@contextmanager
def refusing(reference: str, doing: str = "cannot be imported") -> Iterator[None]:
    """Say of what goes wrong in code of the user's what it was, and in which line of which file."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        reason = shown(f"{type(error).__name__}: {error}", LONGEST_REASON)
        raise ConfigurationError(f"{reference} {doing}: {reason}{_place(error)}") from error


# -- parts -----------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def _imported(place: str, path: str, sha256: str) -> ModuleType:
    spec = spec_from_file_location(f"{place}_{sha256[:12]}", path)
    assert spec is not None, "its name ends in .py"
    assert spec.loader is not None, "its name ends in .py"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # as dataclasses and the like look for it there
    try:
        with _folder_on_path(Path(path).parent):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


@contextmanager
def _folder_on_path(folder: Path) -> Iterator[None]:
    """Let modules beside a file be imported; afterwards their names are free again.

    Another folder may have modules of the same names, and so may the standard library.
    """
    path, loaded = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = path
        new = {name: module for name, module in list(sys.modules.items()) if name not in loaded}
        # Not all that is somewhere below it: a virtual environment may be.
        beside = {name for name in new if "." not in name and _is_in(folder, new[name])}
        for name in new:
            if name.partition(".")[0] in beside:
                sys.modules.pop(name, None)  # another thread imports as well


def _is_in(folder: Path, module: ModuleType) -> bool:
    """Whether a module is a file in a folder, or a package that is."""
    places = getattr(module, "__path__", None) or [getattr(module, "__file__", None)]
    return any(place is not None and Path(place).parent == folder for place in places)


def _origin(module: ModuleType) -> str:
    if module.__file__ is None:
        raise ConfigurationError(f"{module.__name__} is no file, expected a module of Python")
    return module.__file__


def _file(module: ModuleType) -> str:
    return module.__file__ or module.__name__


def _place(error: BaseException) -> str:
    """Where in code that is neither of dps nor installed an error was raised, for a message."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    top = Path(__file__).parents[2]
    others = (str(top / "flows"), str(top / "dps"), sys.prefix, sys.base_prefix)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others) and Path(frame.filename).is_file():
            return f" ({frame.filename}, line {frame.lineno})"
    return ""
