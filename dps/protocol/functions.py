"""The rules of calling functions on shards: who calls, what is refused, what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dps.core.arguments import check_function, nearest
from dps.core.functions import AVERAGE, Function, pack
from dps.core.ranges import listed, shown
from dps.core.updates import Call
from dps.errors import ConfigurationError, FunctionFailed

DRIVER = "driver"  # who calls that is no worker
CALLS = "/calls"  # a worker's calls are not told from its updates by their numbers


def names_of(worker: str) -> tuple[str, str]:
    """Under which names a worker's updates are counted: those that it pushed, and its calls'."""
    return worker, f"{worker}{CALLS}"


def known_call(functions: Mapping[str, Function], name: str, arguments: Sequence[object]) -> Call:
    """Return a call of a function, to be sent.

    Raises
    ------
    ConfigurationError
        There is none of that name, or it does not take these arguments, or they cannot be sent.
    """
    if isinstance(name, str) and name in functions:
        given = ["arrays", *(f"args[{number}]" for number in range(len(arguments)))]
        check_function(f"function {name!r}", functions[name], given)
        try:
            return Call(name, pack(arguments))
        except ConfigurationError as error:
            raise ConfigurationError(f"an argument of function {name!r}: {error}") from None
    if isinstance(name, str) and name == AVERAGE:
        raise ConfigurationError(
            f"there is no function {name!r}, which averaged buffers need; give "
            "ParameterServer(functions=dps.torch.FUNCTIONS), or with others of your own, "
            "functions={**dps.torch.FUNCTIONS, name: function}"
        )
    near = nearest(str(name), list(functions))
    hint = f"did you mean {near!r}? " if near else ""
    known = listed(functions) or "none; give ParameterServer(functions={name: function})"
    raise ConfigurationError(f"there is no function {shown(name)}; {hint}registered are: {known}")


def all_succeeded(came: Sequence[np.ndarray | BaseException]) -> list[np.ndarray]:
    """Return what every shard replied.

    Raises
    ------
    FunctionFailed
        It failed on some shards; the message says on which, and on which it was carried out.
    BaseException
        What else came of it on a shard.
    """
    failed = {shard: e for shard, e in enumerate(came) if isinstance(e, BaseException)}
    for error in failed.values():
        if not isinstance(error, FunctionFailed):
            raise error
    if failed:
        done = [str(shard) for shard in range(len(came)) if shard not in failed]
        where = f"carried out on shard {', '.join(done)}" if done else "carried out on no shard"
        told = "\n".join(str(error) for error in failed.values())
        raise FunctionFailed(f"{told}\nNothing of it was applied there; it was {where}.")
    return [reply for reply in came if isinstance(reply, np.ndarray)]
