"""Builds events and records by hand, for tests of what is computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import count

from dps.core.names import ROLES
from dps.events import (
    Acked,
    Applied,
    Evaluated,
    Event,
    Killed,
    Restored,
)
from flows.metrics.metric import Value
from flows.metrics.outcome import Outcome
from flows.metrics.prices import Price, Prices
from flows.records.events import Audited
from flows.records.record import Record


def price(usd: float) -> Price:
    """Return a price in USD."""
    return Price(usd=usd, source="a test", date=date(2026, 1, 1))


PRICES = Prices(
    node_hour=dict.fromkeys(ROLES, price(3600.0)),
    fixed_hour=dict.fromkeys(ROLES, price(2700.0)),
    gb_moved=price(1.0),
    gb_month_stored=price(0.0),
)


def applied(
    ids: Sequence[int],
    versions: Sequence[int] | None = None,
    *,
    epoch: int = 1,
    node: str = "server-0",
    head: bool = True,
    t: float = 10.0,
    worker: str = "w",
    shard: int = 0,
    replayed: bool = False,
) -> Applied:
    """Return a batch of applications of the updates w/1/<id>, at versions equal to the ids."""
    n = len(ids)
    return Applied(
        t=t,
        node=node,
        shard=shard,
        epoch=epoch,
        head=head,
        times=tuple(t + i / 1000 for i in range(n)),
        workers=(worker,) * n,
        incarnations=(1,) * n,
        seqs=tuple(ids),
        versions=tuple(versions or ids),
        staleness=(1,) * n,
        staleness_seconds=(0.1,) * n,
        replayed=(replayed,) * n,
    )


def acked(
    ids: Sequence[int],
    versions: Sequence[int] | None = None,
    *,
    t: float = 10.0,
    outcome: str = "applied",
    worker: str = "w",
    shard: int = 0,
) -> Acked:
    n = len(ids)
    return Acked(
        t, worker, 1, (t,) * n, (shard,) * n, tuple(ids), tuple(versions or ids), (outcome,) * n
    )


def start(shard: int = 0) -> Restored:
    return Restored(1.0, shard, 1, f"server-{shard}", 0, "initial")


def restored(version: int, *, epoch: int = 2, t: float = 20.0) -> Restored:
    return Restored(t, 0, epoch, "server-0-b", version, "checkpoint")


def audited(version: int, counts: dict[str, int] | None = None) -> Audited:
    return Audited(99.0, 0, 9, "server-0", version, counts or {"w": version}, 0)


def fault(*events: Event) -> Record:
    """A record of a kill at 100.0, and what came of it."""
    return Record((Killed(100.0, 0, "server-0", 7, 50, True), *events))


def scores(*values: float, step: float = 1.0) -> list[Evaluated]:
    clock = count()
    return [Evaluated(98.0 + step * next(clock), 0, 1.0, value) for value in values]


def with_values(outcome: Outcome, **values: Value) -> Outcome:
    """Return an outcome with other values of some metrics."""
    return replace(outcome, values={**outcome.values, **values})
