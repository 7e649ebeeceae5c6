"""Money: the price table, with sources, and what a training would have cost by it."""

from __future__ import annotations

import datetime as dt
from collections import Counter, defaultdict
from collections.abc import Mapping
from importlib.resources import files

import numpy as np
import yaml
from pydantic import BaseModel, NonNegativeFloat

from dps.core.names import original
from dps.events import CheckpointWritten, NodeJoined, ResourceSampled
from dps.recovery.checkpoint import Checkpoint
from flows.metrics.faults import Span, training_span
from flows.metrics.metric import LINKS
from flows.metrics.processes import Process, deaths, joins, last_samples, node_spans, process_of
from flows.records.record import Record

SECONDS_PER_HOUR = 3600.0
SECONDS_PER_MONTH = 30 * 24 * SECONDS_PER_HOUR
BYTES_PER_GB = 1e9
# Kinds of links with two ends, and the roles at one of them. These send the bytes of one direction
# and receive those of the other.
ENDS = {"train": ("worker", "evaluator"), "store": ("store",)}

Samples = list[tuple[float, float]]  # moments, and bytes sent by then


class Price(BaseModel):
    """A price in USD with its source and the date of the source."""

    usd: NonNegativeFloat
    source: str
    date: dt.date

    def __str__(self) -> str:
        return f"{self.source} ({self.date})"


class Prices(BaseModel):
    """List prices; a GB is 10^9 bytes, a month 30 days.

    Scheduler and driver cost the same under every strategy, and are left out.

    Attributes
    ----------
    node_hour, fixed_hour
        Price of one node for one hour, by role: on demand, and rented for a fixed term.
    gb_moved
        One GB of messages from node to node.
    gb_month_stored
        One GB kept for a month.
    """

    node_hour: Mapping[str, Price]
    fixed_hour: Mapping[str, Price]
    gb_moved: Price
    gb_month_stored: Price


def load_prices() -> Prices:
    """Return the price table of the package."""
    table = (files("flows.metrics") / "prices.yaml").read_text("utf-8")
    return Prices.model_validate(yaml.safe_load(table))


# -- what is paid for ------------------------------------------------------------------------


class Spending:
    """Money in USD by the price table, for the time of the training only.

    A node costs from its start, or that of the training, to its end: to its death, if it was
    killed, so that a lost node costs nothing until it is replaced. Bytes sent cost when they are
    sent, evenly between two samples of a process, and between the last one and its death. Bytes
    stored cost evenly over the training; `stored_bytes` computes their total.

    Attributes
    ----------
    nodes, moved, stored
        Nodes on demand for the time that each was up, bytes between nodes (`moved_by_link`), and
        bytes kept.
    total
        These together.
    fixed
        Total with nodes rented for a fixed term, which cost the same whether they are up or down.
    """

    def __init__(self, record: Record, prices: Prices) -> None:
        self._start, self._end = training_span(record) or (0.0, 0.0)
        length, up = self._end - self._start, node_seconds(record)
        moved, self._gb_moved = sum(moved_by_link(record).values()), prices.gb_moved.usd
        self.nodes = _price(up, prices.node_hour)
        self.moved = self._gb_moved * moved / BYTES_PER_GB
        stored = prices.gb_month_stored.usd * stored_bytes(record) / BYTES_PER_GB
        self.stored = stored * (length / SECONDS_PER_MONTH)
        self.total = self.nodes + self.moved + self.stored
        rented = _rented_seconds(record, length)
        self.fixed = _price(rented, prices.fixed_hour) + self.moved + self.stored
        self._up = [
            (prices.node_hour[role].usd / SECONDS_PER_HOUR, start, end)
            for role, start, end in node_spans(record)
        ]
        unseen = moved - sum(sum(sample.sent.values()) for sample in last_samples(record))
        self._sent = [
            *_sent_over_time(record, self._end),
            *_unseen_over_time(record, (self._start, self._end), unseen),
        ]

    def at(self, t: float) -> float:
        """Return USD spent at `t`, in seconds since the epoch, as if the training had ended then.

        It is 0 before the training.
        """
        if t <= self._start:
            return 0.0
        if t >= self._end:
            return self.total
        nodes = sum(rate * max(0.0, min(t, end) - start) for rate, start, end in self._up)
        points = (np.array(each) for each in self._sent)
        sent = sum(float(np.interp(t, each[:, 0], each[:, 1])) for each in points)
        stored = self.stored * (t - self._start) / (self._end - self._start)
        return nodes + self._gb_moved * sent / BYTES_PER_GB + stored


def stored_bytes(record: Record) -> int:
    """Return bytes stored outside of the server processes.

    They are the checkpoints kept at the end, the last `keep` of each shard, and the most that the
    state store and the mailboxes held.
    """
    recovery = record.config.get("recovery", {})
    durability = recovery.get("durability", {}) if isinstance(recovery, dict) else {}
    keep = int((durability.get("below") or durability).get("keep", Checkpoint().keep))
    checkpoints: defaultdict[int, list[int]] = defaultdict(list)
    for written in record.of(CheckpointWritten):
        checkpoints[written.shard].append(written.nbytes)
    held = Counter[str]()
    for sample in record.of(ResourceSampled):
        held[sample.node] = max(held[sample.node], sample.stored)
    return sum(sum(sizes[-keep:]) for sizes in checkpoints.values()) + held.total()


def moved_by_link(record: Record) -> dict[str, int]:
    """Return bytes sent over each kind of link: the larger count of both ends.

    Receivers count what a killed process sent after its last sample.
    """
    sent, received = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()
    for sample in last_samples(record):
        for total, counts in ((sent, sample.sent), (received, sample.received)):
            for link, count in counts.items():
                total[link, sample.role in ENDS.get(link, ())] += count
    return {
        link: sum(
            max(sent[link, end], received[link, not end if link in ENDS else end])
            for end in (False, True)
        )
        for link in dict.fromkeys([*LINKS, *(link for link, _ in (*sent, *received))])
    }


def node_seconds(record: Record) -> dict[str, float]:
    """Return, by role, the time that nodes were up between start and end of the training."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for role, start, end in node_spans(record):
        seconds[role] += end - start
    return seconds


def _rented_seconds(record: Record, length: float) -> dict[str, float]:
    """Return, by role, the length of the training times the number of nodes needed at once.

    A replacement of a lost node is not rented in addition, even if its role differs.
    """
    roles = {original(node.node): node.role for node in reversed(record.of(NodeJoined))}
    return {role: count * length for role, count in Counter(roles.values()).items() if length}


def _sent_over_time(record: Record, end: float) -> list[Samples]:
    """Moments and bytes sent by then of each process; all that it sends is sent by the `end`."""
    joined = {process: event.t for process, event in joins(record).items()}
    sent: defaultdict[Process, dict[float, float]] = defaultdict(dict)
    for sample in record.of(ResourceSampled):
        process = process_of(sample)
        if process not in sent and joined.get(process, sample.t) < sample.t:
            sent[process][joined[process]] = 0.0
        sent[process][min(sample.t, end)] = float(sum(sample.sent.values()))
    return [sorted(samples.items()) for samples in sent.values()]


def _unseen_over_time(record: Record, span: Span, total: float) -> list[Samples]:
    """Moments and bytes sent by then, of bytes in no sample: sent by processes that ended early.

    Evenly between the last sample of each and its death, or if all lived, over the training.
    """
    start, end = span
    last = {process: event.t for process, event in joins(record).items()}
    last |= {process_of(sample): sample.t for sample in record.of(ResourceSampled)}
    silent = [
        (max(start, last[process]), min(end, died)) for process, died in deaths(record).items()
    ]
    silent = [(since, until) for since, until in silent if until > since] or [span]
    share = total / max(sum(until - since for since, until in silent), 1e-9)
    return [[(since, 0.0), (until, share * (until - since))] for since, until in silent]


def _price(seconds: Mapping[str, float], hour: Mapping[str, Price]) -> float:
    return sum(hour[role].usd * s / SECONDS_PER_HOUR for role, s in seconds.items())
