"""Filters: what is sent and what is withheld make up what there was, and each withholds its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dps
from dps.core.filters.chain import checked
from dps.core.filters.encoding import BUCKET, decoded
from dps.core.filters.filter import Filter, Sending
from dps.core.filters.outbox import Counts, Outbox
from dps.core.updates import Operation, UpdateId
from dps.errors import ConfigurationError, NonFiniteGradient, ShapeMismatch
from dps.protocol.compression import dense, packed
from dps.protocol.wire import decode, encode
from tests.support.builders import Model

PROXIMAL = dps.Proximal(0.1, dps.L1(1.0))
CHAINS: dict[str, list[Filter]] = {
    "significantly modified": [dps.SignificantlyModified(1.5)],
    "falling threshold": [dps.SignificantlyModified(4.0, decay="1/t")],
    "random skip": [dps.RandomSkip(0.6, seed=3)],
    "top-k": [dps.TopK(0.1)],
    "bf16": [dps.Quantise("bf16")],
    "lossless": [dps.Lossless()],
    "top-k, bf16": [dps.TopK(0.2), dps.Quantise("bf16")],
    "two selections, bf16, lossless": [
        dps.RandomSkip(0.3),
        dps.SignificantlyModified(0.5),
        dps.Quantise("bf16"),
        dps.Lossless(),
    ],
}
every_chain = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)


def sending(push: int = 1, weights: np.ndarray | None = None, worker: str = "a") -> Sending:
    return Sending(UpdateId(worker, 1, push), 0, "w", push, weights)


class Sender:
    """A worker's end and a shard's: what comes out of filters, over the wire, as dense arrays."""

    def __init__(self, model: Model, *filters: Filter, rule: Any = PROXIMAL) -> None:
        self.model = model
        chains = checked({"*": filters}, model.layout.names, rule)
        self.outbox = Outbox(model.layout, 0, chains)
        self.seq = 0

    def push(self, weights: np.ndarray | None = None, **of: np.ndarray) -> dict[str, np.ndarray]:
        self.seq += 1
        prepared = self.outbox.prepared(self.model.gradient("a", self.seq, of=of), weights)
        op = packed(prepared.operation, prepared.lossless)
        assert op.gradient is not None
        self.outbox.commit(prepared, op.gradient.nbytes)
        return self.received(op)

    def rest(self) -> dict[str, np.ndarray]:
        """What would be sent last of all; nothing if nothing is withheld."""
        if not self.outbox.withheld():
            return {}
        prepared = self.outbox.remainder(Operation("gradient", UpdateId("a", 1, self.seq + 1)))
        op = packed(prepared.operation, prepared.lossless)
        self.outbox.commit(prepared, 0)
        return self.received(op)

    def received(self, op: Operation) -> dict[str, np.ndarray]:
        found = dense(self.model.layout.shards[0], decode(encode(op)))
        assert not found.codec
        gradient = np.zeros(self.model.layout.shards[0].nbytes, np.uint8)
        at = 0
        pieces = self.model.layout.shards[0].pieces
        for piece in [pieces[i] for i in op.pieces] if op.pieces else pieces:
            part = found.gradient[at : at + piece.block.nbytes]
            gradient[piece.offset : piece.end] = part
            at += piece.block.nbytes
        return self.model.arrays(gradient)


numbers = st.integers(-40, 40).map(lambda n: n / 8)


@pytest.mark.slow
@every_chain
@given(data=st.data(), dtype=st.sampled_from(["float32", "float64"]), size=st.integers(1, 90))
@settings(max_examples=25)
def test_what_was_sent_and_what_is_withheld_is_what_there_was(
    chain: list[Filter], data: st.DataObject, dtype: str, size: int
) -> None:
    """With multiples of an eighth, sums are exact in any order."""
    model = Model.of(w=np.zeros(size, dtype), b=np.zeros(2, np.float64))
    sender = Sender(model, *chain)
    total = {name: np.zeros(spec.shape) for name, spec in model.layout.names.items()}
    sent = {name: np.zeros(spec.shape) for name, spec in model.layout.names.items()}
    for _ in range(data.draw(st.integers(1, 4))):
        of = {
            "w": np.array(data.draw(st.lists(numbers, min_size=size, max_size=size)), dtype),
            "b": np.array(data.draw(st.lists(numbers, min_size=2, max_size=2))),
        }
        found = sender.push(**of)
        for name in of:
            assert found[name].dtype == of[name].dtype
            total[name] += of[name]
            sent[name] += found[name]
    withheld = sender.outbox.withheld()
    for name in total:
        assert (sent[name] + withheld.get(name, 0) == total[name]).all()
    for name, rest in sender.rest().items():
        sent[name] += rest
        assert (sent[name] == total[name]).all()
    assert sender.outbox.residual_norm == 0


@given(size=st.integers(1, 70), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_raw_values_come_back_bit_by_bit(size: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    gradient = random.standard_normal(size).astype(np.float32)
    gradient[random.random(size) < share] = 0
    sender = Sender(Model.of(w=gradient), dps.SignificantlyModified(0.0), dps.Lossless())
    assert sender.push(w=gradient)["w"].tobytes() == gradient.tobytes()
    assert sender.outbox.residual_norm == 0


def test_many_values_come_back_whichever_way_their_indices_are_written() -> None:
    random = np.random.default_rng(0)
    for size in (100, 70_000):
        for entries in (0, 1, 5, size // 40, size // 3, size - 1, size):
            gradient = np.zeros(size, np.float32)
            gradient[random.permutation(size)[:entries]] = 1.5
            sender = Sender(Model.of(w=gradient), dps.SignificantlyModified(0.0))
            assert sender.push(w=gradient)["w"].tobytes() == gradient.tobytes()
            assert sender.outbox.counts.sent_bytes <= gradient.nbytes


def test_small_changes_wait_until_their_sum_is_large() -> None:
    sender = Sender(Model.of(w=np.zeros(3)), dps.SignificantlyModified(1.0))
    gradient = np.array([0.4, 1.0, -2.0])
    found = [sender.push(w=gradient)["w"].tolist() for _ in range(3)]
    assert found[0] == [0, 0, -2.0]
    assert found[1] == [0, 2.0, -2.0]
    assert found[2] == pytest.approx([1.2, 0, -2.0])


def test_a_threshold_may_fall_with_the_number_of_the_push() -> None:
    falling = dps.SignificantlyModified(1.0, decay="1/t")
    for push, significant in ((1, False), (2, False), (3, True)):
        assert bool(falling.selected(np.array([0.4]), sending(push))[0]) is significant


def test_a_falling_threshold_goes_by_the_pushes_that_went_out() -> None:
    sender = Sender(Model.of(w=np.zeros(1)), dps.SignificantlyModified(1.0, decay="1/t"))
    found = [float(sender.push(w=np.array([g]))["w"][0]) for g in (0.2, 0.2, 0.2, 0.26, 0.19)]
    assert found == pytest.approx([0, 0, 0.6, 0.26, 0])


def test_gradients_that_leave_a_weight_at_zero_are_left_out_for_good() -> None:
    sender = Sender(Model.of(w=np.zeros(4)), dps.KKT(1.0, delta=0.25))
    weights = np.array([0.0, 0.0, 0.5, 0.0]).view(np.uint8)
    gradient = np.array([0.75, 0.8, 0.1, -0.9])
    assert sender.push(weights, w=gradient)["w"].tolist() == [0, 0.8, 0.1, -0.9]
    assert sender.outbox.residual_norm == 0
    assert sender.push(weights, w=gradient)["w"].tolist() == [0, 0.8, 0.1, -0.9]
    assert sender.push(None, w=gradient)["w"].tolist() == gradient.tolist()


def test_what_one_filter_leaves_out_for_good_is_not_kept_by_the_next() -> None:
    sender = Sender(Model.of(w=np.zeros(3)), dps.KKT(1.0), dps.SignificantlyModified(2.0))
    weights = np.zeros(3).view(np.uint8)
    assert sender.push(weights, w=np.array([0.5, 1.5, 3.0]))["w"].tolist() == [0, 0, 3.0]
    assert sender.outbox.withheld()["w"].tolist() == [0, 1.5, 0]


def test_a_gradient_of_some_arrays_is_compared_with_the_weights_of_these() -> None:
    model = Model.of(a=np.zeros(2), b=np.zeros(2))
    sender = Sender(model, dps.KKT(1.0))
    weights, _ = model.layout.gather(0, {"a": np.ones(2), "b": np.array([0.0, 1.0])})
    found = sender.push(weights, b=np.array([0.5, 0.5]))
    assert found["b"].tolist() == [0, 0.5]


@given(st.lists(st.floats(-3, 3), min_size=5, max_size=5), st.floats(0.01, 0.5))
def test_what_kkt_leaves_out_would_have_changed_nothing(w: list[float], step: float) -> None:
    """A proximal step with the gradient and one without what is left out come to the same."""
    values = np.array([0.0, 0.0, 0.0, 1.0, -2.0])
    gradient = np.array(w)
    rule = dps.Proximal(step, dps.L1(1.0))
    kept = dps.KKT(1.0).selected(gradient, sending(weights=values))
    whole, _ = rule.step(values, gradient, {}, 1, 1.0)
    filtered, _ = rule.step(values, np.where(kept, gradient, 0), {}, 1, 1.0)
    assert whole.tolist() == filtered.tolist()


def test_entries_are_skipped_by_the_dice_and_the_same_ones_again() -> None:
    skip = dps.RandomSkip(0.3, seed=1)
    gradient = np.ones(20_000, np.float32)
    masks = [skip.selected(gradient, sending(push)) for push in (1, 2)]
    assert np.mean(masks[0]) == pytest.approx(0.7, abs=0.02)
    assert not (masks[0] == masks[1]).all()
    assert (skip.selected(gradient, sending(1)) == masks[0]).all()
    assert not (skip.selected(gradient, sending(1, worker="b")) == masks[0]).all()
    assert not (dps.RandomSkip(0.3, seed=2).selected(gradient, sending(1)) == masks[0]).all()


@pytest.mark.parametrize(
    "other",
    [
        {"update": UpdateId("a", 2, 1)},  # the worker has started again, and counts from 1
        {"shard": 1},
        {"array": "b"},
    ],
    ids=str,
)
def test_no_other_gradient_meets_the_same_dice(other: dict[str, Any]) -> None:
    first = sending(1).random(0).random(8)
    assert not (replace(sending(1), **other).random(0).random(8) == first).any()


def test_the_largest_entries_are_sent() -> None:
    gradient = np.array([0.1, -9.0, 3.0, 0.0, 5.0, -0.2])
    assert np.flatnonzero(dps.TopK(0.5).selected(gradient, sending())).tolist() == [1, 2, 4]
    assert dps.TopK(0.01).selected(gradient, sending()).sum() == 1
    assert dps.TopK(1.0).selected(gradient, sending()).sum() == 5, "a zero is never sent"
    assert dps.TopK(1.0).selected(np.zeros(3), sending()).sum() == 0


def test_bf16_rounds_to_nearest_and_ties_to_even() -> None:
    one, step = 1.0, 2.0**-7
    gradient = np.array([one + step / 4, one + step / 2, one + 1.5 * step, 3e38, -3.4e38, 1e-41])
    sender = Sender(Model.of(w=np.zeros(6, np.float32)), dps.Quantise("bf16"))
    found = sender.push(w=gradient.astype(np.float32))["w"]
    assert found[:3].tolist() == [one, one, one + 2 * step]
    assert np.isfinite(found).all()
    assert found[3:] == pytest.approx(gradient[3:], rel=2**-8, abs=1e-40)


def test_int8_is_exact_in_expectation_and_never_off_by_more_than_a_step() -> None:
    random = np.random.default_rng(4)
    gradient = random.standard_normal(3 * BUCKET + 5).astype(np.float32)
    gradient[:BUCKET] *= 100
    sender = Sender(Model.of(w=gradient), dps.Quantise("int8"))
    found = np.array([sender.push(w=gradient)["w"] for _ in range(200)], np.float64)
    buckets = np.split(gradient, range(BUCKET, len(gradient), BUCKET))
    steps = np.concatenate([np.full(len(b), np.abs(b).max() / 127) for b in buckets])
    assert (np.abs(found - gradient) <= steps * (1 + 1e-5)).all()
    errors = (found.mean(axis=0) - gradient) / steps
    assert np.abs(errors).max() < 5 * 0.5 / np.sqrt(200)
    assert abs(errors.mean()) < 5 * 0.5 / np.sqrt(200 * len(gradient))


class Coin:
    """A filter as a user would write it, which tosses for each entry."""

    feedback = False

    def selected(self, gradient: np.ndarray, sending: Sending) -> np.ndarray:
        return sending.random(0).random(gradient.size, dtype=np.float32) >= 0.5


def test_filters_of_one_array_draw_numbers_of_their_own() -> None:
    gradient = np.full(40_000, 3.5, np.float32)
    gradient[::BUCKET] = 127.0  # so that the others are rounded up as often as down
    model = Model.of(w=gradient)
    found = Sender(model, dps.RandomSkip(0.5), Coin()).push(w=gradient)["w"]
    assert (found != 0).mean() == pytest.approx(0.25, abs=0.02)


def test_numbers_are_not_rounded_by_the_dice_that_chose_them() -> None:
    """So few are withheld that zeros are sent for them: each has the place of its own die."""
    gradient = np.full(40_000, 3.5, np.float32)
    gradient[::BUCKET] = 127.0  # so that the others are rounded up as often as down
    sender = Sender(Model.of(w=gradient), dps.RandomSkip(0.1), dps.Quantise("int8"))
    found = sender.push(w=gradient)["w"]
    assert found[(found != 0) & (found < 5)].mean() == pytest.approx(3.5, abs=0.02)


def test_int8_of_zeros_is_zeros() -> None:
    gradient = np.zeros(2000, np.float32)
    gradient[1999] = 1e-42
    found = Sender(Model.of(w=gradient), dps.Quantise("int8")).push(w=gradient)["w"]
    assert not found[:BUCKET].any()
    assert np.isfinite(found).all()


def test_bytes_and_entries_are_counted() -> None:
    sender = Sender(Model.of(w=np.zeros(1000, np.float32)), dps.TopK(0.01), dps.Quantise("bf16"))
    sender.push(w=np.arange(1000, dtype=np.float32))
    sender.push(w=np.arange(1000, dtype=np.float32))
    assert sender.outbox.counts == Counts(8000, 2 * 10 * (2 + 2), 2000, 1980)


def test_nothing_changes_before_a_gradient_is_on_its_way() -> None:
    sender = Sender(Model.of(w=np.zeros(4)), dps.TopK(0.25))
    op = sender.model.gradient("a", 1, of={"w": np.arange(4.0)})
    first = sender.outbox.prepared(op, None)
    again = sender.outbox.prepared(op, None)
    assert sender.outbox.residual_norm == 0
    assert encode(first.operation)[0].tobytes() == encode(again.operation)[0].tobytes()
    assert first.operation.gradient.tobytes() == again.operation.gradient.tobytes()


class Returning:
    """A user's filter that returns what it was made with."""

    feedback = True

    def __init__(self, returned: object) -> None:
        self.returned = returned

    def selected(self, gradient: np.ndarray, sending: Sending) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (np.array([0, 1, 0, 1]), r"int64\[4\]"),
        (np.ones(3, bool), r"bool\[3\]"),
        (np.ones((4, 1), bool), r"bool\[4, 1\]"),
        ([True, False, True, False], "list"),
    ],
    ids=str,
)
def test_what_is_no_mask_is_refused_and_nothing_changes(returned: object, said: str) -> None:
    sender = Sender(Model.of(w=np.zeros(4)), dps.TopK(0.5), Returning(returned))
    with pytest.raises(ConfigurationError, match=f"'w'.*Returning.selected returned {said}, exp"):
        sender.push(w=np.arange(4.0))
    assert sender.outbox.counts == Counts()
    assert not sender.outbox.withheld()


class Doubling:
    """A user's filter that writes into what it is given."""

    feedback = False

    def selected(self, gradient: np.ndarray, sending: Sending) -> Any:
        gradient *= 2
        return gradient > 0


@pytest.mark.parametrize("filters", [[Doubling()], [dps.TopK(0.5), Doubling()]])
def test_a_filter_cannot_write_into_a_gradient(filters: list[Any]) -> None:
    sender = Sender(Model.of(w=np.zeros(4)), *filters)
    with pytest.raises(ValueError, match="read-only"):
        sender.push(w=np.arange(4.0))
    assert sender.outbox.counts == Counts()


def test_a_sum_with_what_was_withheld_that_overflows_is_refused() -> None:
    sender = Sender(Model.of(w=np.zeros(2, np.float32)), dps.TopK(0.5))
    large = np.array([2e38, 3e38], np.float32)
    sender.push(w=large)
    with pytest.raises(NonFiniteGradient, match="'w' with what its filters had withheld"):
        sender.push(w=large)
    assert sender.push(w=np.array([0, 1], np.float32))["w"].tolist() == [np.float32(2e38), 0]


@pytest.mark.parametrize("name", ["top-k", "falling threshold"])
def test_arrays_that_are_pushed_in_turn_are_filtered_as_if_each_was_alone(name: str) -> None:
    """What is withheld of one is not forgotten, nor are its pushes, when another is pushed."""
    random, filters = np.random.default_rng(3), CHAINS[name]
    both = Sender(Model.of(w=np.zeros(40), b=np.zeros(40)), *filters)
    alone = {array: Sender(Model.of(**{array: np.zeros(40)}), *filters) for array in "wb"}
    withheld = 0.0
    for array in "wb" * 4:
        of = random.standard_normal(40)
        assert (both.push(**{array: of})[array] == alone[array].push(**{array: of})[array]).all()
        withheld += both.outbox.residual_norm
    assert withheld
    kept = both.outbox.withheld()
    for array, sender in alone.items():
        assert (kept[array] == sender.outbox.withheld()[array]).all()


def test_arrays_without_filters_go_as_they_are() -> None:
    model = Model.of(w=np.zeros(8), b=np.zeros(8))
    outbox = Outbox(model.layout, 0, checked({"w": [dps.TopK(0.1)]}, ["w", "b"], dps.SGD(0.1)))
    parts = outbox.prepared(model.gradient("a", 1), None).operation.codec
    assert [part.entries for part in parts] == [1, -1]


@cache
def trained(*filters: Filter, steps: int = 600) -> float:
    """The logistic loss that descent with one worker's gradients through filters comes to."""
    random = np.random.default_rng(5)
    x = random.standard_normal((400, 50))
    y = np.sign(x @ random.standard_normal(50) + 8 * random.standard_normal(400))
    model = Model.of(w=np.zeros(50))
    sender, state = Sender(model, *filters, rule=dps.SGD(0.5)), np.zeros(50)
    for _ in range(steps):
        slope = -y / (1 + np.exp(y * (x @ state)))
        state = state - 0.5 * sender.push(w=x.T @ slope / 400)["w"]
    return float(np.logaddexp(0, -y * (x @ state)).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("filters", "within"),
    [
        ([dps.TopK(0.1)], 1e-3),
        ([dps.RandomSkip(0.8)], 1e-3),
        ([dps.SignificantlyModified(0.01, decay="1/t")], 1e-3),
        ([dps.Quantise("bf16")], 1e-3),
        ([dps.Quantise("int8")], 1e-3),
        ([dps.TopK(0.1), dps.Quantise("bf16")], 1e-3),
    ],
    ids=str,
)
def test_logistic_regression_comes_to_the_same_loss(filters: list[Filter], within: float) -> None:
    plain = trained()
    assert plain < 0.8 * np.log(2)
    assert trained(steps=1200) == pytest.approx(plain, rel=1e-4), "it is at its end"
    assert trained(*filters) == pytest.approx(plain, rel=within)


# -- what cannot be read ---------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=200)
def test_a_damaged_payload_is_refused_or_read_as_numbers(data: st.DataObject) -> None:
    """Whatever comes, nothing but `ShapeMismatch` is raised, and sizes stay what they were."""
    model = Model.of(w=np.zeros(300, np.float32), b=np.zeros(3))
    chain = data.draw(st.sampled_from(list(CHAINS.values())))
    gradient = np.random.default_rng(0).standard_normal(300).astype(np.float32).round(1)
    outbox = Outbox(model.layout, 0, checked({"*": chain}, model.layout.names, PROXIMAL))
    prepared = outbox.prepared(model.gradient("a", 1, of={"w": gradient, "b": np.ones(3)}), None)
    op = packed(prepared.operation, prepared.lossless)
    index = data.draw(st.integers(0, 1))
    changes = st.fixed_dictionaries(
        {},
        optional={
            "entries": st.integers(-3, 400),
            "keys": st.sampled_from(["", "bits", "uint16", "uint32", "float64"]),
            "values": st.sampled_from(["raw", "bf16", "int8", "other"]),
            "key_bytes": st.integers(-5, 2000),
            "value_bytes": st.integers(-5, 2000),
            "packed_keys": st.booleans(),
            "packed_values": st.booleans(),
        },
    )
    part = replace(op.codec[index], **data.draw(changes))
    payload = op.gradient[: data.draw(st.integers(0, len(op.gradient)))].copy()
    at = data.draw(st.integers(0, len(payload)))
    payload[at:] ^= data.draw(st.integers(0, 255))
    codec = (part, op.codec[1]) if index == 0 else (op.codec[0], part)
    codec = codec[: data.draw(st.integers(1, 2))]
    try:
        found = dense(model.layout.shards[0], replace(op, codec=codec, gradient=payload))
    except ShapeMismatch:
        return
    assert found.gradient.nbytes == model.layout.shards[0].nbytes


@pytest.mark.parametrize("wrong", [[3, 2], [2, 2], [0, 9]], ids=str)
def test_indices_must_rise_and_be_there(wrong: list[int]) -> None:
    model = Model.of(w=np.zeros(9))
    outbox = Outbox(model.layout, 0, checked({"*": [dps.TopK(0.2)]}, ["w"], PROXIMAL))
    op = outbox.prepared(model.gradient("a", 1, of={"w": np.arange(9.0)}), None).operation
    part = replace(op.codec[0], keys="uint16", key_bytes=4)
    payload = np.concatenate([np.array(wrong, np.uint16).view(np.uint8), op.gradient[-16:]])
    with pytest.raises(ShapeMismatch, match="is not what it says it is"):
        decoded(model.layout.shards[0], replace(op, codec=(part,), gradient=payload))


def test_a_shard_takes_no_operation_that_is_still_encoded() -> None:
    model = Model.of(w=np.zeros(4, np.float32))
    outbox = Outbox(model.layout, 0, checked({"*": [dps.Lossless()]}, ["w"], PROXIMAL))
    op = outbox.prepared(model.gradient("a", 1), None).operation
    with pytest.raises(ShapeMismatch):
        model.apply(dps.SGD(1.0), model.state(dps.SGD(1.0)), op)


# -- what cannot be combined -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ([dps.TopK(0.1)], "filters=.*expected a mapping"),
        ({"v": [dps.TopK(0.1)]}, "no such array; there are: w, b"),
        ({"w": dps.TopK(0.1)}, "expected a list of filters"),
        ({"w": "top_k"}, "expected a list of filters"),
        ({"w": [dps.TopK]}, "is no filter"),
        ({"w": [0.1]}, "is no filter"),
        ({"w": [dps.TopK(0.1), dps.TopK(0.2)]}, "TopK is there twice; keep one"),
        ({"*": [dps.Quantise("bf16"), dps.Quantise("int8")]}, "Quantise is there twice"),
        ({"w": [dps.Lossless(), dps.Quantise("bf16")]}, "first say which entries"),
        ({"w": [dps.Quantise("int8"), dps.TopK(0.1)]}, "first say which entries"),
        ({"w": [dps.KKT(2.0)]}, "withholds what a proximal rule with an L1 penalty"),
    ],
)
def test_filters_that_cannot_work_are_refused(filters: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        checked(filters, ["w", "b"], PROXIMAL)


@pytest.mark.parametrize(
    "rule",
    [
        dps.SGD(0.1),
        dps.FTRL(l1=1.0),
        dps.Proximal(0.1, dps.GroupL1(1.0)),
        dps.Proximal(0.1, dps.L2(1.0)),
        dps.StalenessAware(dps.Adam()),
    ],
    ids=str,
)
def test_kkt_needs_a_rule_that_keeps_weights_at_zero(rule: dps.UpdateRule) -> None:
    with pytest.raises(ConfigurationError, match="KKT"):
        checked({"*": [dps.KKT(0.5)]}, ["w"], rule)


@pytest.mark.parametrize(
    "rule",
    [
        PROXIMAL,
        dps.Proximal(0.1, dps.ElasticNet(1.0, 0.1)),
        dps.DelayedProximal(1.0, 1.0, 2, dps.L1(1.0)),
        dps.DelayCompensated(dps.StalenessAware(PROXIMAL), 0.1),
    ],
    ids=str,
)
def test_kkt_goes_with_rules_that_do(rule: dps.UpdateRule) -> None:
    assert checked({"*": [dps.KKT(1.0)]}, ["w"], rule)["w"].selections == (dps.KKT(1.0),)


@pytest.mark.parametrize(
    "make",
    [
        lambda: dps.SignificantlyModified(-1.0),
        lambda: dps.SignificantlyModified(1.0, decay="1/sqrt(t)"),  # type: ignore[arg-type]
        lambda: dps.KKT(0.0),
        lambda: dps.KKT(1.0, delta=2.0),
        lambda: dps.RandomSkip(1.0),
        lambda: dps.RandomSkip(0.5, seed=-1),
        lambda: dps.TopK(0.0),
        lambda: dps.TopK(1.5),
        lambda: dps.TopK("0.1"),  # type: ignore[arg-type]
        lambda: dps.SignificantlyModified(None),  # type: ignore[arg-type]
        lambda: dps.RandomSkip(0.5, seed=True),
        lambda: dps.RandomSkip(0.5, seed=1 << 63),
        lambda: dps.Quantise("fp8"),  # type: ignore[arg-type]
        lambda: dps.Quantise("int8", seed=0.5),  # type: ignore[arg-type]
    ],
)
def test_numbers_that_cannot_be_are_refused(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        make()


def test_seeds_may_be_of_numpys_types() -> None:
    skip = dps.RandomSkip(0.1, np.int64(3))  # type: ignore[arg-type]
    assert skip == dps.RandomSkip(0.1, 3)
    assert type(skip.seed) is int
