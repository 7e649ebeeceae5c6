"""Recovery as data: the presets are what the literature says, and wrong choices are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dps.core.replay import Continue, Replay, Wait
from dps.errors import ConfigurationError
from dps.recovery.chain import Chain
from dps.recovery.checkpoint import Checkpoint
from dps.recovery.durability import NoDurability
from dps.recovery.partial import PartialCheckpoint
from dps.recovery.shared_store import SharedStore
from dps.recovery.strategy import PRESETS, Recovery, preset, with_checkpoint_path


def test_presets_are_the_strategies_of_the_literature() -> None:
    assert preset("none") == Recovery(NoDurability(), Wait(), Replay("sum"))
    assert preset("checkpoint") == Recovery(Checkpoint(), Wait(), Replay("sum"))
    assert preset("chain") == Recovery(Chain(replicas=2), Wait(), Replay("sum"))
    assert preset("stateless") == Recovery(SharedStore(), Continue(), Replay("sum"))
    assert PRESETS.keys() == {"none", "checkpoint", "chain", "stateless"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Checkpoint(every=0), "Checkpoint: every=0, expected 1 or more whole updates"),
        (lambda: Checkpoint(seconds=float("nan")), "Checkpoint: seconds=nan, expected a number"),
        (lambda: Checkpoint(scope="some"), "Checkpoint: scope='some', expected 'shard' or 'all'"),  # type: ignore[arg-type]
        (
            lambda: Recovery(Checkpoint(scope="all"), Continue()),
            "checkpoint with scope='all' cannot be combined with outage=continue: gradients "
            "buffered for",
        ),
        (
            lambda: Checkpoint(every="auto", least=5, most=4),
            "Checkpoint: most=4, expected 5 or more whole updates, as least=5",
        ),
        (
            lambda: Checkpoint(every=5, mtbf=60.0),
            "Checkpoint: least, most and mtbf need every='auto'",
        ),
        (
            lambda: PartialCheckpoint(share=0),
            "PartialCheckpoint: share=0, expected a number above 0, at most 1",
        ),
        (lambda: Chain(replicas=0), "Chain: replicas=0, expected 1 or more whole"),
        (lambda: SharedStore(every=0), "SharedStore: every=0, expected 1 or more whole"),
        (lambda: Continue(buffer="disk"), "Continue: buffer='disk', expected 'mailbox'"),  # type: ignore[arg-type]
        (lambda: Replay(drop_older_than=-1), "Replay: drop_older_than=-1, expected 0 or more"),
    ],
)
def test_a_choice_that_cannot_work_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_the_interval_of_checkpoints_is_in_updates_or_seconds_or_both() -> None:
    assert (Checkpoint().every, Checkpoint().seconds) == (100, None)
    assert (Checkpoint(seconds=2).every, Checkpoint(seconds=2).seconds) == (None, 2)
    assert (Checkpoint(every="auto").at_risk, Checkpoint(every=7).at_risk) == (10_000, 7)
    both = Checkpoint(every=5, seconds=2)
    assert (both.every, both.seconds) == (5, 2)


def test_a_checkpoint_path_is_filled_in_only_where_none_was_given() -> None:
    open_choice = Recovery(Checkpoint(every=7), Continue(), Replay("mean"))
    assert with_checkpoint_path(open_choice, "/here") == Recovery(
        Checkpoint(every=7, path="/here"), Continue(), Replay("mean")
    )
    given = Recovery(Checkpoint(path="memory://there"))
    assert with_checkpoint_path(given, "/here") is given
    assert with_checkpoint_path(preset("chain"), "/here") == preset("chain")
