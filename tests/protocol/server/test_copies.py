"""Filtered pulls: what a worker has is what its server thinks, and no further off than promised."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dps
from dps.core.blocks import Layout
from dps.core.filters.chain import checked_of_pulls
from dps.core.filters.filter import Filter
from dps.core.updates import UpdateId
from dps.errors import ConfigurationError, ShapeMismatch
from dps.protocol import wire
from dps.protocol.client.read_point import Copy
from dps.protocol.messages import Weights
from dps.protocol.server import copies
from dps.protocol.server.copies import SentCopies
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.durability import Durability
from dps.recovery.strategy import Recovery
from tests.support.worlds import Setting, in_world

Array = np.ndarray

SIZES = {"w": (3000, "float32"), "v": (2041, "float64")}
LAYOUT = Layout.of({name: np.zeros(n, dtype) for name, (n, dtype) in SIZES.items()}, 1)
SHARD = LAYOUT.shards[0]
READER = UpdateId("worker-0", 1, 0)
THRESHOLD = 0.25
CHAINS: dict[str, list[Filter]] = {
    "threshold": [dps.SignificantlyModified(THRESHOLD)],
    "int8": [dps.Quantise("int8")],
    "threshold, int8, lz4": [
        dps.SignificantlyModified(THRESHOLD),
        dps.Quantise("int8"),
        dps.Lossless(),
    ],
    "top-k": [dps.TopK(0.1)],
    "random, lz4": [dps.RandomSkip(0.5), dps.Lossless()],
}


class Pair:
    """A replica, and a worker that reads from it; what they say goes over the wire."""

    def __init__(self, chain: Sequence[Filter], holder: str = "a", copy: Copy | None = None):
        chains = checked_of_pulls({"*": chain}, LAYOUT.names)
        self.sent = SentCopies(SHARD, 0, chains, holder)
        self.copy = copy or Copy(SHARD)
        self.version = 0

    def asked(self, values: Array, reader: UpdateId = READER) -> Weights:
        """What the replica answers when the worker reads these values."""
        self.version += 1
        whole = Weights(self.version, 0.0, -1, values)
        reply = asyncio.run(self.sent.filtered(whole, reader, self.copy.has))
        arrived: Weights = wire.decode([frame.copy() for frame in wire.encode(reply)])
        return arrived

    def read(self, values: Array) -> Array | None:
        """What the worker has after it has read these values; None: it has to ask again."""
        found = asyncio.run(self.copy.whole(self.asked(values)))
        return found.values if found is not None else None

    def kept(self) -> Array:
        return self.sent._sent[READER.worker].values

    def kept_bytes(self) -> int:
        return sum(sent.values.nbytes for sent in self.sent._sent.values())


def buffer_of(random: np.random.Generator, size: float = 1.0) -> Array:
    arrays = {n: (size * random.standard_normal(s)).astype(d) for n, (s, d) in SIZES.items()}
    return LAYOUT.gather(0, arrays)[0].copy()


def changed(values: Array, random: np.random.Generator, share: float, size: float) -> Array:
    new = values.copy()
    for name, array in LAYOUT.scatter({0: values}).items():
        step = size * random.standard_normal(array.shape) * (random.random(array.shape) < share)
        part = _part(new, name)
        part += step.astype(array.dtype)
    return new


def _part(buffer: Array, name: str) -> Array:
    pieces = [piece for piece in SHARD.pieces if piece.block.name == name]
    return buffer[pieces[0].offset : pieces[-1].end].view(pieces[0].block.dtype)


def furthest(values: Array, copy: Array) -> float:
    """The largest difference of any coordinate."""
    there, here = (LAYOUT.scatter({0: b}) for b in (values, copy))
    return max(float(np.abs(there[name] - here[name]).max()) for name in SIZES)


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@given(
    seed=st.integers(0, 2**32 - 1),
    fates=st.lists(
        st.sampled_from(["arrives", "arrives", "is lost", "comes twice", "starts anew", "other"]),
        min_size=2,
        max_size=12,
    ),
)
@settings(max_examples=25, deadline=None)
def test_a_worker_has_bit_by_bit_what_its_replica_thinks_it_has(
    chain: list[Filter], seed: int, fates: list[str]
) -> None:
    """Whatever becomes of replies, whoever else it has read from, and if it starts again."""
    random = np.random.default_rng(seed)
    pair = Pair(chain)
    other = Pair(chain, "b", pair.copy)
    values = buffer_of(random)
    for fate in fates:
        values = changed(values, random, random.random(), 2.0 ** random.integers(-6, 3))
        if fate == "is lost":
            pair.asked(values)
            continue
        if fate == "starts anew":
            pair.copy = other.copy = Copy(SHARD)
        if fate == "comes twice":
            pair.asked(values)
        asked = other if fate == "other" else pair
        before = asked.copy._weights
        held = before.values.copy() if before is not None else None
        found = asked.read(values)
        assert found is not None
        assert found.tobytes() == asked.kept().tobytes()
        if before is not None and held is not None:  # what was given out stays as it is
            assert before.values.tobytes() == held.tobytes()


@given(seed=st.integers(0, 2**32 - 1), pulls=st.integers(1, 12), decay=st.booleans())
@settings(max_examples=40, deadline=None)
def test_no_coordinate_is_further_off_than_the_threshold_after_any_number_of_pulls(
    seed: int, pulls: int, decay: bool
) -> None:
    random = np.random.default_rng(seed)
    pair = Pair([dps.SignificantlyModified(THRESHOLD, "1/t" if decay else None)])
    values = buffer_of(random)
    pair.read(values)
    withheld = 0.0
    for pull in range(1, pulls + 1):
        values = changed(values, random, 0.5, THRESHOLD / 2)
        found = pair.read(values)
        assert found is not None
        off = furthest(values, found)
        assert off <= (THRESHOLD / pull if decay else THRESHOLD)
        withheld = max(withheld, off)
    assert withheld > 0


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_weights_that_are_not_finite_are_shown_as_they_are(chain: list[Filter]) -> None:
    random, pair = np.random.default_rng(0), Pair(chain)
    values = buffer_of(random)
    pair.read(values)
    diverged = values.copy()
    diverged.view(np.uint8)[SHARD.pieces[0].offset :][:8] = np.array([np.nan]).view(np.uint8)
    for again in (diverged, diverged, values):
        found = pair.read(again)
        assert found is not None
        first = SHARD.pieces[0].view(found)[0]
        assert np.isnan(first) == np.isnan(SHARD.pieces[0].view(again)[0])


def test_an_answer_that_does_not_fit_is_refused() -> None:
    random, pair = np.random.default_rng(0), Pair(CHAINS["threshold"])
    values = buffer_of(random)
    pair.read(values)
    reply = pair.asked(changed(values, random, 0.5, 1.0))
    with pytest.raises(ShapeMismatch):
        asyncio.run(pair.copy.whole(replace(reply, values=reply.values[:-1])))
    assert pair.copy.has is None, "all weights are asked for next"


def test_whoever_is_no_worker_gets_weights_as_they_are_and_nothing_is_kept_for_it() -> None:
    pair = Pair([dps.Quantise("int8")])
    values = buffer_of(np.random.default_rng(0))
    for _ in range(2):
        reply = pair.asked(values, UpdateId("", 0, 0))
        assert (reply.copy, reply.since, reply.codec) == (None, None, ())
        assert reply.values.tobytes() == values.tobytes()
    assert pair.kept_bytes() == 0


def test_what_is_kept_for_workers_is_bounded_and_goes_when_they_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "KEPT_BYTES", 3 * SHARD.nbytes)
    pair, values = Pair(CHAINS["threshold"]), buffer_of(np.random.default_rng(0))
    for number in range(5):
        pair.asked(values, UpdateId(f"worker-{number}", 1, 0))
        assert pair.kept_bytes() <= 3 * SHARD.nbytes
    assert list(pair.sent._sent) == ["worker-2", "worker-3", "worker-4"]
    pair.asked(values, UpdateId("worker-2", 1, 0))  # so it has read last
    pair.asked(values, UpdateId("worker-5", 1, 0))
    assert list(pair.sent._sent) == ["worker-4", "worker-2", "worker-5"]
    for number in range(6):
        pair.sent.forget(f"worker-{number}")
    assert pair.kept_bytes() == 0


def test_filters_that_drop_what_they_withhold_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"pull_filters\['w'\]: KKT.* discards"):
        checked_of_pulls({"w": [dps.KKT(0.1)]}, LAYOUT.names)
    with pytest.raises(ConfigurationError, match=r"pull_filters\['x'\]: no such array"):
        checked_of_pulls({"x": [dps.TopK(0.1)]}, LAYOUT.names)


@pytest.mark.parametrize("durability", [Chain(2), Checkpoint(1, "sync", path="memory://copies")])
def test_the_loss_of_a_server_leaves_workers_with_what_the_shard_has(
    durability: Durability,
) -> None:
    async def scenario(s: Setting) -> None:
        process, client = await s.enter("a")
        for number in range(12):
            if number in (4, 8):
                s.world.crash(s.world.name_of((await s.world.complete()).views[0].chain[0]))
                await asyncio.sleep(0.5)
            gradient = np.zeros(40)
            gradient[number] = -1.0
            await process.run(client.push({"w": gradient}, pull=number % 3 != 0))
            if number % 3 == 0:
                await process.run(client.pull())
            found = client.weights()["w"]
            assert found.tolist() == [1.0] * (number + 1) + [0.0] * (39 - number)

    in_world(
        scenario,
        recovery=Recovery(durability),
        pull_filters={"*": [dps.SignificantlyModified(0.0)]},
        extra=("spare-0", "spare-1"),
    )
