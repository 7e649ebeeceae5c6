"""User functions on shards: their arguments, results, and encoding.

Only the head runs a function. Its result is in the shard's state, also for repeated requests.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dps.core.arguments import check_function, nearest, plain
from dps.core.blocks import ShardLayout, all_finite
from dps.core.ranges import described, listed, refused, shown
from dps.core.updates import Call
from dps.errors import ConfigurationError, FunctionFailed

Function = Callable[..., Any]

RESULT_BYTES = 1 << 20
_HEAD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Part:
    """The elements of one parameter array that a shard holds.

    Attributes
    ----------
    values
        1-D, of the array's dtype, read-only.
    spans
        Their places in the flattened array, as (start, stop), in order.

    Examples
    --------
    >>> Part(np.array([0.5, 0.25, 0.125]), spans=((0, 1), (6, 8))).positions
    array([0, 6, 7])
    """

    values: np.ndarray
    spans: tuple[tuple[int, int], ...]

    @property
    def positions(self) -> np.ndarray:
        """The index of each of the `values` in the flattened array, int64."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.spans])


@dataclass(frozen=True, slots=True)
class Changed:
    """The return value of a function that changes parameters.

    Parameters
    ----------
    arrays
        Name of an array → its new values on this shard: finite, of the dtype and size of its
        `Part.values`.
    result
        The result for the caller.

    Examples
    --------
    >>> def halve(parts):
    ...     return Changed({"w": parts["w"].values / 2}, result="halved")
    >>> halve({"w": Part(np.array([1.0, 2.0]), spans=((0, 2),))}).arrays
    {'w': array([0.5, 1. ])}
    """

    arrays: Mapping[str, np.ndarray]
    result: Any = None


def parts(layout: ShardLayout, buffer: np.ndarray) -> dict[str, Part]:
    """Return the part of each array in a shard's buffer, without a copy."""
    # The blocks of an array lie side by side in the buffer.
    by_name: dict[str, Part] = {}
    for name in dict.fromkeys(piece.block.name for piece in layout.pieces):
        pieces = [piece for piece in layout.pieces if piece.block.name == name]
        values = buffer[pieces[0].offset : pieces[-1].end].view(pieces[0].block.dtype)
        values.flags.writeable = False
        by_name[name] = Part(values, tuple((p.block.start, p.block.stop) for p in pieces))
    return by_name


def carried_out(
    functions: Mapping[str, Function], layout: ShardLayout, buffer: np.ndarray, call: Call
) -> Call:
    """Run a function on a shard's buffer; return the call with its result and changes."""
    here = parts(layout, buffer)
    try:
        returned = functions[call.function](here, *unpack(call.arguments))
        changed = returned if isinstance(returned, Changed) else Changed({}, returned)
        pieces, values = _gathered(layout, here, changed.arrays)
        result = pack(changed.result)
        if result.nbytes > RESULT_BYTES:
            limit = f"expected at most {RESULT_BYTES}"
            raise ValueError(f"the result has {result.nbytes} bytes, {limit}; return less")
    except BaseException as error:
        # The traceback begins at the user's function.
        inner = error.__traceback__ and error.__traceback__.tb_next
        text = "".join(traceback.format_exception(type(error), error, inner)).rstrip()
        raise FunctionFailed(f"function {call.function!r} failed:\n{text}") from error
    return replace(call, pieces=pieces, values=values, result=result)


def changed_buffer(layout: ShardLayout, buffer: np.ndarray, call: Call) -> np.ndarray:
    """Return a shard's buffer with the changes of a call."""
    if call.values is None:
        return buffer
    after = buffer.copy()
    for piece, part in layout.packed(call.pieces):
        after[piece.offset : piece.end] = call.values[part]
    return after


def _gathered(
    layout: ShardLayout, here: Mapping[str, Part], arrays: Mapping[str, np.ndarray]
) -> tuple[tuple[int, ...], np.ndarray | None]:
    """Return the pieces that change, and their new values as one byte buffer, if any."""
    if not isinstance(arrays, Mapping):
        raise refused("Changed: arrays", arrays, "a mapping of names to new values")
    for name, array in arrays.items():
        if name not in here:
            raise ValueError(f"no array {name!r} is on this shard; expected one of {listed(here)}")
        if isinstance(array, np.ndarray):
            plain(f"new values of {name!r}", array)  # refuses masked ones
        given, wanted = described(array), described(here[name].values)
        if given != wanted:
            raise ValueError(f"new values of {name!r} are {given}, expected {wanted}")
        if not all_finite(array):
            raise ValueError(f"new values of {name!r} hold NaN or infinity")
    pieces = tuple(i for i, piece in enumerate(layout.pieces) if piece.block.name in arrays)
    if not pieces:
        return (), None
    # Pieces of one array follow one another, so the order of arrays is that of pieces.
    names = dict.fromkeys(layout.pieces[i].block.name for i in pieces)
    return pieces, np.concatenate([_bytes(arrays[name]) for name in names])


def pack(value: Any) -> np.ndarray:
    """Return a value as one uint8 buffer; refuse types other than those of `_plain`."""
    arrays: list[np.ndarray] = []
    head = json.dumps(_plain(value, arrays), separators=(",", ":")).encode()
    size = np.array([len(head)], "<u8")
    return np.concatenate([_bytes(size), np.frombuffer(head, np.uint8), *map(_bytes, arrays)])


def unpack(buffer: np.ndarray) -> Any:
    """Return the value in a buffer of `pack`; its arrays are copies."""
    at = _HEAD_BYTES + int(buffer[:_HEAD_BYTES].view("<u8")[0])

    def rebuilt(value: Any) -> Any:
        nonlocal at
        if isinstance(value, list):
            return [rebuilt(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "%" in value:
            return {key: rebuilt(item) for key, item in value["%"].items()}
        if "()" in value:
            return tuple(map(rebuilt, value["()"]))
        dtype, shape, size = value["$"]
        flat = buffer[at : at + size].copy().view(dtype)
        at += size
        return flat.reshape(shape)

    return rebuilt(json.loads(buffer[_HEAD_BYTES:at].tobytes()))


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [_plain(item, arrays) for item in value]
    if isinstance(value, tuple):
        return {"()": [_plain(item, arrays) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"%": {key: _plain(item, arrays) for key, item in value.items()}}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        plain("an array", value)  # refuses masked ones
        arrays.append(value)
        return {"$": [value.dtype.str, value.shape, value.nbytes]}
    raise ConfigurationError(
        f"{type(value).__name__} cannot be sent, expected None, a number, a string, an array of "
        "numbers, or a list or string-keyed dict of these"
    )


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


AVERAGE = "dps.average"


def average(arrays: Mapping[str, Part], mine: Mapping[str, np.ndarray], share: float) -> Changed:
    """Move arrays towards a caller's values; the result has the spans and new values of each."""
    new: dict[str, np.ndarray] = {}
    result: dict[str, Any] = {}
    for name in sorted(mine.keys() & arrays.keys()):
        part, flat = arrays[name], mine[name].reshape(-1)
        pushed = np.concatenate([flat[start:stop] for start, stop in part.spans])
        weight = part.values.dtype.type(share)
        # A share of 1 replaces the old values, including NaN.
        new[name] = pushed if share == 1 else (1 - weight) * part.values + weight * pushed
        result[name] = [[list(span) for span in part.spans], new[name]]
    return Changed(new, result)


DRIVER = "driver"  # the caller that is no worker
CALLS = "/calls"  # a worker's calls are numbered separately, under this suffix of its name


def names_of(worker: str) -> tuple[str, str]:
    """Return the names under which a worker's updates are counted: its pushes, and its calls."""
    return worker, f"{worker}{CALLS}"


def known_call(functions: Mapping[str, Function], name: str, arguments: Sequence[object]) -> Call:
    """Return a call of a function; refuse an unknown one, and arguments that it cannot take."""
    if isinstance(name, str) and name in functions:
        given = ["arrays", *(f"args[{number}]" for number in range(len(arguments)))]
        check_function(f"function {name!r}", functions[name], given)
        try:
            return Call(name, pack(arguments))
        except ConfigurationError as error:
            raise ConfigurationError(f"an argument of function {name!r}: {error}") from None
    if isinstance(name, str) and name == AVERAGE:
        raise ConfigurationError(
            f"averaged buffers need the function {name!r}; give "
            "ParameterServer(functions=dps.torch.FUNCTIONS), or with your own functions, "
            "functions={**dps.torch.FUNCTIONS, name: function}"
        )
    near = nearest(str(name), list(functions))
    hint = f"did you mean {near!r}? " if near else ""
    known = listed(functions) or "none; give ParameterServer(functions={name: function})"
    raise ConfigurationError(f"no function is named {shown(name)}; {hint}registered: {known}")


def all_succeeded(replies: Sequence[np.ndarray | BaseException]) -> list[np.ndarray]:
    """Return the replies of all shards; raise `FunctionFailed` for some, or another error."""
    failed = {shard: e for shard, e in enumerate(replies) if isinstance(e, BaseException)}
    for error in failed.values():
        if not isinstance(error, FunctionFailed):
            raise error
    if failed:
        done = [str(shard) for shard in range(len(replies)) if shard not in failed]
        where = f"shard {', '.join(done)}" if done else "no shard"
        errors = "\n".join(str(error) for error in failed.values())
        raise FunctionFailed(
            f"{errors}\nNothing of it was applied there. It was applied on {where}."
        )
    return [reply for reply in replies if isinstance(reply, np.ndarray)]


def most(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the largest count of each worker over the shards, without those of calls."""
    largest: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            if not name.endswith(CALLS):
                largest[name] = max(count, largest.get(name, 0))
    return largest
