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
from dps.core.filters.chain import Counts, Outbox, checked
from dps.core.filters.encoding import BUCKET
from dps.core.filters.filter import Filter, Sending
from dps.core.updates import Operation, UpdateId
from dps.errors import ConfigurationError
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
        self.outbox.commit(prepared)
        return self.received(op)

    def rest(self) -> dict[str, np.ndarray]:
        """What would be sent last of all; nothing if nothing is withheld."""
        if not self.outbox.withheld():
            return {}
        prepared = self.outbox.remainder(Operation("gradient", UpdateId("a", 1, self.seq + 1)))
        op = packed(prepared.operation, prepared.lossless)
        self.outbox.commit(prepared)
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


def test_many_values_come_back_whichever_way_their_indices_are_written() -> None:
    random = np.random.default_rng(0)
    for size in (100, 70_000):
        for entries in (0, 1, 5, size // 40, size // 3, size - 1, size):
            gradient = np.zeros(size, np.float32)
            gradient[random.permutation(size)[:entries]] = 1.5
            sender = Sender(Model.of(w=gradient), dps.SignificantlyModified(0.0))
            assert sender.push(w=gradient)["w"].tobytes() == gradient.tobytes()
            assert sender.outbox.counts.sent_bytes <= gradient.nbytes


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


def test_top_k_takes_the_first_of_equal_entries_and_no_zeros() -> None:
    equal = np.array([1.0, -2.0, 2.0, 2.0, 0.0, 0.0], np.float32)
    assert np.flatnonzero(dps.TopK(1 / 3).selected(equal, sending())).tolist() == [1, 2]
    assert np.flatnonzero(dps.TopK(1.0).selected(equal, sending())).tolist() == [0, 1, 2, 3]


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


def test_numbers_are_not_rounded_by_the_dice_that_chose_them() -> None:
    """So few are withheld that zeros are sent for them: each has the place of its own die."""
    gradient = np.full(40_000, 3.5, np.float32)
    gradient[::BUCKET] = 127.0  # so that the others are rounded up as often as down
    sender = Sender(Model.of(w=gradient), dps.RandomSkip(0.1), dps.Quantise("int8"))
    found = sender.push(w=gradient)["w"]
    assert found[(found != 0) & (found < 5)].mean() == pytest.approx(3.5, abs=0.02)


class Doubling:
    """A user's filter that writes into what it is given."""

    feedback = False

    def selected(self, gradient: np.ndarray, sending: Sending) -> Any:
        gradient *= 2
        return gradient > 0


def test_a_filter_cannot_write_into_a_gradient() -> None:
    sender = Sender(Model.of(w=np.zeros(4)), dps.TopK(0.5), Doubling())
    with pytest.raises(ValueError, match="read-only"):
        sender.push(w=np.arange(4.0))
    assert sender.outbox.counts == Counts()


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
        ([dps.RandomSkip(0.8)], 1e-3),
        ([dps.SignificantlyModified(0.01, decay="1/t")], 1e-3),
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


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ([dps.TopK(0.1)], "filters=.*expected a mapping"),
        ({"v": [dps.TopK(0.1)]}, "no such array; expected one of w, b"),
        ({"w": [dps.TopK]}, "is not a filter"),
        ({"w": [dps.TopK(0.1), dps.TopK(0.2)]}, "TopK is given twice; keep one"),
        ({"w": [dps.Quantise("int8"), dps.TopK(0.1)]}, "expected a filter that selects"),
        ({"w": [dps.KKT(2.0)]}, "needs a proximal rule with the same L1 penalty"),
    ],
)
def test_filters_that_cannot_work_are_refused(filters: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        checked(filters, ["w", "b"], PROXIMAL)


@pytest.mark.parametrize(
    "rule",
    [
        dps.FTRL(l1=1.0),
        dps.Proximal(0.1, dps.L2(1.0)),
        dps.StalenessAware(dps.Adam()),
    ],
    ids=str,
)
def test_kkt_needs_a_rule_that_keeps_weights_at_zero(rule: dps.UpdateRule) -> None:
    with pytest.raises(ConfigurationError, match="KKT"):
        checked({"*": [dps.KKT(0.5)]}, ["w"], rule)
