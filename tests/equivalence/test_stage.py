"""The end of a model on hosts that bring no rows, by the older name: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
from one_process import (
    Batch,
    adamw,
    built,
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
from shoal.session.session import current

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("workers", "tail", "micro_batches"),
    [
        (2, 1, 1),
        (3, 1, 4),
        *(pytest.param(*case, marks=SLOW) for case in ((4, 1, 2), (2, 1, 3), (3, 1, 8))),
    ],
)
def test_workers_and_a_tail_get_what_one_process_gets(
    workers: int, tail: int, micro_batches: int
) -> None:
    assert_same(built(Net), workers=workers, tail=tail, micro_batches=micro_batches)


@pytest.mark.parametrize(
    "shared",
    [name if name == "cut" else pytest.param(name, marks=SLOW) for name in SHARED],
)
@pytest.mark.parametrize(
    ("workers", "tail", "optimizer"), [(3, 2, adamw), pytest.param(3, 3, sgd, marks=SLOW)]
)
def test_hosts_hold_layers_that_older_pins_share(
    workers: int, tail: int, shared: str, optimizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pins = {"body.*": "replicate"} | SHARED[shared]
    with caplog.at_level("INFO", "shoal"):
        assert_same(built(Net), workers=workers, tail=tail, pins=pins, optimizer=optimizer)
    lines = [line for line in caplog.messages if "is an older name" in line]
    assert len(lines) == 1
    assert ("each holds some of the layers" in lines[0]) == (shared != "as planned")


def test_there_may_be_more_hosts_than_ranks_that_train() -> None:
    """Before, each host had a worker of its own."""
    assert_same(built(Net), workers=2, tail=3)


@pytest.mark.parametrize("body", ["sliced", pytest.param("factor", marks=SLOW)])
def test_the_body_is_served_in_any_way_that_cuts_no_layer(body: str) -> None:
    assert_same(built(Net), pins={"body.*": body, "tail.*": "stage"})


@pytest.mark.parametrize(
    ("micro_batches", "tail"), [(3, 1), pytest.param(1, 2, marks=SLOW), (8, 2)]
)
def test_uneven_rows_are_weighted(micro_batches: int, tail: int) -> None:
    assert_same(built(Net), uneven=True, micro_batches=micro_batches, tail=tail)


@pytest.mark.parametrize("tail", [1, pytest.param(2, marks=SLOW)])
def test_the_end_is_a_module_of_any_kind(tail: int) -> None:
    pins = {"table": "replicate", "ends.*": "stage"}
    assert_same(
        built(Tokens),
        given=tokens(),
        pins=pins,
        tail=tail,
        loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1),
    )


@pytest.mark.parametrize("pin", ["2", pytest.param("4", marks=SLOW), "1[0-9]"])
def test_a_pin_stands_for_a_layer_and_all_after_it(pin: str) -> None:
    layers = [nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(inplace=True)]
    more = [
        nn.Linear(HIDDEN, HIDDEN),
        *(nn.Tanh() for _ in range(5)),
        nn.Linear(HIDDEN, CLASSES),
        nn.Dropout(0.0),
    ]
    model = built(lambda: nn.Sequential(*layers, *more))

    held = {"2": ["2", "4", "10"], "4": ["4", "10"], "1[0-9]": ["10"]}[pin]

    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        plain(model, loss_fn, optimizer, its)
        if hasattr(optimizer, "accumulate"):
            choices = current().attached[model].plan.choices
            found = [choice.layer for choice in choices if choice.strategy == "pipeline"]
            assert sorted(found, key=int) == held

    assert_same(model, loop, pins={pin: "stage"}, strategies=["replicate", "sliced"])


def test_a_body_that_is_frozen() -> None:
    model = built(Net)
    model.body.requires_grad_(False)
    assert_same(model, pins={"tail.*": "stage"})


def ignoring(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, ignore_index=0)


@pytest.mark.parametrize("tail", [1, pytest.param(2, marks=SLOW)])
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


@pytest.mark.parametrize("make", [Probe, Linked])
def test_tails_of_other_kinds(make: Any) -> None:
    assert_same(built(make))


@pytest.mark.parametrize("tail", [1, 2])
def test_sequences_of_other_lengths_on_every_worker(tail: int) -> None:
    """Before, hosts that shared a layer refused them."""

    def loop(model: Any, loss_fn: Any, optimizer: Any, its: list[Batch]) -> None:
        longest = 1 + shoal.world().rank
        plain(model, loss_fn, optimizer, [(ids[:, :longest], y) for ids, y in its])

    pins = {"table": "replicate", "ends.*": "stage"}
    _, losses = together(built(Tokens), loop, given=tokens(), pins=pins, tail=tail)
    assert losses == [None] * 3
