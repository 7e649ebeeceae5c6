"""The recovery strategies that random schedules are run with: the presets, and hybrids of them."""

from __future__ import annotations

from dps.core.consistency import BSP, SSP
from dps.core.recovery import (
    Chain,
    Checkpoint,
    Continue,
    NoDurability,
    Recovery,
    Replay,
    SharedStore,
    WorkerCache,
)
from tests.protocol.schedules import Case

CASES = {
    "none": Case(Recovery(NoDurability())),
    "checkpoint": Case(Recovery(Checkpoint(every=4))),
    "checkpoint, sync": Case(Recovery(Checkpoint(every=4, mode="sync"))),
    "chain(2)": Case(Recovery(Chain(2))),
    "chain(2), busy": Case(Recovery(Chain(2)), workers=5, think=0.01),
    "chain(3)": Case(Recovery(Chain(3))),
    "stateless": Case(Recovery(SharedStore(every=4), Continue())),
    "chain(2) + continue": Case(Recovery(Chain(2), Continue(limit=3, buffer="worker"))),
    "chain(3) + mailbox": Case(Recovery(Chain(3), Continue(limit=3), Replay("each"))),
    "checkpoint + continue": Case(
        Recovery(Checkpoint(every=4), Continue(limit=3, buffer="worker"))
    ),
    "checkpoint + mailbox": Case(Recovery(Checkpoint(every=4), Continue(limit=3), Replay("each"))),
    "shared store + wait": Case(Recovery(SharedStore(every=4))),
    "worker cache": Case(Recovery(WorkerCache())),
    "worker cache + continue": Case(Recovery(WorkerCache(), Continue(limit=3, buffer="worker"))),
    "none, BSP": Case(Recovery(NoDurability()), BSP()),
    "checkpoint, BSP": Case(Recovery(Checkpoint(every=4)), BSP()),
    "stateless, BSP": Case(Recovery(SharedStore(every=4), Continue()), BSP()),
    "chain(2) + continue, SSP(1)": Case(
        Recovery(Chain(2), Continue(limit=3, buffer="worker")), SSP(1)
    ),
}
