"""Sparse gradients are seen in the sample, with their rows; a module that it leaves out says it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.threads import ThreadComm
from shoal.core.facts import LayerProfile
from shoal.profiling.layers import profile_model
from shoal.profiling.sparse import SparseFacts

# torch's own optimizers make sparse tensors so
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(100, 5, sparse=True)
        self.plain = nn.EmbeddingBag(100, 5)
        self.tied = nn.Embedding(3, 5, sparse=True)
        self.unused = nn.EmbeddingBag(100, 5, sparse=True)
        self.rows = nn.Parameter(torch.ones(100, 5))

    def forward(self, ids: Tensor) -> Tensor:
        own = F.embedding(ids, self.rows, sparse=True).sum(1)
        out = self.bags(ids) + self.plain(ids) + self.tied(ids % 3).sum(1) + own
        return out @ self.tied.weight.t()


def profile() -> dict[str, LayerProfile]:
    ids, y = torch.tensor([[1, 2, 2], [4, 1, 99]]), torch.tensor([0, 2])
    optimizer = torch.optim.SparseAdam([nn.Parameter(torch.ones(2, 2))])
    model = Tables()
    found = profile_model(model, F.cross_entropy, [optimizer], (ids, y), ThreadComm())
    assert all(parameter.grad is None for parameter in model.parameters())
    return {layer.name: layer for layer in found.layers}


def test_which_gradients_are_sparse() -> None:
    layers = profile()
    sparse = {name for name, layer in layers.items() if layer.parameters[0].sparse}
    assert sparse == {"bags", "unused", "(model)"}  # that of "tied" is dense


def test_their_rows_each_once() -> None:
    layers = profile()
    rows = {name: layer.measured(SparseFacts).rows for name, layer in layers.items()}
    assert rows == {"bags": 4, "(model)": 4, "unused": 0, "plain": 0, "tied": 0}
    assert layers["bags"].measured(SparseFacts).row_s > 0
