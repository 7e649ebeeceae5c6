"""Lists of keys that a server node keeps, so that clients can name them by their digest."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from threading import Lock

from dps.core.filters.encoding import Section, assembled, taken_apart
from dps.core.updates import Operation
from dps.errors import KeysUnknown, ShapeMismatch
from dps.protocol.key_cache import Array, digest_of, is_cached

CACHE_BYTES = 1 << 26


class KeyLists:
    """The lists that a node has had last, of all shards and workers. Thread-safe.

    A list is found by what is in it, so it does not matter whose it was.
    """

    def __init__(self) -> None:
        self._lists: OrderedDict[str, Array] = OrderedDict()
        self._nbytes = 0
        self._lock = Lock()

    def completed(self, op: Operation) -> Operation:
        """Return the operation with all its lists, and keep those that it came with.

        Raises
        ------
        KeysUnknown
            A list is not here (any more).
        """
        if not op.codec:
            return op
        sections = [self._whole(op, section) for section in taken_apart(op)]
        if not any(part.cached for part in op.codec):
            return op
        return assembled(op, sections)

    def _whole(self, op: Operation, section: Section) -> Section:
        part = section.part
        if not part.cached:
            self._keep(section.keys)
            return section
        with self._lock:
            keys = self._found(part.cached)
        if keys is None:
            raise KeysUnknown(f"update {op.id}: its list of indices is not here; send it again")
        if keys.nbytes != part.key_bytes:
            raise ShapeMismatch(f"update {op.id}: its list of indices has another length")
        return Section(replace(part, cached=""), keys, section.values)

    def _found(self, digest: str) -> Array | None:
        if digest in self._lists:
            self._lists.move_to_end(digest)
        return self._lists.get(digest)

    def _keep(self, keys: Array) -> None:
        if not is_cached(keys):
            return
        digest = digest_of(keys)
        with self._lock:
            if self._found(digest) is None:
                self._lists[digest] = keys.copy()  # else the whole payload would be kept
                self._nbytes += keys.nbytes
            while self._nbytes > CACHE_BYTES:
                _, oldest = self._lists.popitem(last=False)
                self._nbytes -= oldest.nbytes
