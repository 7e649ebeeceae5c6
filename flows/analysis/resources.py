"""What a trial used, per role of node: processor time, memory, bytes, money; what filters saved."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dps.core.names import ROLES, original
from dps.events import CheckpointWritten, Filtered, LoadMeasured, NodeJoined, ResourceSampled
from dps.protocol.durabilities.checkpoint import Checkpoint
from flows.analysis.faults import training_span
from flows.analysis.prices import Prices
from flows.analysis.processes import Process, deaths, joins, process_of
from flows.metrics.metric import LINKS
from flows.records.record import Record

FloatArray = NDArray[np.float64]

OTHER_PROCESSES = 2  # of a trial, besides its nodes: the scheduler and the driver
SECONDS_PER_HOUR = 3600.0
SECONDS_PER_MONTH = 30 * 24 * SECONDS_PER_HOUR
BYTES_PER_GB = 1e9
# Kinds of links with two ends, and the roles at one of them. What goes one way is sent by those at
# one end and received by those at the other.
ENDS = {"train": ("worker", "evaluator"), "store": ("store",)}


@dataclass(frozen=True, slots=True)
class Usage:
    """What the processes of one role used, from their start on.

    Attributes
    ----------
    cpu_seconds
        User and system time of all processes of the role.
    peak_bytes
        Sum over nodes of the largest resident set; a node that took the place of a lost one
        counts as the same node.
    sent_bytes, received_bytes
        Bytes of dps messages.
    sent_by_link
        Those sent, for each kind of link.
    node_seconds
        Time for which nodes of the role were up during the training.
    """

    cpu_seconds: float
    peak_bytes: int
    sent_bytes: int
    received_bytes: int
    sent_by_link: dict[str, int]
    node_seconds: float


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes stored outside of the server processes.

    Attributes
    ----------
    checkpoint_written_bytes
        All checkpoints that were published during the trial.
    checkpoint_kept_bytes
        The checkpoints kept at the end: the last `keep` of each shard.
    store_bytes
        The most that the state store and the mailboxes held.
    """

    checkpoint_written_bytes: int
    checkpoint_kept_bytes: int
    store_bytes: int

    @property
    def stored_bytes(self) -> int:
        """What has to be paid for: checkpoints kept, and the store at its fullest."""
        return self.checkpoint_kept_bytes + self.store_bytes


@dataclass(frozen=True, slots=True)
class Cost:
    """Money in USD by the price table, for the time of the training only.

    Attributes
    ----------
    nodes, spot, fixed
        Nodes on demand and as spot instances, for the time that each was up; and as instances
        rented for a fixed term, which are paid for whether they are up or not.
    moved, stored
        Bytes between nodes (`moved_by_link`), and bytes kept.
    """

    nodes: float
    spot: float
    fixed: float
    moved: float
    stored: float

    @property
    def total(self) -> float:
        """Nodes on demand, bytes moved and bytes stored together."""
        return self.nodes + self.moved + self.stored

    @property
    def total_spot(self) -> float:
        """The same with spot instances."""
        return self.spot + self.moved + self.stored

    @property
    def total_fixed(self) -> float:
        """The same with instances rented for a fixed term."""
        return self.fixed + self.moved + self.stored


@dataclass(frozen=True, slots=True)
class Filtering:
    """The filters of all workers together; None: the trial has none.

    Attributes
    ----------
    raw_bytes, sent_bytes
        Of gradients before filters, and of what was sent in their place.
    saved
        Share of the bytes that was saved.
    withheld
        Share of the entries that was not sent with its update.
    lost
        Sum of the norms of what workers still withheld when they were last heard of. Who leaves in
        order sends it before.
    """

    raw_bytes: int | None = None
    sent_bytes: int | None = None
    saved: float | None = None
    withheld: float | None = None
    lost: float | None = None


def usage_by_role(record: Record) -> dict[str, Usage]:
    """Return what each role used; the roles of the table come first and are always there."""
    samples = _last_samples(record)
    seconds = node_seconds(record)
    found = dict.fromkeys([*ROLES, *(s.role for s in samples), *seconds])
    return {
        role: _usage([s for s in samples if s.role == role], seconds.get(role, 0.0))
        for role in found
    }


def total_usage(by_role: dict[str, Usage]) -> Usage:
    """Return the sum over all roles."""
    parts = by_role.values()
    return Usage(
        cpu_seconds=sum(part.cpu_seconds for part in parts),
        peak_bytes=sum(part.peak_bytes for part in parts),
        sent_bytes=sum(part.sent_bytes for part in parts),
        received_bytes=sum(part.received_bytes for part in parts),
        sent_by_link=_by_link(part.sent_by_link for part in parts),
        node_seconds=sum(part.node_seconds for part in parts),
    )


def sent_by_link(record: Record) -> dict[str, int]:
    """Return bytes sent by all processes for each kind of link."""
    return _by_link(sample.sent for sample in _last_samples(record))


def moved_by_link(record: Record) -> dict[str, int]:
    """Return bytes that went over each kind of link, by whoever tells more: senders or receivers.

    What a process that was killed sent after its last sample is told by those who received it.
    """
    sent = _by_end(record, lambda sample: sample.sent)
    received = _by_end(record, lambda sample: sample.received)
    return {
        link: sum(
            max(sent[link, end], received[link, not end if link in ENDS else end])
            for end in (False, True)
        )
        for link in dict.fromkeys([*LINKS, *(link for link, _ in (*sent, *received))])
    }


def storage(record: Record) -> Storage:
    """Return the bytes that checkpoints, state store and mailboxes took."""
    checkpoints: defaultdict[int, list[int]] = defaultdict(list)
    for written in record.of(CheckpointWritten):
        checkpoints[written.shard].append(written.nbytes)
    keep = _checkpoints_kept(record)
    held: dict[str, int] = {}
    for sample in record.of(ResourceSampled):
        held[sample.node] = max(held.get(sample.node, 0), sample.stored)
    return Storage(
        checkpoint_written_bytes=sum(map(sum, checkpoints.values())),
        checkpoint_kept_bytes=sum(sum(sizes[-keep:]) for sizes in checkpoints.values()),
        store_bytes=sum(held.values()),
    )


def node_seconds(record: Record) -> dict[str, float]:
    """Return for each role how long its nodes were up between start and end of the training."""
    seconds: Counter[str] = Counter()
    for role, start, end in _node_spans(record):
        seconds[role] += end - start  # type: ignore[assignment]
    return dict(seconds)


def rented_seconds(record: Record) -> dict[str, float]:
    """Return for each role the length of the training times the nodes that it needs at once.

    A node that took the place of a lost one is not rented again, whatever its role is now.
    """
    span = training_span(record)
    if span is None:
        return {}
    roles = {original(node.node): node.role for node in reversed(record.of(NodeJoined))}
    counts = Counter(roles.values())
    return {role: count * (span[1] - span[0]) for role, count in counts.items()}


def cost(record: Record, prices: Prices) -> Cost:
    """Return what the training would have cost by the price table."""
    span = training_span(record)
    months = (span[1] - span[0]) / SECONDS_PER_MONTH if span else 0.0
    up, rented = node_seconds(record), rented_seconds(record)
    moved = sum(moved_by_link(record).values())
    return Cost(
        nodes=_price(up, prices.node_hour),
        spot=_price(up, prices.spot_hour),
        fixed=_price(rented, prices.fixed_hour),
        moved=prices.gb_moved * moved / BYTES_PER_GB,
        stored=prices.gb_month_stored * storage(record).stored_bytes / BYTES_PER_GB * months,
    )


def filtering(record: Record) -> Filtering:
    """Return what filters did, from the last event of each start of a worker."""
    last = {(e.worker, e.incarnation): e for e in record.of(Filtered)}
    raw = sum(event.raw_bytes for event in last.values())
    if not raw:
        return Filtering()
    sent = sum(event.sent_bytes for event in last.values())
    entries = sum(event.entries for event in last.values())
    return Filtering(
        raw_bytes=raw,
        sent_bytes=sent,
        saved=1 - sent / raw,
        withheld=sum(event.withheld for event in last.values()) / entries,
        lost=sum(event.residual_norm for event in last.values()),
    )


class Spending:
    """Tells the money spent up to a moment: on demand, as if the training had ended then.

    A node costs from its start, or that of the training, to its end: to its death, if it was
    killed, so that a lost node costs nothing until another takes its place. Bytes sent cost when
    they are sent, evenly between two samples of a process, and between the last one and its death.
    Bytes stored cost evenly over the training, by what `storage` says of the whole.

    Attributes
    ----------
    total
        All of it: `cost(record, prices).total`.
    """

    def __init__(self, record: Record, prices: Prices) -> None:
        spent = cost(record, prices)
        self.total = spent.total
        self._start, self._end = training_span(record) or (0.0, 0.0)
        self._stored = spent.stored
        self._nodes = [
            (prices.node_hour[role] / SECONDS_PER_HOUR, start, end)
            for role, start, end in _node_spans(record)
        ]
        self._gb_moved = prices.gb_moved
        unseen = sum(moved_by_link(record).values()) - sum(sent_by_link(record).values())
        self._sent = [
            *_sent_over_time(record, self._end),
            *_unseen_over_time(record, (self._start, self._end), unseen),
        ]

    def at(self, t: float) -> float:
        """Return USD spent at `t`, in seconds since the epoch: 0 before the training."""
        if t <= self._start:
            return 0.0
        if t >= self._end:
            return self.total
        nodes = sum(rate * max(0.0, min(t, end) - start) for rate, start, end in self._nodes)
        sent = sum(float(np.interp(t, *samples)) for samples in self._sent)
        stored = self._stored * (t - self._start) / (self._end - self._start)
        return nodes + self._gb_moved * sent / BYTES_PER_GB + stored


def busiest(record: Record) -> float | None:
    """Return what the busiest server used of a core during the training, as a share."""
    return max((used for role, used in _cores(record) if role == "server"), default=None)


def cores_used(record: Record) -> float | None:
    """Return how many cores all nodes together used on average during the training."""
    return sum(used for _, used in _cores(record)) or None


def load_average(record: Record) -> float | None:
    """Return the load average of the driver's machine, the larger of start and end of a trial."""
    return max((event.load for event in record.of(LoadMeasured)), default=None)


def is_overloaded(record: Record) -> bool:
    """Whether more processes wanted a core than there are cores, and than the trial has."""
    own = len({event.node for event in record.of(NodeJoined)}) + OTHER_PROCESSES
    return any(event.load > max(own, event.cores) for event in record.of(LoadMeasured))


# -- parts -------------------------------------------------------------------------------------


def _node_spans(record: Record) -> list[tuple[str, float, float]]:
    """The role of each node, and from when to when it was up during the training."""
    span = training_span(record)
    if span is None:
        return []
    start, end = span
    died = deaths(record)
    spans = (
        (event.role, max(start, event.t), min(end, died.get(process, end)))
        for process, event in joins(record).items()
    )
    return [(role, came, max(came, went)) for role, came, went in spans]


def _sent_over_time(record: Record, end: float) -> list[tuple[FloatArray, FloatArray]]:
    """Moments and bytes sent by then of each process; all that it sends is sent by the `end`."""
    joined = {process: event.t for process, event in joins(record).items()}
    sent: defaultdict[Process, dict[float, float]] = defaultdict(dict)
    for sample in record.of(ResourceSampled):
        process = process_of(sample)
        if process not in sent and joined.get(process, sample.t) < sample.t:
            sent[process][joined[process]] = 0.0
        sent[process][min(sample.t, end)] = float(sum(sample.sent.values()))
    in_order = (sorted(samples.items()) for samples in sent.values())
    return [(np.array([t for t, _ in each]), np.array([b for _, b in each])) for each in in_order]


def _unseen_over_time(
    record: Record, span: tuple[float, float], total: float
) -> list[tuple[FloatArray, FloatArray]]:
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
    return [
        (np.array([since, until]), np.array([0.0, share * (until - since)]))
        for since, until in silent
    ]


def _by_end(
    record: Record, counted: Callable[[ResourceSampled], Mapping[str, int]]
) -> Counter[tuple[str, bool]]:
    """Bytes by kind of link, and by the end at which they were counted: whether that of `ENDS`."""
    total: Counter[tuple[str, bool]] = Counter()
    for sample in _last_samples(record):
        for link, count in counted(sample).items():
            total[link, sample.role in ENDS.get(link, ())] += count
    return total


def _price(seconds: Mapping[str, float], hour: Mapping[str, float]) -> float:
    return sum(hour[role] * s / SECONDS_PER_HOUR for role, s in seconds.items())


def _cores(record: Record) -> list[tuple[str, float]]:
    """The role of each process, and the cores that it used on average.

    From the last sample before the training, or its own first, to its last one.
    """
    span = training_span(record)
    samples_of: defaultdict[Process, list[ResourceSampled]] = defaultdict(list)
    for sample in record.of(ResourceSampled):
        samples_of[process_of(sample)].append(sample)
    cores = []
    for samples in samples_of.values():
        samples.sort(key=lambda sample: sample.t)
        before = [sample for sample in samples if span and sample.t <= span[0]]
        first, last = before[-1] if before else samples[0], samples[-1]
        if last.t > first.t:
            used = (last.cpu_seconds - first.cpu_seconds) / (last.t - first.t)
            cores.append((last.role, used))
    return cores


def _last_samples(record: Record) -> list[ResourceSampled]:
    # Samples are cumulative, so the last one of a process holds everything it used.
    last = {process_of(sample): sample for sample in record.of(ResourceSampled)}
    return list(last.values())


def _usage(samples: Iterable[ResourceSampled], seconds: float) -> Usage:
    processes = list(samples)
    return Usage(
        cpu_seconds=sum(s.cpu_seconds for s in processes),
        peak_bytes=sum(_largest(processes, key=lambda s: s.peak_bytes).values()),
        sent_bytes=sum(sum(s.sent.values()) for s in processes),
        received_bytes=sum(sum(s.received.values()) for s in processes),
        sent_by_link=_by_link(s.sent for s in processes),
        node_seconds=seconds,
    )


def _by_link(sent: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter(dict.fromkeys(LINKS, 0))
    for each in sent:
        total.update(each)
    return dict(total)


def _largest(
    samples: Iterable[ResourceSampled], key: Callable[[ResourceSampled], int]
) -> dict[str, int]:
    largest: dict[str, int] = {}
    for sample in samples:
        place = original(sample.node)
        largest[place] = max(largest.get(place, 0), key(sample))
    return largest


def _checkpoints_kept(record: Record) -> int:
    recovery = record.config.get("recovery", {})
    durability = recovery.get("durability", {}) if isinstance(recovery, dict) else {}
    files = durability.get("below") or durability
    return int(files.get("keep", Checkpoint().keep))
