"""Durabilities of another maker: one made of one of dps, and one that keeps states by itself."""

from __future__ import annotations

import io
from collections.abc import Collection
from dataclasses import dataclass

import fsspec
import numpy as np

from dps import Chain, Durability
from dps.core.shard import ShardState
from dps.errors import StaleEpoch, StoreUnavailable
from dps.protocol.transport import Endpoint
from dps.protocol.wire import decode, encode
from dps.recovery.durability import Persistence, ServerContext


@dataclass(frozen=True)
class Standby(Chain):
    """A chain that stands two losses, unless it is told to stand more or fewer."""

    replicas: int = 3


@dataclass(frozen=True)
class Shelf(Durability):
    """A shard's state is one file below `folder`, which is written anew before each ack."""

    folder: str

    def is_restorable(self, stored: Collection[Endpoint], stores: Collection[Endpoint]) -> bool:
        """Return True: there is a file before a shard is served."""
        return True

    def persistence(self, context: ServerContext) -> Persistence:
        """Return what writes one shard's file."""
        return _File(f"{self.folder}/{context.group}", context.shard)


class _File(Persistence):
    """The file of one shard: the epoch of who has it, and the state."""

    source = "shelf"
    immediate = False

    def __init__(self, folder: str, shard: int) -> None:
        self._fs, self._folder = fsspec.url_to_fs(folder)
        self._path = f"{self._folder}/{shard}"
        self._shard = shard

    async def begin(self, epoch: int, state: ShardState) -> None:
        """Write the state that the server starts with."""
        await self.commit(epoch, state)

    async def commit(self, epoch: int, state: ShardState) -> None:
        """Write the state, unless a server of a later epoch has the file."""
        if self._fs.exists(self._path) and self._read()[0] > epoch:
            raise StaleEpoch(f"shard {self._shard} is in a later epoch than {epoch}")
        self._write(epoch, state)

    async def restore(self, epoch: int, cut: int) -> ShardState:
        """Read the state, and take the file."""
        if not self._fs.exists(self._path):
            raise StoreUnavailable(f"shard {self._shard}: there is no {self._path}")
        _, state = self._read()
        self._write(epoch, state)
        return state

    def _read(self) -> tuple[int, ShardState]:
        with np.load(io.BytesIO(self._fs.cat_file(self._path))) as arrays:
            frames = [arrays[f"arr_{number}"] for number in range(len(arrays.files))]
        return int(frames[0]), decode(frames[1:])

    def _write(self, epoch: int, state: ShardState) -> None:
        self._fs.makedirs(self._folder, exist_ok=True)
        buffer = io.BytesIO()
        np.savez(buffer, np.asarray(epoch), *encode(state))
        part = f"{self._path}.part"
        self._fs.pipe_file(part, buffer.getvalue())
        self._fs.mv(part, self._path)
