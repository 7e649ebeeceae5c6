"""What dps keeps in the process of a Dask worker, for all that runs there."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import distributed

T = TypeVar("T")

_ATTRIBUTE = "dps_state"
_making = Lock()


def state_of(dask_worker: distributed.Worker) -> dict[str, Any]:
    """What is kept, by names. Thread-safe.

    It is not among Dask's `extensions`: Dask goes through those for each heartbeat, and gives a
    worker up whose extensions change meanwhile, as they do when an actor is made in a thread.
    """
    found: dict[str, Any] = vars(dask_worker).setdefault(_ATTRIBUTE, {})
    return found


def made_once(dask_worker: distributed.Worker, name: str, make: Callable[[], T]) -> T:
    """What is kept by this name, made if there is none. Thread-safe."""
    state = state_of(dask_worker)
    with _making:
        if name not in state:
            state[name] = make()
        found: T = state[name]
    return found
