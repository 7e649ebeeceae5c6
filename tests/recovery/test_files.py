"""What reaches a real disk when a checkpoint is published, and in which order."""

from __future__ import annotations

import os
from pathlib import Path

import fsspec
import pytest

from dps.recovery.files import make_folder, publish


def test_bytes_names_and_new_folders_are_synced_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, list[str]]] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        there = sorted(p.name for p in path.iterdir()) if path.is_dir() else [path.name]
        synced.append((str(path.relative_to(tmp_path)), there))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    fs, folder = fsspec.url_to_fs(str(tmp_path / "group" / "shard-0"))
    make_folder(fs, folder)
    assert synced == [("group", ["shard-0"]), (".", ["group"])]
    synced.clear()
    make_folder(fs, folder)
    assert not synced
    publish(fs, folder, "whole", b"bytes")
    (scratch, _), (names, there) = synced
    assert scratch.startswith("group/shard-0/whole.")
    assert scratch.endswith(".tmp")
    assert (names, there) == ("group/shard-0", ["whole"])
