"""Saved models: read back as they were, whole or not at all, and damage is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dps import Normal, SparseSpec, load
from dps.core.blocks import Layout
from dps.core.tables.table import Given
from dps.errors import CheckpointCorrupt, ConfigurationError, StoreUnavailable
from dps.recovery import model_files
from dps.recovery.model_files import MANIFEST

TABLE = SparseSpec("rows", 4, initial=Normal(0.1, seed=3))
KEYS = np.array([0, 7, 8, 1 << 40])


def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(50, 20)),
        "w[0:500]": rng.normal(size=7).astype(np.float32),  # as a part of `w` might be called
        "__metadata__": np.float32([1.0]),
    }


def saved(path: Path | str, shards: int = 3, seed: int = 0) -> Mapping[str, np.ndarray]:
    """Save a model; return its arrays."""
    given = arrays(seed)
    layout = Layout.of(given, shards, tables=[TABLE])
    rows = TABLE.initial_rows(KEYS) + np.float32(seed)
    model_files.save(path, layout, given, {"rows": (KEYS, rows)}, list(range(shards)))
    return given


@pytest.mark.parametrize("shards", [1, 3])
def test_a_model_is_read_back_bit_by_bit(tmp_path: Path, shards: int) -> None:
    given = saved(tmp_path / "model", shards)
    model = load(tmp_path / "model")
    assert list(model) == list(given)
    for name, array in given.items():
        assert model[name].dtype == array.dtype
        np.testing.assert_array_equal(model[name], array)
    keys, rows = model.rows("rows")
    np.testing.assert_array_equal(keys, KEYS)
    np.testing.assert_array_equal(rows, TABLE.initial_rows(KEYS))
    (spec,) = model.tables
    assert (spec.name, spec.width, spec.dtype) == ("rows", 4, "float32")
    assert isinstance(spec.initial, Given)
    assert spec.initial.otherwise == TABLE.initial
    assert model.versions == tuple(range(shards))


def test_any_reader_of_safetensors_can_read_the_files(tmp_path: Path) -> None:
    given = saved(tmp_path, 1)
    (file,) = tmp_path.glob("*.safetensors")
    np.testing.assert_array_equal(load_file(file)["w"], given["w"])


def test_a_path_of_fsspec_will_do() -> None:
    given = saved("memory://test-model")
    np.testing.assert_array_equal(load("memory://test-model")["w"], given["w"])


def test_saving_again_leaves_the_files_of_the_new_one_alone(tmp_path: Path) -> None:
    saved(tmp_path, 4)
    new = saved(tmp_path, 2, seed=1)
    assert len(list(tmp_path.iterdir())) == 3
    np.testing.assert_array_equal(load(tmp_path)["w"], new["w"])


def test_whenever_saving_ends_the_model_before_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the process is gone after any of its files: nothing of it is carried out later."""
    old, publish = saved(tmp_path, 3), model_files.publish
    for end in range(4):
        left = [end]

        def until_the_end(*args: Any, left: list[int] = left) -> None:
            if not left[0]:
                raise StoreUnavailable("no space left on device")
            left[0] -= 1
            publish(*args)

        monkeypatch.setattr(model_files, "publish", until_the_end)
        with pytest.raises(StoreUnavailable, match="no space left"):
            saved(tmp_path, 3, seed=1)
        np.testing.assert_array_equal(load(tmp_path)["w"], old["w"])
        assert len(list(tmp_path.iterdir())) == 4  # what was written is removed again


def test_damage_and_missing_files_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    file = sorted(tmp_path.glob("*.safetensors"))[0]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointCorrupt, match=f"{file.name} is damaged"):
        load(tmp_path)
    file.unlink()
    with pytest.raises(CheckpointCorrupt, match=f"{file.name} is missing"):
        load(tmp_path)


def test_what_is_no_saved_model_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"ParameterServer\.save writes one"):
        load(tmp_path)
    (tmp_path / MANIFEST).write_text('{"name": "of something else"}')
    with pytest.raises(ConfigurationError, match="not the manifest of a saved model"):
        saved(tmp_path)
    with pytest.raises(CheckpointCorrupt):
        load(tmp_path)
