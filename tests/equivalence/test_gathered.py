"""Losses that compare rows of all ranks: gathered with their history, as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import UNEVEN, Training, assert_same, built, numbers
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

ROWS = 12


class Towers(nn.Module):
    """A tower for pictures, and one for texts."""

    def __init__(self) -> None:
        super().__init__()
        self.picture = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 4))
        self.text = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, pictures: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.picture(pictures)), F.normalize(self.text(texts))


def whole(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The loss of all rows, on every rank (Radford et al., "CLIP", 2021, figure 3)."""
    pictures, texts = map(shoal.gather, output)
    logits, pairs = pictures @ texts.T / 0.1, torch.arange(len(pictures))
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def own(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The loss of this rank's pictures against all texts (van den Oord et al., "CPC", 2018)."""
    pictures, texts = output[0], shoal.gather(output[1])
    counts = shoal.gather(torch.tensor([len(pictures)]))
    rank, ranks = shoal.world().rank, shoal.world().size
    pairs = torch.arange(len(pictures)) + counts[:rank].sum()
    logits = pictures @ texts.T / 0.1
    return F.cross_entropy(logits, pairs, reduction="sum") * ranks / len(texts)


def slow(way: str) -> Any:
    return pytest.param(way, marks=pytest.mark.slow)


def batches() -> list[tuple[tuple[Tensor, Tensor], Tensor]]:
    return [
        ((numbers(ROWS, 7, seed=step), numbers(ROWS, 5, seed=step + 9)), numbers(ROWS, seed=step))
        for step in range(2)
    ]


@UNEVEN
@pytest.mark.parametrize("loss_fn", [whole, own])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", ["replicate", "sliced", *map(slow, ["factor", "column", "row"])])
def test_pairs_against_the_rows_of_all_ranks(way, ranks, loss_fn, uneven):
    training = Training(model=built(Towers), batches=batches(), loss_fn=loss_fn, weigh="ranks")
    assert_same(training, ranks, way, uneven=uneven)


class Encoder(nn.Module):
    """Its last layer may be cut over the ranks, so that what is gathered is cut, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def like_of_its_batch(output: Tensor, target: Tensor) -> Tensor:
    """Rows of one class are to be alike (Khosla et al., 2020, "SupCon", equation 2)."""
    rows, classes = F.normalize(shoal.gather(output)), shoal.gather(target)
    near = (rows @ rows.T / 0.5).fill_diagonal_(-1e9).log_softmax(1)
    same = (classes == classes.unsqueeze(1)).double().fill_diagonal_(0)
    return -((near * same).sum(1) / same.sum(1).clamp(min=1)).mean()


@pytest.mark.parametrize("way", [slow("replicate"), "column"])
@pytest.mark.parametrize("by", ["loss_fn", "compute_loss"])
def test_rows_of_one_class_among_all_ranks(way, by):
    data = [(numbers(ROWS, 7, seed=step), torch.arange(ROWS) % 3) for step in range(2)]
    model = built(Encoder)
    if by == "loss_fn":
        training = Training(model=model, batches=data, loss_fn=like_of_its_batch, weigh="ranks")
        assert_same(training, 3, way, uneven=True)
    else:

        def compute_loss(model, batch):
            return like_of_its_batch(model(batch[0]), batch[1])

        def loop(model, compute_loss, optimizer, batches):
            for batch in batches:
                optimizer.zero_grad()
                compute_loss(model, batch).backward()
                optimizer.step()

        training = Training(
            model=model,
            batches=data,
            loss_fn=None,
            compute_loss=compute_loss,
            loop=loop,
            weigh="ranks",
        )
        assert_same(training, 3, way, uneven=True)


@pytest.mark.parametrize("weigh", ["rows", "ranks"])
def test_rank_0_warns_once_unless_ranks_count_alike(monkeypatch, weigh):
    """A loss of each rank's own batch, which is no mean over rows."""

    def alone(output: Tensor, target: Tensor) -> Tensor:
        return output.logsumexp(0).mean()

    said: list[Any] = []
    monkeypatch.setattr(
        "shoal.front.parallel_ranks.warn_of_unlike", lambda *found: said.append(found)
    )
    data = [(numbers(ROWS, 7), torch.arange(ROWS) % 3)]
    Training(model=built(Encoder), batches=data, loss_fn=alone, weigh=weigh).on_ranks(2)
    assert len(said) == (weigh == "rows")
