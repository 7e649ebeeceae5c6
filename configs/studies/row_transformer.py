"""A small transformer that reads an image row by row."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from flows.workloads.base import DatasetShape


class RowTransformer(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Two layers of attention over the rows of a square image, and a linear layer on their mean.

    Parameters
    ----------
    shape
        Shape of the data: square images.
    width
        Size of the vectors that rows become.
    """

    def __init__(self, shape: DatasetShape, width: int = 64) -> None:
        super().__init__()
        self.side = math.isqrt(shape.features)
        self.embed = nn.Linear(self.side, width)
        self.position = nn.Parameter(0.02 * torch.randn(self.side, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape.classes)

    def forward(self, x: Any) -> Any:
        """Return a row of scores for each example."""
        rows = self.embed(x.unflatten(1, (self.side, self.side))) + self.position
        return self.head(self.norm(self.layers(rows).mean(dim=1)))
