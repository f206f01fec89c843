"""A compute_loss that is none, and what is said of it on every rank: before the first step, or in
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_cases import Case, batch, model, only, sgd, told
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer, SampleError, UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using


def good(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def given(compute_loss: Any, **options: Any) -> Callable[[int], dict[str, Any]]:
    return lambda rank: {"compute_loss": compute_loss, **options}


def computed(error: type[Exception], *said: str, compute_loss: Any, **options: Any) -> Case:
    return Case(error, said, loss=lambda rank: None, options=given(compute_loss, **options))


another = model()  # which nobody parallelises


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return good(model, batch) * self.scale


CASES = {
    "nothing": computed(
        SampleError, "returned no loss", "got: None", compute_loss=lambda model, batch: None
    ),
    "a number": computed(
        SampleError,
        "returned no loss",
        "return the loss, a scalar tensor",
        compute_loss=lambda model, batch: good(model, batch).item(),
    ),
    "a tuple without a loss": computed(
        SampleError,
        "returned no loss",
        "float32 (4, 3)",
        "(loss, anything)",
        compute_loss=lambda model, batch: (model(batch[0]), 1.0),
    ),
    "a dict without a loss": computed(
        SampleError,
        "returned no loss",
        "{losses: ",
        "(loss, anything)",
        compute_loss=lambda model, batch: {"losses": good(model, batch)},
    ),
    "a loss of each row": computed(
        SampleError,
        "shape (4,)",
        ".mean()",
        compute_loss=lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"),
    ),
    "a detached loss": computed(
        SampleError,
        "does not depend on any trainable parameter",
        "detach()",
        compute_loss=lambda model, batch: good(model, batch).detach(),
    ),
    "a loss of another model": computed(
        SampleError,
        "does not depend on any trainable parameter of the model",
        "hands to compute_loss",
        compute_loss=lambda model, batch: good(another, batch),
    ),
    "an error in it": computed(
        SampleError,
        "compute_loss fails on the sample",
        "KeyError: 'labels'",
        "got: batch = (float32 (4, 6) on cpu, int64 (4,) on cpu)",
        compute_loss=lambda model, batch: {}["labels"],
    ),
    "a number in place of it": computed(
        UsageError, "compute_loss is not callable", "int", compute_loss=4
    ),
    "a class": computed(UsageError, "compute_loss is a class", compute_loss=nn.CrossEntropyLoss),
    "a function of the batch alone": computed(
        UsageError, "takes other arguments", "(model, batch)", compute_loss=lambda batch: None
    ),
    "a function of more": computed(
        UsageError,
        "takes other arguments",
        "'index'",
        "sample=(x, y)",
        compute_loss=lambda m, b, index: None,
        sample={"x": torch.ones(4, 6)},
    ),
    "both": Case(
        UsageError,
        ("both a loss_fn and a compute_loss", "None for loss_fn"),
        options=given(good),
    ),
    "one that learns": computed(UsageError, "parameter scale of the loss", compute_loss=Scaled()),
    "a batch without rows": computed(
        SampleError,
        "the sample has no rows",
        compute_loss=lambda m, b: m(b["x"]).sum(),
        sample={"x": torch.ones(0, 6)},
    ),
    "a batch without tensors": computed(
        SampleError,
        "nobody can tell how many rows",
        "{seed: 3}",
        "count=lambda batch",
        compute_loss=lambda m, b: m(torch.ones(b["seed"], 6)).mean(),
        sample={"seed": 3},
    ),
    "a batch of unlike tensors": computed(
        SampleError,
        "nobody can tell how many rows",
        "count=lambda batch",
        compute_loss=lambda m, b: (m(b["x"]) @ m(b["other"]).T).logsumexp((0, 1)),
        sample={"x": torch.eye(4, 6), "other": torch.eye(5, 6)},
    ),
    "a count of two": computed(
        UsageError,
        "count gives no number",
        "len(batch)",
        compute_loss=good,
        count=lambda batch: torch.ones(2),
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_rank_hears_what_is_wrong(case: Case) -> None:
    for error in told(case, ranks=2):
        assert type(error) is case.error, error
        for words in case.said:
            assert words in str(error)


def test_a_rank_without_it_is_named() -> None:
    case = Case(
        RanksDiffer,
        ("compute_loss", "rank 1"),
        loss=only(1, nn.CrossEntropyLoss(), None),
        options=lambda rank: {"compute_loss": only(1, None, good)(rank)},
    )
    for error in told(case):
        assert type(error) is case.error
        for words in case.said:
            assert words in str(error)


def in_a_step(change: Callable[..., Any]) -> list[str]:
    """What each of two ranks is told as it makes a step, having parallelised."""

    def work(comm: ThreadComm) -> str:
        with using(comm, Cluster(Topology(("host",) * 2), Link(1e-4, 1e8))):
            own = model()
            before = [parameter.clone() for parameter in own.parameters()]
            optimizer = sgd(own.parameters())
            own, computes, optimizer = shoal.parallelize(
                own, None, optimizer, sample=batch(comm.rank), compute_loss=good
            )
            with pytest.raises(UsageError) as caught:
                change(own, computes, batch(comm.rank))
            computes(own, batch(comm.rank)).backward()  # an error leaves nothing behind
            optimizer.step()
            assert not torch.equal(before[-1], list(own.parameters())[-1])
            return str(caught.value)

    return run(2, work, timeout_s=20)


def test_another_model_in_a_step() -> None:
    for said in in_a_step(lambda own, computes, batch: computes(another, batch)):
        assert "another model than the one that was parallelised" in said


def test_a_loss_that_is_kept_for_a_second_model() -> None:
    def again(own: nn.Module, computes: Any, batch: Any) -> None:
        other = model()
        shoal.parallelize(other, None, sgd(other.parameters()), sample=batch, compute_loss=computes)

    for said in in_a_step(again):
        assert "counted for another model already" in said
