"""Embeddings over sparse tables, trained beside `torch.nn.Embedding`, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import dps
from dps import SGD, Normal, ParameterServer, SparseSpec, Worker
from dps.errors import ConfigurationError, ShapeMismatch
from dps.testing import VirtualCluster
from tests.cluster.node.test_torch_device import on_device
from tests.support.needs_torch import needs_torch

pytestmark = needs_torch

RATE, STEPS, WORDS, PAD = 0.1, 6, 20, 3
START = np.random.default_rng(0).normal(size=(WORDS, 4)).astype(np.float32)
START[PAD] = 0
WORD = SparseSpec("word", 4, initial=START)
TABLES = [WORD, SparseSpec("tag", 3, "float64", initial=Normal(0.5))]


def network(word: Any, tag: Any) -> Any:
    """One embedding is used twice, and keys are repeated."""
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.word, self.tag = word, tag
            torch.manual_seed(0)
            self.out = nn.Linear(11, 1)

        def forward(self, words: Any, tags: Any) -> Any:
            left, right = self.word(words[:, 0]), self.word(words[:, 1:]).sum(1)
            return self.out(torch.cat([left, right, self.tag(tags).float()], 1))

    return Network()


def over_tables() -> Any:
    return network(dps.torch.Embedding(WORD, PAD), dps.torch.Embedding(TABLES[1]))


def loss(module: Any, step: int) -> Any:
    import torch

    random = np.random.default_rng(step)
    words = torch.tensor(random.integers(WORDS, size=(8, 5)))
    return module(words, torch.tensor(random.integers(6, size=8))).square().mean()


def by_torch() -> Any:
    import torch

    tags = torch.from_numpy(TABLES[1].initial_rows(np.arange(6)))
    word = torch.nn.Embedding(WORDS, 4, PAD, _weight=torch.tensor(START), sparse=True)
    module = network(word, torch.nn.Embedding(6, 3, _weight=tags, sparse=True))
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(module, step).backward()
        optimizer.step()
    return module.state_dict()


def train(worker: Worker) -> None:
    """Half of each gradient is from a second backward, and one evaluation has no gradient."""
    import torch

    module = over_tables()
    with dps.torch.attach(worker, module) as replica:
        for step in range(STEPS):
            with torch.no_grad():
                loss(module, step + 1)
            (loss(module, step) / 2).backward()
            (loss(module, step) / 2).backward()
            replica.step()


def train_scaled(worker: Worker) -> None:
    """A scaler skips a step whose gradient is too large."""
    import torch

    module = over_tables()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with dps.torch.attach(worker, module) as replica:
        for step in [0, *range(STEPS)]:
            factor = 1e38 if scaler.get_scale() == 1024.0 else 1.0
            scaler.scale(factor * loss(module, step)).backward()
            scaler.step(replica)
            scaler.update()
            replica.zero_grad()


@pytest.mark.parametrize("each", [train, train_scaled, partial(on_device, train)])
def test_rows_and_parameters_are_trained_as_by_torch(each: Callable[[Worker], None]) -> None:
    start = dps.torch.parameters(over_tables())
    assert start.keys() == {"out.weight", "out.bias"}
    with (
        VirtualCluster(servers=2) as cluster,
        ParameterServer(cluster, start, tables=TABLES, shards=2, optimizer=SGD(RATE)) as ps,
    ):
        assert "parameters=12 and the rows of tables" in repr(ps)
        cluster.gather(ps.run(each, workers=1))
        expected = by_torch()
        for name, array in ps.pull().items():
            np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6)
        for table, count in ("word", WORDS), ("tag", 6):
            rows = ps.pull_rows(table, np.arange(count))
            np.testing.assert_allclose(rows, expected[f"{table}.weight"], rtol=1e-5, atol=1e-6)
        assert {reply.version for reply in ps.audit() if reply} == {STEPS}  # one update a step
        module = over_tables()
        for embedding in dps.torch.embeddings(module):
            embedding.source = ps
        module.load_state_dict(dps.torch.state_dict(module, ps.pull()))
        reference = network(torch_embedding(expected, "word"), torch_embedding(expected, "tag"))
        reference.load_state_dict(expected)
        assert loss(module, 9).item() == pytest.approx(loss(reference, 9).item(), rel=1e-5)
    assert np.abs(rows - TABLES[1].initial_rows(np.arange(6))).max() > 0.001


def torch_embedding(state: Any, name: str) -> Any:
    import torch

    return torch.nn.Embedding.from_pretrained(state[f"{name}.weight"])


def refused(specs: list[SparseSpec], rule: Any, train: Callable[[Worker], None]) -> None:
    start = dps.torch.parameters(over_tables())
    with (
        VirtualCluster() as cluster,
        ParameterServer(cluster, start, tables=specs, optimizer=rule) as ps,
    ):
        cluster.gather(ps.run(train, workers=1))


def with_inner(worker: Worker) -> None:
    import torch

    dps.torch.attach(worker, over_tables(), inner=partial(torch.optim.SGD, lr=RATE))


def test_what_is_refused() -> None:
    import torch

    with pytest.raises(ConfigurationError, match="not connected"):
        over_tables().tag(torch.tensor([1]))
    with pytest.raises(ConfigurationError, match=r"rows float32\[4\].* server float32\[5\]"):
        refused([SparseSpec("word", 5), TABLES[1]], SGD(RATE), train)
    with pytest.raises(ShapeMismatch, match="no sparse table is named 'tag'"):
        refused([WORD], SGD(RATE), train)
    with pytest.raises(ConfigurationError, match="inner"):
        refused(TABLES, SGD(RATE), with_inner)
    with pytest.raises(ConfigurationError, match="Clipped cannot clip rows"):
        refused(TABLES, dps.Clipped(SGD(RATE), 1.0), partial(on_device, train))
