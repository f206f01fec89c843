"""Types of numbers and layouts in memory: half precision, channels last, sparse, transposed."""

from __future__ import annotations

import copy

import pytest
import torch
from one_process import (
    EVERY_RANK,
    Training,
    assert_same,
    built,
    cluster_of,
    features,
    integers,
    mlp,
    numbers,
    plain,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using

WAY = pytest.mark.parametrize("way", EVERY_RANK)


FORMATS = [torch.contiguous_format, torch.channels_last]


class Convolved(nn.Module):
    """Its norm stays in eval, where it trains its scale but not its statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = (
            nn.Conv2d(2, 5, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(5),
        )
        self.head = nn.Linear(5, 3)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x)), inplace=True).mean((2, 3)))


@pytest.mark.parametrize("layout", FORMATS, ids=str)
@WAY
def test_convolution_and_batch_norm(way, layout):
    model = built(Convolved).train().to(memory_format=layout)
    batches = [
        (numbers(12, 2, 7, 7, seed=s).contiguous(memory_format=layout), integers(3, 12, seed=s))
        for s in range(5)
    ]
    assert_same(Training(model=model, batches=batches), 3, way, uneven=True)


def fused(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, fused=True)


@pytest.mark.parametrize("looks", [False, True], ids=["unseen", "clipped by torch"])
@pytest.mark.parametrize("layout", FORMATS, ids=str)
@WAY
def test_a_fused_optimizer_takes_strides_for_granted(way, layout, looks):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            if looks:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    model = built(Convolved).train().to(memory_format=layout)
    batches = [(numbers(12, 2, 7, 7, seed=s), integers(3, 12, seed=s)) for s in range(5)]
    assert_same(Training(model=model, batches=batches, optimizer=fused, loop=loop), 3, way)


@WAY
def test_autocast_bfloat16(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()

    batches = [(x.float(), y) for x, y in features(7, 3)]
    assert_same(
        Training(model=built(mlp, torch.float32), batches=batches, loop=loop), 3, way, within=2e-2
    )


@WAY
def test_bfloat16_parameters(way):
    batches = [(x.bfloat16(), y) for x, y in features(7, 3)]
    assert_same(Training(model=built(mlp, torch.bfloat16), batches=batches), 3, way, within=5e-2)


@WAY
def test_parameters_of_two_types(way):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(7, 5).float(), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.body(x.float())).double())

    model = built(Mixed)
    model.body.float()
    assert_same(Training(model=model, batches=features(7, 3)), 3, way, within=1e-5)


def test_a_sparse_buffer_and_a_sparse_input_are_trained_with() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 3)
            self.register_buffer("adjacent", torch.eye(4).to_sparse())

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.sparse.mm(mask, torch.sparse.mm(self.adjacent, self.lin(x)))

    def work(comm: ThreadComm) -> Tensor:
        with using(comm, cluster_of(2)):
            model = copy.deepcopy(first)
            x = torch.full((4, 4), 1.0 + comm.rank), torch.eye(4).to_sparse()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, loss_fn, optimizer = shoal.parallelize(
                model, nn.MSELoss(), optimizer, sample=(x, torch.ones(4, 3))
            )
            plain(model, loss_fn, optimizer, [(x, torch.ones(4, 3))] * 2)
            return model.lin.weight.detach().clone()

    first = Graph()
    one, other = run(2, work)
    assert torch.equal(one, other)


@WAY
def test_a_gradient_that_comes_transposed(way):
    def loop(model, loss_fn, optimizer, batches):
        for x, _ in batches:
            optimizer.zero_grad()
            weights = numbers(5, 1).expand(5, len(x)).contiguous()
            (model(x).t() * weights).sum(0).mean().backward()
            optimizer.step()

    assert_same(
        Training(model=built(lambda: nn.Linear(7, 5)), batches=features(7, 3), loop=loop), 3, way
    )
