"""The end of a model on hosts of its own: what workers get is what one process gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from one_process import (
    DEVICE,
    Batch,
    adamw,
    built,
    integers,
    plain,
    sgd,
)
from torch import Tensor, nn
from torch.nn import functional as F
from with_tail import (
    CLASSES,
    HIDDEN,
    SHARED,
    WIDTH,
    Net,
    Tokens,
    assert_same,
    together,
    tokens,
)

import shoal
from shoal.core.errors import UsageError
from shoal.planner.search_options import SearchOptions


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("workers,tail", [(2, 1), (3, 1), (4, 1)])
def test_workers_and_a_tail_get_what_one_process_gets(
    workers: int, tail: int, micro_batches: int
) -> None:
    assert_same(built(Net), workers=workers, tail=tail, micro_batches=micro_batches)


@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize(
    "workers,tail,optimizer", [(2, 2, sgd), (3, 2, adamw), (4, 2, adamw), (3, 3, sgd)]
)
def test_tail_hosts_share_the_tail(workers: int, tail: int, shared: str, optimizer: Any) -> None:
    pins = {"body.*": "replicate"} | SHARED[shared]
    assert_same(built(Net), workers=workers, tail=tail, pins=pins, optimizer=optimizer)


@pytest.mark.parametrize("body", ["sliced", "factor", "column", "row"])
def test_the_body_is_served_in_any_way(body: str) -> None:
    assert_same(built(Net), pins={"body.*": body, "tail.*": "stage"})


@pytest.mark.parametrize("tail", [1, 2])
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_uneven_rows_are_weighted(micro_batches: int, tail: int) -> None:
    assert_same(built(Net), uneven=True, micro_batches=micro_batches, tail=tail)


@pytest.mark.parametrize("tail", [1, 2])
def test_the_end_is_a_module_of_any_kind(tail: int) -> None:
    pins = {"table": "replicate", "ends.*": "stage"}
    assert_same(
        built(Tokens),
        given=tokens(),
        pins=pins,
        tail=tail,
        loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1),
    )


@pytest.mark.parametrize("pin", ["2", "4", "1[0-9]"])
@pytest.mark.parametrize("tail", [1, 2])
def test_the_end_is_the_last_children_of_a_sequential(tail: int, pin: str) -> None:
    layers = [nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(inplace=True)]
    more = [
        nn.Linear(HIDDEN, HIDDEN),
        *(nn.Tanh() for _ in range(5)),
        nn.Linear(HIDDEN, CLASSES),
        nn.Dropout(0.0),
    ]
    model = built(lambda: nn.Sequential(*layers, *more))
    assert_same(model, pins={pin: "stage"}, tail=tail, strategies=["replicate", "sliced"])


def test_a_body_that_is_frozen() -> None:
    model = built(Net)
    model.body.requires_grad_(False)
    assert_same(model, pins={"tail.*": "stage"})


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=0)


@pytest.mark.parametrize("tail", [1, 2])
def test_a_loss_counts_its_own_terms(tail: int) -> None:
    assert_same(
        built(Net), loss_fn=ignoring, count=lambda output, target: (target != 0).sum(), tail=tail
    )


class Probe(Net):
    """A tail that passes no gradient on."""

    def __init__(self) -> None:
        super().__init__()
        self.tail[0] = Stop()

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(x))


class Stop(nn.Module):
    """A gradient ends here."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Linked(Net):
    """A tail with one parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.tail[3].bias = self.tail[1].bias


@pytest.mark.parametrize("tail", [1, 2])
@pytest.mark.parametrize("make", [Probe, Linked])
def test_tails_of_other_kinds(make: Any, tail: int) -> None:
    assert_same(built(make), tail=tail)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("shared", ["cut", "sliced", "by inputs", "factor"])
def test_tail_hosts_some_of_which_have_no_rows(shared: str, joined: bool) -> None:
    assert_same(
        built(Net),
        workers=2,
        tail=2,
        uneven=True,
        micro_batches=8,
        pins={"body.*": "replicate"} | SHARED[shared],
        search_options=SearchOptions(joined=(joined,)),
    )


@pytest.mark.parametrize("body", ["column", "row"])
def test_a_body_that_is_cut_and_ranks_with_fewer_rows_than_micro_batches(body: str) -> None:
    assert_same(built(Net), uneven=True, pins={"body.*": body, "tail.*": "stage"})


def test_sequences_of_other_lengths_on_every_worker() -> None:
    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        longest = 1 + shoal.world().rank
        plain(model, loss_fn, optimizer, [(ids[:, :longest], y) for ids, y in its])

    _, losses = together(
        built(Tokens), loop, given=tokens(), pins={"table": "replicate", "ends.*": "stage"}
    )
    assert losses == [None] * 3
    with pytest.raises(UsageError, match="of one shape from all workers"):
        together(
            built(Tokens),
            loop,
            workers=4,
            tail=2,
            given=tokens(),
            pins={"table": "replicate", "ends.*": "stage"},
        )


class Summed(nn.Module):
    """Adds up what it makes of each token; zeros add nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(x)).sum(1)


class Trimmed(nn.Module):
    """Cuts its rows to their longest, so that a worker's micro-batches are of several shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, padding_idx=0)
        self.ends = nn.ModuleDict({"sum": Summed()})

    def forward(self, ids: Tensor) -> Tensor:
        return self.ends["sum"](self.table(ids[:, : int((ids > 0).sum(1).max())]))


@pytest.mark.parametrize("joined", [True, False])
def test_micro_batches_of_several_lengths_keep_their_order(joined: bool) -> None:
    batches = []
    for seed in range(5):
        ids = 1 + integers(10, 12, 6, seed=seed)
        lengths = [2, 2, 6, 6, 2, 2, 6, 6, 6, 2, 6, 2] if seed else [6] * 12
        batches.append(
            (
                ids.masked_fill(
                    torch.arange(6, device=DEVICE) >= torch.tensor(lengths, device=DEVICE)[:, None],
                    0,
                ),
                integers(5, 12, seed=seed),
            )
        )
    pins = {"table": "replicate", "ends.*": "stage"}
    assert_same(
        built(Trimmed),
        workers=2,
        given=batches,
        pins=pins,
        micro_batches=3,
        search_options=SearchOptions(joined=(joined,)),
    )
