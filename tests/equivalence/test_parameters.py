"""Parameters in every circumstance: frozen, unused, tied, used twice, or used without a call of
their layer.
"""

from __future__ import annotations

import pytest
import torch
from one_process import (
    EVERY_RANK,
    WAYS,
    Training,
    adamw,
    assert_same,
    built,
    features,
    integers,
    mlp,
    numbers,
    sgd,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from shoal.core.errors import UsageError

WAY = pytest.mark.parametrize("way", EVERY_RANK)
OPTIMIZER = pytest.mark.parametrize("optimizer", [sgd, adamw])


class Frozen(nn.Module):
    """A frozen layer between two others, and a layer of which only the bias trains."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.frozen.requires_grad_(False)
        self.shifted = nn.Linear(5, 5)
        self.shifted.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.shifted(self.frozen(torch.tanh(self.first(x))))))


@OPTIMIZER
@WAY
def test_frozen(way, optimizer):
    assert_same(Training(model=built(Frozen), batches=features(7, 3), optimizer=optimizer), 3, way)


@WAY
def test_frozen_after_some_steps_and_back_again(way):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            model[0].requires_grad_(step in (0, 3, 4))
            model[2].weight.requires_grad_(step != 2)
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()

    assert_same(
        Training(model=built(mlp), batches=features(7, 3), optimizer=adamw, loop=loop), 3, way
    )


def test_trainable_only_later_is_refused():
    def loop(model, loss_fn, optimizer, batches):
        model.frozen.requires_grad_(True)
        loss_fn(model(batches[0][0]), batches[0][1]).backward()

    with pytest.raises(
        UsageError, match=r"frozen\.weight was frozen when the model was parallelised"
    ):
        Training(model=built(Frozen), batches=features(7, 3), loop=loop).on_ranks(2)


class Sometimes(nn.Module):
    """Layers of which only rows with a certain first feature make use, on some ranks and in some
    steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.always, self.unused = nn.Linear(7, 3), nn.Linear(7, 3)
        self.positive, self.negative = nn.Linear(7, 3), nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.always(x)
        for layer, rows in ((self.positive, x[:, 0] > 0), (self.negative, x[:, 0] < 0)):
            if rows.any():
                out = out + torch.where(rows.unsqueeze(1), torch.tanh(layer(x)), 0)
        return out


def used_by(*steps: str) -> list[tuple[Tensor, Tensor]]:
    """Batches in which each row's first feature has the sign given for it; "0" makes use of neither
    layer.
    """
    batches = features(7, 3, steps=len(steps), rows=len(steps[0]))
    for (x, _), signs in zip(batches, steps, strict=True):
        x[:, 0] = torch.tensor([{"+": 1.0, "-": -1.0, "0": 0.0}[sign] for sign in signs])
    return batches


@pytest.mark.parametrize("set_to_none", [True, False])
@OPTIMIZER
@pytest.mark.parametrize("way", WAYS)
def test_unused_on_some_ranks_and_in_some_steps(way, optimizer, set_to_none):
    def loop(model, loss_fn, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_fn(model(x), y).backward()
            optimizer.step()

    batches = used_by("+++---", "+00000", "0000-0", "000000", "-----+", "00000+")
    assert_same(
        Training(model=built(Sometimes), batches=batches, optimizer=optimizer, loop=loop), 3, way
    )


@WAY
def test_unused_does_not_move_under_adamw(way):
    training = Training(model=built(Sometimes), batches=features(7, 3), optimizer=adamw)
    for after in training.on_ranks(2, way):
        assert torch.equal(after["unused.weight"], training.model.unused.weight)


@pytest.mark.parametrize("way", WAYS)
def test_unused_while_gradients_accumulate(way):
    def loop(model, loss_fn, optimizer, batches):
        for step, (x, y) in enumerate(batches):
            loss_fn(model(x), y).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()

    batches = used_by("+00000", "00000-", "000000", "-----+", "00000+", "000000")
    assert_same(
        Training(model=built(Sometimes), batches=batches, optimizer=adamw, loop=loop), 3, way
    )


class Twice(nn.Module):
    """One layer three times in a step, and a root parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.head = nn.Linear(7, 7), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.again(x)) * self.scale
        return self.head(x)


@OPTIMIZER
@WAY
def test_used_three_times_in_a_step(way, optimizer):
    assert_same(
        Training(model=built(Twice), batches=features(7, 3), optimizer=optimizer),
        3,
        way,
        uneven=True,
    )


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = (
            nn.Embedding(11, 6),
            nn.Linear(6, 6),
            nn.Linear(6, 11, bias=False),
        )
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(ids)))).mean(1)


@OPTIMIZER
@WAY
def test_tied(way, optimizer):
    batches = [(integers(11, 12, 5, seed=s), integers(11, 12, seed=s + 9)) for s in range(5)]
    assert_same(Training(model=built(Tied), batches=batches, optimizer=optimizer), 3, way)


class Attending(nn.Module):
    """Reads `out_proj.weight` and never calls `out_proj`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Transforming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Borrowing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(F.linear(self.first(x), self.first.weight.T))).mean(1)


@OPTIMIZER
@pytest.mark.parametrize("model", [Attending, Transforming, Borrowing])
@WAY
def test_used_without_a_call_of_its_layer(way, model, optimizer):
    batches = [(numbers(12, 5, 6, seed=s), integers(3, 12, seed=s)) for s in range(5)]
    # The gradient of the keys' bias is nothing but rounding errors, which AdamW divides by their
    # own size.
    within = 1e-8 if optimizer is adamw else 1e-10
    assert_same(
        Training(model=built(model), batches=batches, optimizer=optimizer), 3, way, within=within
    )


@pytest.mark.parametrize("norm", [weight_norm, orthogonal])
@WAY
def test_computed_from_other_parameters(way, norm):
    def model():
        return nn.Sequential(norm(nn.Linear(7, 7)), nn.Tanh(), nn.Linear(7, 3))

    assert_same(Training(model=built(model), batches=features(7, 3)), 3, way)


class Looking(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4, **options), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).mean(1)


@OPTIMIZER
@WAY
def test_embedding_whose_padding_does_not_move(way, optimizer):
    # every id on every rank
    batches = [(integers(5, 12, 6, seed=s), integers(3, 12, seed=s)) for s in range(5)]
    training = Training(
        model=built(lambda: Looking(padding_idx=2)), batches=batches, optimizer=optimizer
    )
    assert_same(training, 3, way)


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}], ids=str)
def test_embedding_that_looks_at_the_whole_batch(options):
    """One that depends on the whole batch cannot be the same; it must at least not be served by its
    factors.
    """
    batches = [(integers(5, 12, 6, seed=s), integers(3, 12, seed=s)) for s in range(2)]
    training = Training(model=built(lambda: Looking(**options)), batches=batches)
    assert "embed" not in training.pins_of("factor", 2)
