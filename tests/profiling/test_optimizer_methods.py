"""Methods of an optimizer besides step: those that use its state keep it whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using
from shoal.profiling.updates import whole_updates


class Averaged(Optimizer):
    """SGD that keeps a mean of the weights."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "shown": False})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                    self.state[p].setdefault("mean", p.clone()).lerp_(p, 0.5)

    def _swap(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].get("mean")
                if mean is not None:
                    kept = p.detach().clone()
                    p.data.copy_(mean)
                    mean.copy_(kept)


class ScheduleFree(Averaged):
    """As schedule-free ones: eval() shows the mean, train() goes back."""

    @torch.no_grad()
    def eval(self) -> None:
        self._swap()

    @torch.no_grad()
    def train(self) -> None:
        self._swap()


class SwapsByArgument(Averaged):
    def swap(self, really: bool) -> None:
        if really:
            self._swap()


class Restarts(Averaged):
    def restart(self) -> None:
        self.state.clear()


class Replaces(Averaged):
    def forget(self) -> None:
        self.__dict__["state"] = type(self.state)(dict)


def unmarked(function: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*args: Any) -> Any:
        return function(*args)

    return inner


class Decorated(Averaged):
    @unmarked
    def show(self) -> None:
        self._swap()


class Reports(Averaged):
    @functools.cache  # noqa: B019
    def _nothing(self) -> None: ...

    def norm(self) -> float:
        return sum(float(state["mean"].norm()) for state in self.state.values())


class SetsRate(Averaged):
    """Nothing of the state: it may be served in pieces."""

    def set_rate(self, rate: float) -> None:
        for group in self.param_groups:
            group["lr"] = rate

    def warm(self) -> float:
        return max(group["lr"] for group in self.param_groups)


class InParts(Optimizer):
    """Its step calls methods of its own, as pytorch_optimizer's do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def init_group(self, group: dict[str, Any], **kwargs: Any) -> None:
        for p in group["params"]:
            if p.grad is not None:
                self.state[p].setdefault("mean", torch.zeros_like(p))

    def update(self, p: Tensor, lr: float) -> None:
        p.sub_(self.state[p]["mean"].lerp_(p.grad, 0.5), alpha=lr)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            self.init_group(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group["lr"])


class ByHandToo(Averaged):
    """Its step calls a method that a program may call by itself."""

    def show(self) -> None:
        self._swap()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.show()
        self.show()


NEED = {
    ByHandToo: "ByHandToo.show()",
    ScheduleFree: "ScheduleFree.eval(), ScheduleFree.train()",
    SwapsByArgument: "SwapsByArgument.swap()",
    Restarts: "Restarts.restart()",
    Replaces: "Replaces.forget()",
    Decorated: "Decorated.show()",
    Reports: "Reports.norm()",
}


def reasons(kind: type[Optimizer]) -> str:
    parameter = nn.Parameter(torch.ones(3, 2))
    found = whole_updates([parameter], [kind([parameter])])  # type: ignore[call-arg]
    return found[parameter].joint if parameter in found else ""


@pytest.mark.quick
@pytest.mark.parametrize("kind", NEED)
def test_a_method_that_uses_the_state_keeps_it_whole(kind: type[Optimizer]) -> None:
    assert reasons(kind) == f"{NEED[kind]} would not find the state that it uses"


@pytest.mark.quick
@pytest.mark.parametrize(
    "kind", [Averaged, SetsRate, InParts, torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam]
)
def test_others_may_be_served_in_pieces(kind: type[Optimizer]) -> None:
    assert reasons(kind) == ""


def trained(pins: dict[str, str] | None, ranks: int) -> list[list[Tensor]]:
    """Parameters as eval() shows them, and as train() gives them back."""

    def work(comm: ThreadComm) -> list[Tensor]:
        hosts = tuple(f"h{rank}" for rank in range(comm.size))
        with using(comm, Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)):
            model = nn.Linear(6, 3).double()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
            optimizer = ScheduleFree(model.parameters())
            x = torch.arange(48.0, dtype=torch.float64).reshape(8, 6).sin()
            own = x[comm.rank :: comm.size]
            y = torch.zeros(len(own), 3, dtype=torch.float64)
            loss = nn.MSELoss()
            shoal.parallelize(model, loss, optimizer, sample=(own, y), pins=pins)
            for _ in range(4):
                optimizer.zero_grad()
                loss(model(own), y).backward()
                optimizer.step()
            optimizer.eval()
            shown = [parameter.detach().clone() for parameter in model.parameters()]
            optimizer.train()
            return shown + [parameter.detach().clone() for parameter in model.parameters()]

    return run(ranks, work, timeout_s=20)


@pytest.mark.parametrize("pins", [None, {"*": "replicate"}, {"*": "factor"}])
def test_where_the_state_is_whole_they_do_as_in_one_process(pins: dict[str, str] | None) -> None:
    (alone,) = trained(None, 1)
    assert not torch.equal(alone[0], alone[2]), "eval() shows other weights"
    for found in trained(pins, 2):
        for got, expected in zip(found, alone, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("way", ["sliced", "row", "column"])
def test_a_pin_that_would_part_the_state_is_refused_with_the_reason(way: str) -> None:
    with pytest.raises(UsageError, match=r"ScheduleFree\.eval\(\)"):
        trained({"*": way}, 2)
