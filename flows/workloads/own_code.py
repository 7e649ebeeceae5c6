"""A user's files, identified by their SHA-256, and functions and classes named as "module:name".

A module is a file beside the configuration, or one that is installed. A file is imported under a
unique name, so that each experiment may have a `model.py` in the same process, and its imports from
its folder are separate as well.
"""

from __future__ import annotations

import hashlib
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
from dps.recovery.files import open_regular
from flows.quoting import meant, quoted, shown

LONGEST_REASON = 300
_REFERENCE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


def sha256_of(path: str) -> str:
    """Return the SHA-256 of a file, or of the names and contents of the files of a folder.

    Raises `ConfigurationError` if it cannot be read.
    """
    place, sha = Path(path), hashlib.sha256()
    try:
        if not place.is_dir():
            status = place.stat()
            return _sha256(path, status.st_mtime_ns, status.st_size)
        for file in sorted(each for each in place.rglob("*") if each.is_file()):
            status = file.stat()
            known = _sha256(str(file), status.st_mtime_ns, status.st_size)
            sha.update(f"{known} {file.relative_to(place)}\n".encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
    return sha.hexdigest()


# Every trial of a grid asks for it; a file that was changed has another time or size.
@lru_cache(maxsize=64)
def _sha256(path: str, changed: int, size: int) -> str:
    with open_regular(Path(path)) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def check_file(path: str, sha256: str) -> None:
    """Raise `ConfigurationError` if a file is gone, or has another SHA-256."""
    if sha256_of(path) != sha256:
        raise ConfigurationError(
            f"{path} has changed since the trial was planned (its SHA-256 was {sha256[:12]}…): "
            "restore that file, or plan new trials with `dps run`"
        )


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
        Of the module's file, not of its imports.
    """

    reference: str
    path: str | None
    sha256: str

    def load(self) -> Callable[..., Any]:
        """Return the callable.

        Raises `ConfigurationError` if the module cannot be imported, has changed, or has nothing of
        this name that can be called.
        """
        place, _, name = self.reference.partition(":")
        with refusing(self.reference):
            if self.path is None:
                module = import_module(place)
                check_file(_origin(module), self.sha256)
            else:
                check_file(self.path, self.sha256)
                module = _imported(place, self.path, self.sha256)
        member = getattr(module, name, None)
        if member is None:
            question = meant(name, [each for each in vars(module) if not each.startswith("_")])
            raise ConfigurationError(
                f"{module.__file__ or place} has no {name!r}{'; ' if question else ''}{question}"
            )
        if not callable(member):
            raise ConfigurationError(
                f"{self.reference} is {type(member).__name__}, expected a function or a class"
            )
        called: Callable[..., Any] = member
        return called


def find(reference: str, folder: Path) -> OwnCode:
    """Find a module: beside the configuration, in the working directory, or an installed one.

    Raises `ConfigurationError` if it is in none of these, or `reference` is not "module:name".
    """
    place, _ = module_and_name(reference)
    places = dict.fromkeys(Path(each, f"{place}.py").absolute() for each in (folder, Path()))
    for path in places:
        if path.is_file():
            return code_at(reference, str(path))
    try:
        return code_at(reference, None)
    except ConfigurationError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and place.startswith(missing.name or "?"):
            raise ConfigurationError(
                f"no module {place!r}: {', '.join(map(str, places))} and the installed packages "
                "have none"
            ) from error
        raise


def module_and_name(reference: str) -> tuple[str, str]:
    """Return both parts of "module:name"; raises `ConfigurationError` for any other text."""
    matched = _REFERENCE.fullmatch(reference)
    if matched is None:
        raise ConfigurationError(f"{quoted(reference)} is incomplete, expected 'module:name'")
    return matched[1], matched[2]


def code_at(reference: str, path: str | None) -> OwnCode:
    """Return the present code of this name in a file, or without one in an installed module.

    Raises `ConfigurationError` if the module cannot be imported, or its file cannot be read.
    """
    if path is not None:
        return OwnCode(reference, path, sha256_of(path))
    with refusing(reference):
        origin = _origin(import_module(reference.partition(":")[0]))
    return OwnCode(reference, None, sha256_of(origin))


@contextmanager
def refusing(reference: str, doing: str = "cannot be imported") -> Iterator[None]:
    """Turn an exception of a user's code into an error that names its file and line."""
    try:
        yield
    except ConfigurationError:
        raise
    except Exception as error:
        reason = shown(f"{type(error).__name__}: {error}", LONGEST_REASON)
        raise ConfigurationError(f"{reference} {doing}: {reason}{_place(error)}") from error


@lru_cache(maxsize=32)
def _imported(place: str, path: str, sha256: str) -> ModuleType:
    spec = spec_from_file_location(f"{place}_{sha256[:12]}", path)
    assert spec is not None, "its name ends in .py"
    assert spec.loader is not None, "its name ends in .py"
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and the like look for it there
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
        new = set(sys.modules) - loaded
        # Only those directly in it: a virtual environment may be further below.
        beside = {name for name in new if "." not in name and _is_in(folder, name)}
        for name in new:
            if name.partition(".")[0] in beside:
                sys.modules.pop(name, None)  # another thread imports as well


def _is_in(folder: Path, name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    places = (spec.submodule_search_locations or [spec.origin or ""]) if spec else []
    return any(Path(place).parent == folder for place in places)


def _origin(module: ModuleType) -> str:
    if module.__file__ is None:
        raise ConfigurationError(f"{module.__name__} is not a file, expected a Python module")
    return module.__file__


def _place(error: BaseException) -> str:
    """Return where an error was raised in the user's own code, for a message."""
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    top = Path(__file__).parents[2]
    others = (str(top / "flows"), str(top / "dps"), sys.prefix, sys.base_prefix)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(others) and Path(frame.filename).is_file():
            return f" ({frame.filename}, line {frame.lineno})"
    return ""
