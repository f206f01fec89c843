"""Arguments that would have no effect are refused before anything is measured, or told once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import PlanError, SampleError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using
from shoal.optim.closure_loss import check_updated_everywhere
from shoal.profiling.identity import trainable_layers

CLUSTER = Cluster(Topology(("one", "other")), Link(1e-4, 1e8), 1.0)
PIPELINE = {"*": "pipeline"}


class Net(nn.Module):
    """A small model with a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.b(self.norm(self.a(x)).relu())
        return output


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1)


def lbfgs(model: nn.Module) -> Any:
    return torch.optim.LBFGS(model.parameters())


def parallelized(
    optimizer: Callable[[nn.Module], Any] = sgd, loss_fn: Any = F.cross_entropy, **how: Any
) -> Callable[[int], nn.Module]:
    def work(rank: int) -> nn.Module:
        torch.manual_seed(0)
        model = Net()
        sample = torch.randn(4, 8) + rank, torch.randint(4, (4,))
        shoal.parallelize(model, loss_fn, optimizer(model), **{"sample": sample, **how})
        return model

    return work


def on_ranks(work: Callable[[int], Any]) -> list[Any]:
    def on_rank(comm: ThreadComm) -> Any:
        with using(comm, CLUSTER):
            return work(comm.rank)

    return run(2, on_rank, timeout_s=20)


def told(caplog: pytest.LogCaptureFixture, word: str, work: Callable[[int], Any]) -> list[str]:
    """Run on two ranks, and return the lines with a word."""
    with caplog.at_level(logging.INFO, "shoal"):
        on_ranks(work)
    return [line for r in caplog.records if word in (line := r.getMessage())]


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a model is measured."""

    def measured(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was measured")

    monkeypatch.setattr("shoal.front.parallel_ranks.profile_model", measured)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "parts, pinned otherwise": (
        {"micro_batches": 2, "pins": {"a": "factor"}},
        'no layer can be in a pipeline\n(.*\n)*.*pins={"\\*": "pipeline"}',
    ),
    "parts, strategies without": (
        {"micro_batches": 4, "strategies": ["replicate"]},
        "micro_batches=4 has no effect",
    ),
    "column of a norm": ({"pins": {"norm": "column"}}, "column cannot serve layer norm.*LayerNorm"),
    "head of a norm": ({"pins": {"norm": "head"}}, "head cannot serve layer norm.*LayerNorm"),
    "pair of a norm": ({"pins": {"norm": "column_pair"}}, "cannot serve layer norm.*LayerNorm"),
    "LBFGS in a pipeline": (
        {"optimizer": lbfgs, "pins": PIPELINE},
        'LBFGS does not update a part.*all gradients\n(.*\n)*.*"replicate" or "factor"',
    ),
    "LBFGS of columns": (
        {"optimizer": lbfgs, "pins": {"b": "column"}},
        "column cannot serve layer b: LBFGS",
    ),
    "LBFGS of owners": (
        {"optimizer": lbfgs, "pins": {"*": "sliced"}},
        "sliced cannot serve.*LBFGS",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_before_anything_is_measured(case: str, unmeasured: None) -> None:
    how, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        on_ranks(parallelized(**how))


@pytest.mark.parametrize("way", ["replicate", "factor"])
def test_whole_layers_of_lbfgs_are_allowed(way: str) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    model[1].requires_grad_(False)
    names = [layer.name for layer in trainable_layers(model)]
    choices = tuple(shoal.Choice(name, way) for name in names)
    check_updated_everywhere([lbfgs(model)], model, shoal.Plan(2, "", choices, 1, 1))


def test_a_plan_keeps_its_own_number_of_parts() -> None:
    with using(ThreadComm()):
        model, sample = Net(), (torch.randn(4, 8), torch.randint(4, (4,)))
        plan = shoal.plan(
            model, F.cross_entropy, sgd(model), sample=sample, cluster=CLUSTER, pins=PIPELINE
        )
    with pytest.raises(PlanError, match="both a plan and micro_batches"):
        on_ranks(parallelized(plan=plan, micro_batches=4))


def test_parts_that_a_plan_does_not_use_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    lines = told(caplog, "micro_batches", parallelized(micro_batches=2))
    assert len(lines) == 1 and 'strategies=["pipeline"]' in lines[0]


def test_nothing_is_told_of_parts_that_are_used(caplog: pytest.LogCaptureFixture) -> None:
    assert not told(caplog, "micro_batches", parallelized(micro_batches=2, pins=PIPELINE))


def test_parameters_in_no_optimizer_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    work = parallelized(lambda model: sgd(model.a))  # type: ignore[attr-defined]
    (line,) = told(caplog, "no optimizer", work)
    assert line.startswith("4 parameters would train, but no optimizer has them: norm.weight")
    assert "requires_grad_(False)" in line


def test_a_loss_that_learns_nothing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Any, y: Any) -> Any:
            return F.cross_entropy(output * self.scale, y)

    (line,) = told(caplog, "no optimizer", lambda rank: parallelized(loss_fn=Scaled())(rank))
    assert "1 parameter would train" in line and "the loss's scale" in line


@pytest.mark.parametrize(
    "optimizer",
    [sgd, lambda model: [sgd(model.a), sgd(model.norm), sgd(model.b)]],
    ids=["one", "three"],
)
def test_nothing_is_told_where_all_are_trained(
    optimizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert not told(caplog, "no optimizer", parallelized(optimizer))


@pytest.mark.parametrize("sample", [torch.ones(4, 8), None], ids=["x", "none"])
def test_a_model_with_its_own_loss_is_told_the_form_of_its_sample(sample: Any) -> None:
    with pytest.raises(SampleError, match=r"write sample=\(x, None\)"):
        on_ranks(parallelized(loss_fn=None, sample=sample))


def test_before_the_first_batch_an_explanation_says_that_it_comes() -> None:
    def work(rank: int) -> list[str]:
        model = parallelized(
            loss_fn=None,
            compute_loss=lambda model, batch: model(batch).square().mean(),
            sample=None,
        )(rank)
        return [shoal.explain(model)]

    for (text,) in on_ranks(work):
        assert "measured and planned at its first batch" in text
