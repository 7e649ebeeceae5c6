"""Checks of arrays, functions, paths and argument names that users pass, where they enter.

Numbers and choices are checked in `dps.core.ranges`.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np

from dps.core.ranges import refused, shown
from dps.errors import ConfigurationError, DpsError

C = TypeVar("C", bound=type)


def plain(what: str, array: np.ndarray, refusal: type[DpsError] = ConfigurationError) -> np.ndarray:
    """Return an array as numpy's own class in native byte order; refuse a masked one."""
    if type(array) is np.ndarray and array.dtype.isnative:
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise refusal(f"{what} is a masked array; fill it first, such as with array.filled(0)")
    return np.asarray(array, array.dtype.newbyteorder("="))


def is_floating(dtype: np.dtype[Any]) -> bool:
    """Whether numbers of a dtype can be cast to float32 or float64, unlike complex numbers."""
    # numpy has no kind for bfloat16 and similar types.
    return "float" in dtype.name


def as_gradient(what: str, value: Any, dtype: str, refusal: type[DpsError]) -> Any:
    """Return a gradient as a plain array of a dtype if it holds floats; otherwise unchanged."""
    if not isinstance(value, np.ndarray):
        if not hasattr(value, "__array__"):
            return value
        try:
            value = np.asarray(value)
        except (TypeError, RuntimeError, ValueError) as error:
            raise refusal(
                f"{what} is {type(value).__name__}, which numpy cannot read as an array ({error}); "
                "for tensors on a device, or of types that numpy does not have, see "
                "dps.torch.attach, and for other arrays dps.tree.attach"
            ) from error
    array = plain(what, value, refusal)
    if array.dtype == dtype or not is_floating(array.dtype):
        return array
    with np.errstate(over="ignore"):  # infinity is refused later
        return array.astype(dtype)


def as_number(what: str, value: Any) -> float:
    """Return a number, or an array or tensor with one element, as a float; refuse others."""
    error: Exception | None = None
    try:
        scalar = value.item() if hasattr(value, "item") else value
        if hasattr(scalar, "__float__") and not isinstance(value, np.ma.MaskedArray):
            return float(scalar)
    except (TypeError, ValueError, RuntimeError, OverflowError) as found:
        error = found
    raise refused(what, value, "a number") from error


def is_name(value: object) -> bool:
    """Whether a value is a text that is not empty and can be encoded in UTF-8."""
    # Python decodes file names of other encodings to lone surrogates, which cannot.
    return isinstance(value, str) and bool(value) and not re.search("[\ud800-\udfff]", value)


def check_function(name: str, function: Any, given: Sequence[str], more: bool = False) -> None:
    """Refuse an object that is no plain function of the arguments `given`, and perhaps more."""
    call = f"function({', '.join(given)}{', …' if more else ''})"
    if not callable(function):
        raise refused(name, function, f"a function: {call}")
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    own = inner, getattr(inner, "__call__", None)  # noqa: B004 - of an object, what runs is that
    generator, asynchronous = inspect.isgeneratorfunction, inspect.iscoroutinefunction
    kinds = (generator, asynchronous, inspect.isasyncgenfunction)
    if any(is_kind(each) for each in own for is_kind in kinds):
        raise ConfigurationError(
            f"{name}={shown(function)} is async or a generator, expected a plain function that "
            "returns its result"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions in C have none
        return
    try:
        (signature.bind_partial if more else signature.bind)(*given)
    except TypeError as error:
        raise ConfigurationError(
            f"{name}={shown(function)} does not accept the call {call}: {error}"
        ) from None


def check_returned(name: str, returned: object) -> None:
    """Refuse a coroutine or generator, of a function that `check_function` could not recognise."""
    kinds = (inspect.iscoroutine, inspect.isasyncgen, inspect.isgenerator)
    if any(is_kind(returned) for is_kind in kinds):  # the body of the function has not run
        raise refused(f"what {name} returned", returned, "the result of a plain function")


def as_path(name: str, path: Any) -> str:
    """Return a path, or an address of fsspec, as text with "~" expanded; refuse other values."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise refused(name, path, "a path, as text or pathlib.Path")
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise ConfigurationError(f"{name}={shown(text)}: no such home folder; set HOME")
    return expanded


Path = Annotated[str, as_path]


def explained(cls: C) -> C:
    """Make a class raise `ConfigurationError` with its valid arguments when it is given others."""
    init: Callable[..., None] = cls.__init__  # type: ignore[misc]
    signature = inspect.signature(init)
    names = list(signature.parameters)[1:]

    @functools.wraps(init)
    def checked(*args: Any, **kwargs: Any) -> None:
        try:
            init(*args, **kwargs)
        except TypeError:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                near = [nearest(name, names) for name in kwargs if name not in names]
                hint = f"did you mean {near[0]!r}? " if near and near[0] else ""
                takes = f"{hint}it takes: {', '.join(names) or 'nothing'}"
                raise ConfigurationError(f"{cls.__name__}: {error}; {takes}") from None
            raise

    cls.__init__ = checked  # type: ignore[misc]
    return cls


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the known name that is closest to `name`, or ""."""
    initials = [each for each in known if "".join(word[:1] for word in each.split("_")) == name]
    return next(iter([*initials, *difflib.get_close_matches(name, known, n=1)]), "")
