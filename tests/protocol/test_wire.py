"""The wire: whatever is registered crosses unchanged, whatever is not is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings

import dps
from dps import errors
from dps.core.shard import Progress, ShardState
from dps.core.tables.table import Level, Rows, SparseTable
from dps.core.updates import Operation, UpdateId
from dps.errors import ConfigurationError, DpsError
from dps.protocol import messages, wire
from dps.protocol.messages import Pull, RowsAsked, RowsRead
from dps.protocol.transport import Endpoint
from dps.protocol.wire import Frames, decode, encode
from tests.support.packages import THIRD_PARTY, installed, package
from tests.support.strategies import records

CARRIED = (
    *(Endpoint, UpdateId, Operation, Rows, Progress, ShardState, SparseTable, Level),
    *(Pull, RowsAsked, RowsRead),
)
OWN = [c for c in vars(messages).values() if getattr(c, "__module__", "") == messages.__name__]
MESSAGES = sorted(
    (c for c in OWN if is_dataclass(c) and c is not messages.OfShard), key=lambda cls: cls.__name__
)
ERRORS = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, DpsError)]


def delivered(frames: Frames) -> Frames:
    """The frames as they come out of a socket: other memory, read-only."""
    return [np.frombuffer(f.tobytes(), f.dtype).reshape(f.shape) for f in frames]


def plain(value: Any) -> Any:
    """The value in a form that shows every difference: types by name, arrays by their bytes."""
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if is_dataclass(value):
        return (
            type(value).__name__,
            [plain(getattr(value, field.name)) for field in fields(value)],
        )
    if isinstance(value, tuple | list):  # a list, as a field of any type may hold, becomes a tuple
        name = "tuple" if isinstance(value, list) else type(value).__name__
        return (name, [plain(item) for item in value])
    if isinstance(value, dict):
        return ("dict", [(plain(k), plain(v)) for k, v in value.items()])
    return (type(value).__name__, repr(value))


@pytest.mark.parametrize("cls", [*CARRIED, *MESSAGES], ids=lambda cls: cls.__name__)
def test_every_message_comes_back_as_it_was(cls: type) -> None:
    @given(records(cls))
    @settings(max_examples=5)
    def check(message: Any) -> None:
        assert plain(decode(delivered(encode(message)))) == plain(message)

    check()


def test_values_that_look_like_the_wires_own_marks_come_back_as_they_were() -> None:
    for value in ({"CloseGroup": ()}, {1: 2}, ("CloseGroup",), {"None": ("CloseGroup",)}, "\udcff"):
        assert decode(encode(value)) == value


def test_values_of_subclasses_come_back_as_plain_ones() -> None:
    class Letter(str, Enum):  # noqa: UP042 - whose str() is not its value
        A = "a"

    values = {"text": Letter.A, "number": np.float64(0.5), "map": defaultdict(int, {1: 2})}
    assert decode(encode(values)) == {"text": "a", "number": 0.5, "map": {1: 2}}


def test_arrays_are_not_copied_on_their_way() -> None:
    gradient = np.arange(1000, dtype=np.uint8)
    frames = encode(Operation("gradient", UpdateId("a", 1, 1), gradient=gradient))
    assert frames[1] is gradient
    assert decode(frames).gradient is gradient


def test_an_error_is_raised_at_the_other_end_under_its_name() -> None:
    for error in ERRORS:
        with pytest.raises(DpsError, match=r"^shard 3 \(epoch 2\): «no»$") as caught:
            decode(delivered(encode(error("shard 3 (epoch 2): «no»"))))
        assert type(caught.value) is error


@dataclass(frozen=True)
class Unregistered:
    number: int


class RunsCodeWhenUnpickled:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code that the sender chose",))


@pytest.mark.parametrize(
    "value",
    [
        Unregistered(1),
        RunsCodeWhenUnpickled(),
        np.array([RunsCodeWhenUnpickled()]),
        np.int64(1),
        ValueError("not one of ours"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_registered_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=f"{type(value).__name__} is not registered to cross"):
        encode((1, {"key": (value,)}))


@pytest.mark.parametrize("name", ["Changed", "Given", "Part", "Sending", "Timings"])
def test_the_name_of_what_never_travels_is_free_for_users(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_TYPES", {**wire._TYPES})
    own = make_dataclass(name, [("x", int)], frozen=True)
    wire.message(own)
    assert decode(encode(own(1))) == own(1)


def test_the_name_of_an_update_rule_is_not_free_for_users() -> None:
    assert decode(encode(dps.Adam())) == dps.Adam()
    with pytest.raises(ConfigurationError, match=r"Adam.*uses its name"):
        wire.message(make_dataclass("Adam", [], frozen=True))


def test_an_unknown_message_does_not_decode() -> None:
    header = msgpack.packb({wire.MARK: ["Unregistered", 1]})
    with pytest.raises(ConfigurationError, match="Unregistered is not registered to cross"):
        decode([np.frombuffer(header, np.uint8)])


@pytest.mark.parametrize("name", ["annotations", "SystemExit", 3])
def test_what_the_errors_do_not_list_is_not_looked_up_by_its_name(name: Any) -> None:
    header = msgpack.packb({wire.MARK: [name, "text"]})
    with pytest.raises(ConfigurationError, match=f"{name} is not registered to cross the wire"):
        decode([np.frombuffer(header, np.uint8)])


def test_an_error_of_others_is_raised_as_the_one_that_it_is_a_kind_of() -> None:
    class DiskGone(errors.StoreUnavailable):
        pass

    with pytest.raises(errors.StoreUnavailable, match=r"^disk 3$") as caught:
        decode(delivered(encode(DiskGone("disk 3"))))
    assert type(caught.value) is errors.StoreUnavailable


OTHERS = """
import numpy as np
from dps.protocol.wire import decode, encode
{begin}
print(decode(encode({value})))
"""


@pytest.mark.parametrize(
    ("begin", "value"),
    [
        ("from acme_dps.durabilities import Standby", "Standby(2)"),
        (
            "header = b'\\x81\\xa1\\x00\\x92\\xa9Alternate\\x03'",
            "decode([np.frombuffer(header, np.uint8)])",
        ),
    ],
)
def test_what_a_package_registers_by_an_entry_point_crosses_without_more(
    begin: str, value: str
) -> None:
    """Also in a process that has imported nothing of the package."""
    path = os.pathsep.join([str(THIRD_PARTY), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", OTHERS.format(begin=begin, value=value)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(("Standby", "SignDescent", "Alternate")), run.stdout


def test_an_entry_point_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    points = "[dps.rules]\nmine = broken_rules:BrokenRule\n"
    header = np.frombuffer(msgpack.packb({wire.MARK: ["BrokenRule"]}), np.uint8)
    with (
        installed(package(tmp_path, "broken-dps", points, broken_rules="1 / 0")),
        pytest.raises(ConfigurationError, match="broken_rules:BrokenRule cannot be imported"),
    ):
        decode([header])
