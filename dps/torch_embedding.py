"""Embeddings of torch whose rows are in sparse tables on the servers.

`Embedding` reads the rows of a batch in `forward`, and collects their gradients in `backward`.
`dps.torch.Replica` pushes these beside those of the module's parameters, as one update.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from dps.core.ranges import refused
from dps.core.tables.table import SparseSpec
from dps.errors import ConfigurationError

Tensor = Any


class Embedding(torch.nn.Module):
    """A lookup table like `torch.nn.Embedding`, with rows in a sparse table of the servers.

    `dps.torch.attach` connects the embeddings of a module to its worker. The module has no
    parameters, so `state_dict` has no rows. Not thread-safe.

    Parameters
    ----------
    spec
        The sparse table, which the parameter server has in `tables`.
    padding_idx
        A key, perhaps negative, that reads as zeros and gets no gradient; None: there is none.

    Attributes
    ----------
    source
        A `Worker` or a `ParameterServer`, from which rows are read; None: not connected.

    Examples
    --------
    >>> import torch
    >>> users = Embedding(SparseSpec("users", width=2), padding_idx=-1)
    >>> with dps.testing.VirtualCluster() as cluster:
    ...     with ParameterServer(cluster, {}, tables=[users.spec]) as ps:
    ...         users.source = ps
    ...         users(torch.tensor([[7, -1, 7]])).shape
    torch.Size([1, 3, 2])
    """

    def __init__(self, spec: SparseSpec, padding_idx: int | None = None) -> None:
        super().__init__()
        if not isinstance(spec, SparseSpec):
            raise refused("spec", spec, "a dps.SparseSpec")
        self.spec, self.padding_idx = spec, padding_idx
        self.source: Any = None
        self.touched: dict[Tensor, np.ndarray] = {}  # rows with a gradient, and their keys

    def forward(self, keys: Tensor) -> Tensor:
        """Return the rows of integer keys of any shape: (*keys.shape, width), on their device.

        Each call is a round trip. Errors as for `Worker.pull_rows`, and `ConfigurationError` if the
        embedding is not connected.
        """
        if self.source is None:
            raise ConfigurationError(
                f"the embedding of table {self.spec.name!r} is not connected: call "
                "dps.torch.attach, or set its source to the ParameterServer"
            )
        real = ... if self.padding_idx is None else keys != self.padding_idx
        unique, at = torch.unique(keys[real], return_inverse=True)
        wanted = unique.cpu().numpy()
        rows = torch.from_numpy(self.source.pull_rows(self.spec.name, wanted)).to(keys.device)
        if torch.is_grad_enabled():
            rows.requires_grad_().register_post_accumulate_grad_hook(
                lambda leaf: self.touched.update({leaf: wanted})
            )
        out = rows.new_zeros((*keys.shape, self.spec.width))
        out[real] = functional.embedding(at, rows)
        return out

    def drop_gradients(self) -> None:
        """Drop the gradients of rows."""
        for leaf in self.touched:
            leaf.grad = None
        self.touched.clear()

    def extra_repr(self) -> str:
        """Return the settings, for the repr of a module."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.spec.name!r}, width={self.spec.width}{padding}"


def embeddings(module: Any) -> list[Embedding]:
    """Return the embeddings of a module, such as for `tables` or to set their `source`."""
    return [each for each in module.modules() if isinstance(each, Embedding)]


def gradients(found: Iterable[Embedding]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the gradients of rows since `drop_gradients`, as `Worker.push` takes them."""
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for each in found:
        pairs = [(k, leaf.grad.cpu().numpy()) for leaf, k in each.touched.items()]
        parts.setdefault(each.spec.name, []).extend(pairs)
    return {
        table: (np.concatenate([k for k, _ in pairs]), np.concatenate([g for _, g in pairs]))
        for table, pairs in parts.items()
        if pairs
    }


def connect(module: Any, worker: Any) -> list[Embedding]:
    """Make the embeddings of a module read from a worker; return them."""
    found = embeddings(module)
    for each in found:
        own, there = each.spec, worker.layout.shards[0].table(each.spec.name)
        if (own.width, own.dtype) != (there.width, there.dtype):
            raise ConfigurationError(
                f"the embedding of table {own.name!r} has rows {own.dtype}[{own.width}], and the "
                f"parameter server {there.dtype}[{there.width}]; expected tables=[embedding.spec]"
            )
        each.source = worker
    return found
