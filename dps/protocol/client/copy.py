"""A worker's copy of one shard's weights, where pulls are filtered: it is kept up by what changes.

The worker names the copy that it has with each read, and is sent what has to be done to that very
one, or all weights.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from dps.core.blocks import ShardLayout
from dps.core.filters.encoding import Section, assembled, taken_apart
from dps.core.updates import Operation, UpdateId
from dps.errors import ShapeMismatch
from dps.protocol.compression import updated
from dps.protocol.executor import offload
from dps.protocol.key_cache import digest_of, is_cached
from dps.protocol.messages import CopyId, Weights

Lists = dict[str, np.ndarray]  # of indices, by their digests


class Copy:
    """What a worker has of one shard. Used from one event loop.

    Arrays that it has given out stay as they are: each read makes a new buffer.
    """

    def __init__(self, layout: ShardLayout) -> None:
        self._layout = layout
        self._weights: Weights | None = None
        self._lists: Lists = {}  # of the last reply

    @property
    def has(self) -> CopyId | None:
        """The name of the copy; None: there is none, or pulls are not filtered."""
        return self._weights.copy if self._weights is not None else None

    async def whole(self, weights: Weights) -> Weights | None:
        """Return the weights that a reply makes; None if it is for another copy: ask again."""
        known, self._weights = self._weights, None
        if weights.since is not None:
            if known is None or known.copy != weights.since:
                return None
            work = partial(self._updated, known.values, weights, self._lists)
            values, self._lists = await offload(work, known.values.nbytes)
            weights = replace(weights, values=values, since=None, codec=())
        else:
            self._lists = {}
        self._weights = weights if weights.copy is not None else None
        return weights

    def _updated(self, values: np.ndarray, sent: Weights, had: Lists) -> tuple[np.ndarray, Lists]:
        """Return what was sent makes of the copy, and the lists of indices that it has.

        Those that the reply before `had` too are left out of what was sent.
        """
        number = UpdateId("", 0, sent.copy.number if sent.copy is not None else 0)
        op = Operation("gradient", number, gradient=sent.values, codec=sent.codec)
        sections = [_with_list(section, had) for section in taken_apart(op)]
        found = (section.keys for section in sections)
        lists = {digest_of(keys): keys.copy() for keys in found if is_cached(keys)}
        return updated(self._layout, values, assembled(op, sections)), lists


def _with_list(section: Section, had: Lists) -> Section:
    part = section.part
    if not part.cached:
        return section
    keys = had.get(part.cached)
    if keys is None:
        raise ShapeMismatch("weights were sent without a list of indices that is not here")
    return Section(replace(part, cached=""), keys, section.values)
