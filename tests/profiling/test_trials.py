"""Losses that are means over rows or terms, of which nothing is said, and losses that are not."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.contracts.sample import Sample
from shoal.core.terms import Terms
from shoal.front.session_start import using
from shoal.profiling.layers import profile_model
from shoal.profiling.terms import agreed_terms, count_seen, seen
from shoal.profiling.trials import warn_of_unlike

ROWS, CLASSES = 12, 3
WEIGHT = torch.tensor([1.0, 10.0, 3.0])
DRAWN = torch.Generator().manual_seed(0)
X = torch.randn(ROWS, 6, generator=DRAWN)
Y = torch.arange(ROWS) * 5 % CLASSES
NEAR = torch.rand(ROWS, CLASSES, generator=DRAWN)
TOKENS = torch.randint(CLASSES, (ROWS, 5), generator=DRAWN)
PADDED = TOKENS.masked_fill(torch.rand(ROWS, 5, generator=DRAWN) < 0.4, -100)

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Net(nn.Module):
    """A layer, and beside it whatever a case has; with a target it returns its own loss."""

    def __init__(self, beside: nn.Module | None = None, loss: Any = F.cross_entropy) -> None:
        super().__init__()
        self.layer, self.beside, self.loss = nn.Linear(6, CLASSES), beside, loss

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden = self.layer(x)
        out = hidden if self.beside is None else self.beside(hidden)
        return out if y is None else self.loss(out, y)


def terms_of(model: nn.Module, loss_fn: Any, x: Any, y: Any, compute_loss: Any = None) -> Terms:
    """Terms that the samples of two ranks show."""
    batch = (x, y) if compute_loss is None else x
    ranks = [seen(Sample.of(model, loss_fn, batch, compute_loss), rank=rank) for rank in range(2)]
    return agreed_terms(ranks, of_batch=compute_loss is not None)


def by_rows(out: Tensor, y: Tensor) -> Tensor:
    return (WEIGHT[y] * F.cross_entropy(out, y, reduction="none")).mean()


def with_penalty(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y) + 3.0


def noisy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out + torch.randn(out.shape), y)


class Annealed(nn.Module):
    """Counts its calls, as a warm-up of a weight does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(out, y) * (1 + self.calls)


def of_its_size(out: Tensor, y: Tensor) -> Tensor:
    """Is no mean, but takes no parts."""
    return (out.view(ROWS, CLASSES).std(0)).mean() + F.cross_entropy(out, y)


def with_balance(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y) + 0.1 * out.square().mean()


def of_tokens(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(F.one_hot(batch["ids"], 6).float())
    return F.cross_entropy(out[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


weighted = nn.CrossEntropyLoss(WEIGHT)
MEANS: dict[str, Callable[[], Terms]] = {
    "cross entropy": lambda: terms_of(Net(), F.cross_entropy, X, Y),
    "class weights": lambda: terms_of(Net(), weighted, X, Y),
    "class weights in a function": lambda: terms_of(
        Net(), lambda out, y: F.cross_entropy(out, y, WEIGHT, label_smoothing=0.1), X, Y
    ),
    "class weights of log probabilities": lambda: terms_of(
        Net(nn.LogSoftmax(1)), partial(F.nll_loss, weight=WEIGHT, ignore_index=1), X, Y
    ),
    "class weights and probabilities": lambda: terms_of(Net(), weighted, X, NEAR.softmax(1)),
    "ignored targets": lambda: terms_of(Net(), nn.CrossEntropyLoss(ignore_index=0), X, Y),
    "weights of rows": lambda: terms_of(Net(), by_rows, X, Y),
    "logits with weights": lambda: terms_of(
        Net(), nn.BCEWithLogitsLoss(WEIGHT, pos_weight=WEIGHT), X, NEAR.round()
    ),
    "a divergence": lambda: terms_of(
        Net(nn.LogSoftmax(1)), nn.KLDivLoss(reduction="batchmean"), X, NEAR.softmax(1)
    ),
    "a sum": lambda: terms_of(Net(), nn.CrossEntropyLoss(reduction="sum"), X, Y),
    "a penalty beside": lambda: terms_of(Net(), with_penalty, X, Y),
    "BatchNorm": lambda: terms_of(Net(nn.BatchNorm1d(CLASSES)), None, (X, Y), None),
    "BatchNorm without statistics": lambda: terms_of(
        Net(nn.BatchNorm1d(CLASSES, track_running_stats=False)), None, (X, Y), None
    ),
    "dropout": lambda: terms_of(Net(nn.Dropout(0.5)), None, (X, Y), None),
    "an auxiliary loss": lambda: terms_of(Net(loss=with_balance), None, (X, Y), None),
    "class weights in a model": lambda: terms_of(Net(loss=weighted), None, (X, Y), None),
    "padded texts": lambda: terms_of(
        Net(), None, {"ids": TOKENS, "labels": PADDED}, None, of_tokens
    ),
    "16 bits": lambda: terms_of(Net().bfloat16(), None, (X.bfloat16(), Y), None),
    "random numbers": lambda: terms_of(Net(), noisy, X, Y),
    "a state": lambda: terms_of(Net(), Annealed(), X, Y),
    "no parts": lambda: terms_of(Net(), of_its_size, X, Y),
    "one row": lambda: terms_of(Net(), F.mse_loss, X[:1], NEAR[:1]),
}


@pytest.mark.parametrize("name", MEANS)
def test_nothing_is_said_of_a_mean(name: str) -> None:
    assert MEANS[name]().unlike is None


def dice(out: Tensor, y: Tensor) -> Tensor:
    near, true = out.sigmoid()[:, 1], (y == 1).float()
    return 1 - 2 * (near * true).sum() / (near.sum() + true.sum())


def negatives(out: Tensor, y: Tensor) -> Tensor:
    rows = F.normalize(out)
    return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


def focal(out: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(out, y, reduction="none")
    return (each * (1 - torch.exp(-each)) ** 2).sum() / (y > 0).sum().clamp(min=1)


def root(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, F.one_hot(y, CLASSES).float()).sqrt()


def masked(out: Tensor, y: Tensor) -> Tensor:
    mask = (y != 1).float()
    return (F.cross_entropy(out, y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)


def weighed_by_hand(out: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(out, y, reduction="none")
    return (each * WEIGHT[y]).sum() / WEIGHT[y].sum()


def normalized(out: Tensor, y: Tensor) -> Tensor:
    """A policy's loss: advantages are normalized over the batch."""
    gain = out.detach().sum(1)
    gain = (gain - gain.mean()) / (gain.std(correction=0) + 1e-8)
    return (F.cross_entropy(out, y, reduction="none") * gain).mean()


def of_classes(out: Tensor, y: Tensor) -> Tensor:
    rows = F.normalize(out)
    same = (y == y[:, None]).float()
    return -((rows @ rows.T).log_softmax(1) * same).sum(1).div(same.sum(1)).mean()


def redundancy(out: Tensor, y: Tensor) -> Tensor:
    centred = out - out.mean(0)
    return (centred.T @ centred / len(out)).square().sum()


def listed(out: Tensor, y: Tensor) -> Tensor:
    return -(out[:, 0].log_softmax(0) * y.float().softmax(0)).sum()


def correlated(out: Tensor, y: Tensor) -> Tensor:
    one, other = out[:, 0] - out[:, 0].mean(), y - y.float().mean()
    return 1 - (one * other).sum() / (one.norm() * other.norm() + 1e-8)


def perplexity(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y).exp()


def of_products(out: Tensor, y: Tensor) -> Tensor:
    """A sum that doubles with its rows, but is no sum over them."""
    return out[:, 0].abs().sum() * out[:, 1].abs().mean()


def balanced(out: Tensor, y: Tensor) -> Tensor:
    """The balance of experts: a product of two means."""
    share = out.softmax(1)
    chosen = F.one_hot(share.argmax(1), CLASSES).float()
    return CLASSES * (share.mean(0) * chosen.mean(0)).sum()


def mixed(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, WEIGHT) + F.cross_entropy(out, y)


def without_padding(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out = model(F.one_hot(batch["ids"], 6).float())
    each = F.cross_entropy(out.flatten(0, 1), batch["ids"].flatten(), reduction="none")
    mask = (batch["labels"] != -100).flatten().float()
    return (each * mask).sum() / mask.sum()


NO_MEANS: dict[str, Any] = {
    function.__name__: function
    for function in (
        *(dice, negatives, focal, root, masked, weighed_by_hand, normalized, of_classes),
        *(redundancy, listed, correlated, perplexity, of_products, balanced, mixed),
    )
}


@pytest.mark.parametrize("name", NO_MEANS)
@pytest.mark.parametrize("by", ["loss_fn", "model"])
def test_a_loss_that_is_no_mean_is_named(name: str, by: str) -> None:
    loss = NO_MEANS[name]
    if by == "loss_fn":
        found = terms_of(Net(), loss, X, Y).unlike
    else:
        found = terms_of(Net(loss=loss), None, (X, Y), None).unlike
    assert found is not None
    text = re.escape(f"the loss {name} (") + r".*count=.*weigh=.*shoal\.gather"
    with pytest.warns(UserWarning, match=text):
        warn_of_unlike(loss, found)


def test_a_loss_of_a_whole_batch_that_is_no_mean() -> None:
    batch = {"ids": TOKENS, "labels": PADDED}
    assert terms_of(Net(), None, batch, None, without_padding).unlike is not None


def test_a_loss_that_waits_for_the_sums_of_all_ranks() -> None:
    """It is right only if every rank counts alike, and its parts have other shares on each rank."""

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        terms = shoal.mean(float((y > 0).sum()))
        return F.cross_entropy(out, y, reduction="none").mul(y > 0).sum() / terms

    models = [Net() for _ in range(2)]

    def work(comm: ThreadComm) -> Terms:
        with using(comm):
            rows = slice(0, 8) if comm.rank == 0 else slice(8, None)
            return profile_model(models[comm.rank], loss_fn, [], (X[rows], Y[rows]), comm).terms

    for terms in run(2, work, timeout_s=20):
        assert terms.unlike is not None


def test_a_count_of_ones_own_says_what_the_loss_is() -> None:
    sample = Sample.of(Net(), dice, (X, Y))
    assert seen(sample, counted=True).unlike is None


@pytest.mark.parametrize(
    ("labels", "by_size", "count"),
    [(PADDED, False, (PADDED[:, 1:] != -100).sum()), (TOKENS, True, 48)],
)
def test_tokens_are_counted_at_the_labels(labels: Tensor, by_size: bool, count: Any) -> None:
    """Without a look at them if none is ignored: a GPU is not waited for."""
    batch = {"ids": TOKENS, "labels": labels}
    targets = terms_of(Net(), None, batch, None, of_tokens).targets
    assert targets is not None
    assert (targets.path, targets.skipped, targets.by_size) == (("labels",), 1, by_size)
    assert count_seen(targets, batch) == count
