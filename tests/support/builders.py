"""The small models, gradients and operations that tests of the shard and replay share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dps.core.blocks import Layout
from dps.core.rules.rule import UpdateRule
from dps.core.shard import ShardState, StateMachine, Step, initial_state
from dps.core.updates import Operation, UpdateId

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Model:
    """A model that lies on one shard."""

    layout: Layout

    @classmethod
    def of(cls, **params: np.ndarray) -> Model:
        return cls(Layout.of(params, 1))

    @classmethod
    def by_rows(cls, **params: np.ndarray) -> Model:
        """The same for rules that need whole rows."""
        return cls(Layout.of(params, 1, whole_rows=True))

    def state(self, rule: UpdateRule, **params: np.ndarray) -> ShardState:
        """Version 0 with these values; arrays that are not given are zero."""
        zeros = {a.name: np.zeros(a.shape, a.dtype) for a in self.layout.arrays}
        return initial_state(self.layout.gather(0, zeros | params)[0].copy(), rule)

    def gradient(
        self, worker: str, seq: int, incarnation: int = 1, of: Arrays | None = None, **fields: Any
    ) -> Operation:
        """A push of these gradients; of ones for every array if none are given."""
        if of is None:
            of = {a.name: np.ones(a.shape, a.dtype) for a in self.layout.arrays}
        buffer, pieces = self.layout.gather(0, of)
        number = UpdateId(worker, incarnation, seq)
        return Operation("gradient", number, pieces=pieces, gradient=buffer, **fields)

    def apply(self, rule: UpdateRule, state: ShardState, op: Operation) -> Step:
        return StateMachine(self.layout.shards[0], rule).apply(state, op)

    def apply_all(
        self, rule: UpdateRule, state: ShardState, ops: Iterable[Operation]
    ) -> list[Step]:
        """Apply one after the other; return what each came to."""
        steps = []
        for op in ops:
            steps.append(self.apply(rule, state, op))
            state = steps[-1].state
        return steps

    def arrays(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """The named arrays in a shard's buffer."""
        return self.layout.scatter({0: buffer})


def join(worker: str, incarnation: int = 1) -> Operation:
    return Operation("join", UpdateId(worker, incarnation, 0))


def leave(worker: str, incarnation: int = 1) -> Operation:
    return Operation("leave", UpdateId(worker, incarnation, 0))
