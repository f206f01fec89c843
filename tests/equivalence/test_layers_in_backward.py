"""Autograd functions that call layers again in their own backward: adjoints, reversible blocks and
fixed points.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import CUTS, Training, assert_same, built, features, integers
from torch import Tensor, nn

from shoal.core.errors import UsageError


class Adjoint(torch.autograd.Function):
    """Euler steps of dy/dt = f(y). Backward returns the gradients of f's parameters."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.f, ctx.parameters, values = f, parameters, [y]
        with torch.no_grad():
            for _ in range(3):
                values.append(values[-1] + 0.25 * f(values[-1]))
        ctx.save_for_backward(*values)
        return values[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        totals = [torch.zeros_like(p) for p in ctx.parameters]
        for y in reversed(ctx.saved_tensors[:-1]):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                out = y + 0.25 * ctx.f(y)
                grad, *own = torch.autograd.grad(out, [y, *ctx.parameters], grad)
            totals = [total + more for total, more in zip(totals, own, strict=True)]
        return None, grad, *totals


class Reversible(torch.autograd.Function):
    """x + f(x). Backward runs a backward of its own."""

    @staticmethod
    def forward(ctx: Any, f: nn.Module, x: Tensor) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + f(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(x + ctx.f(x), grad)
        return None, x.grad


class Rows(torch.autograd.Function):
    """Rows of an embedding, and the gradient of its table."""

    @staticmethod
    def forward(ctx: Any, table: nn.Embedding, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.table, ctx.ids = table, ids
        with torch.no_grad():
            return table(ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            return None, None, *torch.autograd.grad(ctx.table(ctx.ids), [ctx.table.weight], grad)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 6), nn.Linear(6, 3)
        self.f = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


class OfAdjoint(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Adjoint.apply(self.f, self.a(x), *self.f.parameters()))


class AlsoOutside(Net):
    """The adjoint's layers are called in forward, too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(Adjoint.apply(self.f, h, *self.f.parameters()) + self.f(h))


class OfReversible(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Reversible.apply(self.f, self.a(x)))


class FixedPoint(Net):
    """A deep equilibrium: backward solves for the gradient at the fixed point."""

    def forward(self, x: Tensor) -> Tensor:
        u = self.a(x)
        with torch.no_grad():
            z = torch.zeros_like(u)
            for _ in range(20):
                z = self._step(z, u)
        z = self._step(z, u)
        if z.requires_grad:
            before = z.detach().requires_grad_()
            again = self._step(before, u)

            def solve(grad: Tensor) -> Tensor:
                solved = grad
                for _ in range(20):
                    solved = grad + torch.autograd.grad(again, before, solved, retain_graph=True)[0]
                return solved

            z.register_hook(solve)
        return self.b(z)

    def _step(self, z: Tensor, u: Tensor) -> Tensor:
        return 0.3 * torch.tanh(self.f(z) + u)


class OfRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.b = nn.Embedding(9, 6, padding_idx=2), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.b(Rows.apply(self.e, ids, self.e.weight).mean(1))


EVERYWHERE = [OfReversible, FixedPoint]
CALLING = [OfAdjoint, AlsoOutside, *EVERYWHERE]


def checked(kind: type[nn.Module], way: str, batches: Any) -> None:
    assert_same(Training(model=built(kind), batches=batches), 3, way, uneven=True)


@pytest.mark.parametrize("way", ["replicate", "sliced", "factor"])
@pytest.mark.parametrize("kind", CALLING)
def test_layers_that_are_called_in_backward(kind, way):
    checked(kind, way, features(7, 3))


@pytest.mark.parametrize("way", CUTS)
@pytest.mark.parametrize("kind", EVERYWHERE)
def test_cut_layers_that_are_called_in_backward(kind, way):
    checked(kind, way, features(7, 3))


@pytest.mark.parametrize("way", ["replicate", "factor"])
def test_an_embedding_whose_table_is_asked_for_in_backward(way):
    ids = [(integers(9, 12 * 4).view(12, 4), y) for _, y in features(7, 3)]
    checked(OfRows, way, ids)


@pytest.mark.parametrize("way", CUTS)
def test_a_part_of_a_gradient_is_refused_by_the_name_of_its_layer(way):
    words = r'pins=\{"f\.[02]": "replicate"\}'
    with pytest.raises(UsageError, match=words) as caught:
        Training(model=built(OfAdjoint), batches=features(7, 3)).on_ranks(2, way)
    assert "where: layer f." in str(caught.value)
