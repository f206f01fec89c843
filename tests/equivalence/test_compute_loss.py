"""A function that computes the loss of a batch: under every strategy as in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from one_process import (
    ALL_CUTS,
    AMONG_WORKERS,
    BUCKETED,
    CUTS,
    OTHERS,
    UNEVEN,
    WAYS,
    Training,
    assert_same,
    built,
    cluster_of,
    features,
    integers,
    mlp,
    numbers,
    rows_of,
    sgd,
)
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using


class Tagger(nn.Module):
    """Tokens to a class for each token, by a layer of every kind that matters, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7, padding_idx=0)
        self.mix = nn.Conv1d(7, 5, 3, padding=1, bias=False)
        self.norm = nn.LayerNorm(5)
        self.hidden = nn.Linear(5, 9, bias=False)
        self.widen, self.narrow = nn.Linear(9, 11), nn.Linear(11, 9, bias=False)
        self.head = nn.Linear(9, 5)

    def forward(self, ids: Tensor) -> Tensor:
        h = F.relu(self.mix(self.embed(ids).transpose(1, 2))).transpose(1, 2)
        h = torch.tanh(self.hidden(self.norm(h)))
        return self.head(h + self.narrow(F.gelu(self.widen(h))))


def texts() -> list[dict[str, Tensor]]:
    """Batches as trainers of language models have them: a third of the labels is ignored."""
    batches = []
    for step in range(6):
        labels = integers(5, 12, 5, seed=step)
        ignored = integers(3, 12, 5, seed=step + 20) == 0
        batches.append(
            {
                "input_ids": integers(13, 12, 5, seed=step + 40),
                "labels": labels.masked_fill(ignored, -100),
            }
        )
    return batches


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As trainers compute it, which take the labels out of the batch."""
    labels = batch.pop("labels")
    logits = model(batch["input_ids"])
    batch["labels"] = labels
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def num_labels(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def plain(model: Any, compute_loss: Any, optimizer: Any, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        compute_loss(model, batch).backward()
        optimizer.step()


def accumulated(model: Any, compute_loss: Any, optimizer: Any, batches: Any) -> None:
    """Every second backward sends for two."""
    quiet = getattr(optimizer, "accumulate", nullcontext)
    for number, batch in enumerate(batches):
        with nullcontext() if number % 2 else quiet():
            compute_loss(model, batch).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


LOOPS: dict[str, Callable[..., None]] = {"plain": plain, "accumulated": accumulated}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
# a pipeline serves a compute_loss that takes the model's own loss: tests/pipeline/
@pytest.mark.parametrize("way", [w for w in (*BUCKETED, *OTHERS, *ALL_CUTS) if w != "pipeline"])
def test_a_token_loss_that_is_counted(way: str, ranks: int, loop: str) -> None:
    training = Training(
        model=built(Tagger),
        batches=texts(),
        loss_fn=None,
        compute_loss=token_loss,
        count=num_labels,
        loop=LOOPS[loop],
    )
    assert_same(training, ranks, way, uneven=True)


@dataclass(frozen=True)
class Pictures:
    """A batch of a class of the user's own."""

    name: str
    x: Tensor
    y: Tensor


def of_pair(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


FORMS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "tuple": (lambda x, y: (x, y), of_pair),
    "list": (lambda x, y: [x, y], of_pair),
    "dict": (
        lambda x, y: {"name": "pictures", "x": x, "y": y},
        lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
    ),
    "dataclass": (
        lambda x, y: Pictures("pictures", x, y),
        lambda model, batch: F.cross_entropy(model(batch.x), batch.y),
    ),
    "tensor": (lambda x, y: x, lambda model, batch: model(batch).square().mean()),
}


@UNEVEN
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", [*WAYS, *CUTS])
def test_a_batch_of_every_form(way: str, form: str, uneven: bool) -> None:
    make, compute_loss = FORMS[form]
    training = Training(
        model=built(mlp),
        batches=[make(x, y) for x, y in features(7, 3)],
        loss_fn=None,
        compute_loss=compute_loss,
        loop=plain,
    )
    assert_same(training, 3, way, uneven=uneven)


class Keeping(nn.Module):
    """Two layers, and what the first one gives kept for later."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.balance = hidden.square().mean()
        return self.second(hidden)


def by_modules(model: Any, batch: Any) -> Tensor:
    """As a training_step does, which calls parts of its module and never the module."""
    x, y = batch
    return F.cross_entropy(model.second(torch.tanh(model.first(x))), y)


def by_forward(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model.forward(batch[0]), batch[1])


def twice(model: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y) + (model(x.flip(1)) - model(x)).square().mean()


def kept(model: Any, batch: Any) -> Tensor:
    return of_pair(model, batch) + 3 * model.balance


def penalised(model: Any, batch: Any) -> Tensor:
    return of_pair(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


def summed(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 10


class OfModule(nn.Module):
    """A module that computes the loss."""

    def forward(self, model: Any, batch: Any) -> Tensor:
        return of_pair(model, batch)


USES: dict[str, Callable[..., Tensor]] = {
    "by modules": by_modules,
    "by forward": by_forward,
    "twice": twice,
    "kept": kept,
    "summed": summed,
    "a module": OfModule(),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_whatever_it_does_with_the_model(way: str, use: str, loop: str) -> None:
    training = Training(
        model=built(Keeping),
        batches=features(7, 3, steps=6),
        loss_fn=None,
        compute_loss=USES[use],
        loop=LOOPS[loop],
    )
    assert_same(training, 3, way, uneven=True)


def beside(model: Any, compute_loss: Any, optimizer: Any, batches: Any) -> None:
    """What is added to the loss, and the loss of another batch."""
    for batch, other in zip(batches, reversed(batches), strict=True):
        optimizer.zero_grad()
        loss = compute_loss(model, batch) + compute_loss(model, other)
        (loss + 0.1 * model.first.weight.square().sum()).backward()
        optimizer.step()


@pytest.mark.parametrize("count", [None, lambda batch: 2 * len(batch[0])], ids=["rows", "count"])
@pytest.mark.parametrize("way", [*AMONG_WORKERS, *CUTS])
def test_what_is_beside_it_in_one_backward(way: str, count: Any) -> None:
    training = Training(
        model=built(Keeping),
        batches=[*features(7, 3, steps=2, rows=9), *features(7, 3, steps=2, rows=23)],
        loss_fn=None,
        compute_loss=by_modules,
        count=count,
        loop=beside,
    )
    assert_same(training, 3, way, uneven=True)


def gradient_penalty(model: Any, batch: Any) -> Tensor:
    x, y = batch
    x = x.detach().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return F.cross_entropy(output, y) + slope.square().mean()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("way", "penalty"),
    [
        *((way, gradient_penalty) for way in AMONG_WORKERS),
        *((way, penalised) for way in BUCKETED),
    ],
)
def test_a_penalty_in_it(way: str, penalty: Any, loop: str) -> None:
    training = Training(
        model=built(Keeping),
        batches=features(7, 3, steps=6),
        loss_fn=None,
        compute_loss=penalty,
        loop=LOOPS[loop],
    )
    assert_same(training, 3, way, uneven=True)


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(13, 5, sparse=sparse), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.table(ids)).mean(1))


@dataclass(frozen=True, kw_only=True)
class OfTable(Training):
    """With the table served one way, and the head another."""

    table: str = "sparse"

    def pins_of(self, way: str, ranks: int) -> dict[str, str]:
        return {"table": self.table, "head": "replicate"}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("table", ["sparse", "server_rows"])
def test_tables(table: str, loop: str) -> None:
    training = OfTable(
        model=built(lambda: Words(sparse=table == "sparse")),
        batches=[(integers(13, 12, 4, seed=s), integers(3, 12, seed=s)) for s in range(6)],
        loss_fn=None,
        compute_loss=of_pair,
        loop=LOOPS[loop],
        table=table,
    )
    assert_same(training, 3, table, uneven=True)


def test_one_rank_evaluates_alone() -> None:
    def work(comm: ThreadComm) -> float:
        model = built(mlp)
        (batch,) = features(7, 3, steps=1)
        with using(comm, cluster_of(2)):
            model, computes, _ = shoal.parallelize(
                model,
                None,
                sgd(model.parameters()),
                sample=rows_of(batch, comm.rank, 2),
                compute_loss=of_pair,
            )
            assert computes.__name__ == "of_pair"
            with torch.no_grad():
                return 0.0 if comm.rank else float(computes(model, batch))

    expected = of_pair(built(mlp), features(7, 3, steps=1)[0])
    assert run(2, work, timeout_s=20)[0] == pytest.approx(float(expected.detach()), abs=1e-12)


def test_what_is_undone_is_the_users_own_again() -> None:
    def work(comm: ThreadComm) -> Any:
        model = built(mlp)
        batch = rows_of(features(7, 3, steps=1)[0], comm.rank, 2)
        with using(comm, cluster_of(2)):
            _, computes, _ = shoal.parallelize(
                model, None, sgd(model.parameters()), sample=batch, compute_loss=of_pair
            )
            shoal.unparallelize(model)
            computes(model, batch).backward()
            own = built(mlp)
            of_pair(own, batch).backward()
            pairs = zip(model.parameters(), own.parameters(), strict=True)
            return all(torch.equal(a.grad, b.grad) for a, b in pairs)

    assert run(2, work, timeout_s=20) == [True, True]


def test_a_backward_of_another_loss_is_warned_of() -> None:
    def work(comm: ThreadComm) -> None:
        model = built(mlp)
        batch = rows_of(features(7, 3, steps=1)[0], comm.rank, 2)
        with using(comm, cluster_of(2)):
            shoal.parallelize(
                model,
                None,
                sgd(model.parameters()),
                sample=batch,
                compute_loss=of_pair,
                count=lambda batch: 3 * len(batch[0]),
            )
            of_pair(model, batch).backward()

    with pytest.warns(UserWarning, match="not made by the compute_loss that parallelize returned"):
        run(2, work, timeout_s=20)


def test_a_plan_of_it_needs_no_count() -> None:
    model = built(mlp)
    plan = shoal.plan(
        model,
        None,
        sgd(model.parameters()),
        sample={"seed": 3},
        cluster=cluster_of(2),
        compute_loss=lambda model, batch: model(numbers(batch["seed"], 7)).mean(),
    )
    assert len(plan.choices) == 2


class Gated(nn.Module):
    """A model that keeps a term for its loss, a mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.aux = mlp(), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        self.aux = logits.logsumexp(1).square().mean()
        return logits


def with_kept(model: Any, compute: Any, optimizer: Any, batches: Any) -> None:
    for batch in batches:
        optimizer.zero_grad()
        (compute(model, batch) + 0.3 * model.aux).backward()
        optimizer.step()


@pytest.mark.parametrize("has_sample", [True, False], ids=["sample", "first"])
@pytest.mark.parametrize("way", [BUCKETED[0], "sliced", "column", "pipeline"])
def test_a_kept_term_beside_a_loss_of_class_weights_is_a_mean_over_rows(
    way: str, has_sample: bool
) -> None:
    weight = torch.tensor([0.2, 1.0, 5.0], dtype=torch.float64)
    training = Training(
        model=built(Gated),
        batches=features(7, 3),
        loss_fn=None,
        compute_loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weight),
        loop=with_kept,
        has_sample=has_sample,
    )
    assert_same(training, 2, way, uneven=True)
