"""A model that is used and not trained: the same outputs as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import built, cluster_of, features, on_threads, rows_of
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm
from shoal.core.errors import UsageError
from shoal.front.session_start import using

X, Y = features(7, 3, steps=1)[0]


class Features(nn.Module):
    """Two outputs, of a network with statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {"hidden": hidden, "logits": self.head(hidden)}


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trainable"])
@pytest.mark.parametrize(
    "how",
    [{"pins": {"body.0": "column", "head": "row"}}, {"pins": {"*": "sliced"}}, {}],
    ids=["cut", "owned", "auto"],
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_it_gives_features(ranks: int, how: dict[str, Any], frozen: bool) -> None:
    expected = built(Features).eval()(X)

    def work(comm: ThreadComm) -> tuple[dict[str, Tensor], Any]:
        model = built(Features).requires_grad_(not frozen).eval()
        x = rows_of(X, comm.rank, ranks, True)
        with using(comm, cluster_of(ranks)):
            got, loss_fn, optimizer = shoal.parallelize(model, None, None, sample=(x, None), **how)
            assert got is model and loss_fn is None and optimizer is None
            assert shoal.is_parallelized(model) and not model.training
            assert all(p.requires_grad is not frozen for p in model.parameters())
            assert all(p.grad is None for p in model.parameters())
            with torch.no_grad():
                output = model(x)
            whole = {name: value.clone() for name, value in model.state_dict().items()}
            plan = shoal.plan_of(model)
            return output, whole, plan and {c.layer: c.strategy for c in plan.choices}

    own = built(Features).state_dict()
    outputs = on_threads(ranks, work)
    for name, tensor in expected.items():
        got = torch.cat([output[name] for output, _, _ in outputs])
        assert (got - tensor).abs().max() <= 1e-10
    assert all(torch.equal(own[name], value) for name, value in outputs[0][1].items())
    if ranks > 1 and "head" in how.get("pins", {}):
        assert outputs[0][2]["head"] == "row" and outputs[0][2]["body.0"] == "column"


def test_a_limit_of_memory_cuts_it() -> None:
    """It holds its part of the parameters alone, and is evaluated with its loss."""

    def large() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 400), nn.ReLU(), nn.Linear(400, 400), nn.Linear(400, 3))

    model = built(large)
    expected = F.cross_entropy(model(X), Y).detach()
    whole = sum(parameter.nbytes for parameter in model.parameters())

    def work(comm: ThreadComm) -> tuple[float, int]:
        model = built(large).requires_grad_(False)
        mine = rows_of((X, Y), comm.rank, 2)
        with using(comm, cluster_of(2)):
            model, loss_fn, _ = shoal.parallelize(
                model, nn.CrossEntropyLoss(), None, sample=mine, memory_limit=1.6 * whole
            )
            with torch.no_grad():
                loss = loss_fn(model(mine[0]), mine[1])
            return shoal.mean(loss, weight=len(mine[1])), shoal.memory(model).parameters

    for loss, held in on_threads(2, work):
        assert abs(float(loss) - float(expected)) <= 1e-10
        assert held < 0.6 * whole


def test_a_model_that_has_nothing_to_train_names_the_way() -> None:
    with using(ThreadComm()):
        model = nn.Linear(2, 2).requires_grad_(False)
        other = torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1)
        with pytest.raises(UsageError, match="give None for the optimizer"):
            shoal.parallelize(model, None, other, sample=(torch.ones(2, 2), None))


@pytest.mark.parametrize("way", ["replicate", "sliced", "factor", "column"])
def test_gradients_are_those_of_one_process_for_uneven_rows(way: str) -> None:
    alone = built(lambda: nn.Linear(7, 3))
    F.cross_entropy(alone(X), Y).backward()

    def work(comm: ThreadComm) -> Tensor | None:
        model, (x, y) = built(lambda: nn.Linear(7, 3)), rows_of((X, Y), comm.rank, 2, True)
        with using(comm, cluster_of(2)):
            model, loss_fn, _ = shoal.parallelize(
                model, F.cross_entropy, None, sample=(x, y), pins={"*": way}
            )
            loss_fn(model(x), y).backward()
            gradient: Tensor | None = model.weight.grad
            return gradient

    expected = alone.weight.grad
    assert expected is not None
    for gradient in on_threads(2, work):
        assert gradient is not None and (gradient - expected).abs().max() <= 1e-10
