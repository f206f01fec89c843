"""Pipelines: after five steps on ranks with unlike rows, what one process has."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from one_process import Batch, adamw, built, difference, features, sgd, state
from piped import LOOPS, PIPELINE, Script, assert_same, loss_of, script
from small_models import Gpt, ResNet18, pictures, words
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import UsageError

OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


QUICK = [
    ("mlp", "adamw", "clipped", 2),
    ("tied", "sgd", "with evaluation", 3),
    ("vit", "adamw", "scheduled", 3),
    ("own loss", "adamw", "accumulated", 2),
    ("unet", "sgd", "plain", 4),
]
MORE = [
    ("mlp", "sgd", "plain", 1),
    ("gpt", "adamw", "plain", 3),
    ("gpt", "sgd", "clipped", 4),
    ("tied", "adamw", "accumulated", 2),
    ("own loss", "sgd", "with evaluation", 3),
    ("own loss, tied", "adamw", "clipped", 4),
    ("vit", "sgd", "accumulated", 4),
    ("vit", "sgd", "clipped", 2),
    ("unet", "adamw", "with evaluation", 4),
    ("unet", "sgd", "clipped", 3),
    ("lstm", "sgd", "scheduled", 2),
    ("lstm", "adamw", "plain", 4),
    ("adapted", "adamw", "scheduled", 4),
    ("adapted", "sgd", "plain", 2),
    ("frozen first", "sgd", "clipped", 2),
    ("frozen first", "adamw", "accumulated", 3),
]


@pytest.mark.parametrize(
    ("kind", "optimizer", "loop", "ranks"),
    [
        *(pytest.param(*cell, marks=pytest.mark.quick) for cell in QUICK),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MORE),
    ],
)
def test_ranks_get_what_one_process_gets(kind: str, optimizer: str, loop: str, ranks: int) -> None:
    assert_same(script(kind, optimizer=OPTIMIZERS[optimizer], loop=LOOPS[loop]), ranks)


def test_losses_are_those_of_own_rows() -> None:
    tried = script("mlp")
    got = assert_same(tried, 3)
    alone, _ = tried.alone()
    rows = torch.tensor([len(b) for b in (range(2), range(4), range(6))], dtype=torch.float64)
    means = torch.tensor([losses for losses, _ in got], dtype=torch.float64)
    together = (rows[:, None] * means).sum(0) / 12
    torch.testing.assert_close(together, torch.tensor(alone, dtype=torch.float64))


@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [
        (2, "sgd"),
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in ((3, "adamw"), (4, "sgd"))),
    ],
)
def test_batch_norm_is_what_replicas_have(ranks: int, optimizer: str) -> None:
    tried = Script(
        model=built(ResNet18),
        batches=pictures(20),
        loss_fn=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
    )
    expected = tried.on_ranks(ranks, {"*": "replicate"})[0][1]
    got = tried.on_ranks(ranks, PIPELINE)
    assert difference(state(tried.model), expected) > 1e-3
    for _, each in got:
        assert difference(expected, each) <= 1e-10
        assert torch.equal(expected["norm.num_batches_tracked"], each["norm.num_batches_tracked"])


def weighted(output: Tensor, y: Tensor) -> Tensor:
    """A loss that counts its own terms."""
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=0)


def summed(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="sum")


@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (weighted, {"count": lambda output, y: (y != 0).sum()}),
        pytest.param(summed, {}, marks=pytest.mark.slow),
    ],
    ids=["counted", "summed"],
)
def test_losses_that_are_no_mean_of_rows(loss_fn: Any, options: dict[str, Any]) -> None:
    assert_same(Script(model=built(Gpt), batches=words(), loss_fn=loss_fn, options=options), 3)


def test_a_loss_that_is_a_module() -> None:
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert_same(Script(model=built(Mlp), batches=features(7, 3), loss_fn=loss_fn), 3)


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(7, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)
        )


def own_of_batch(model: Any, batch: Batch) -> Tensor:
    """A user's function, which takes the model's own loss."""
    loss: Tensor = model(*batch)[1]
    return loss


@pytest.mark.slow
def test_a_function_that_takes_the_models_loss() -> None:
    def loop(model: Any, compute: Any, optimizer: Any, batches: list[Batch]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            (compute or own_of_batch)(model, batch).backward()
            optimizer.step()

    options = {"compute_loss": own_of_batch}
    tried = Script(model=built(Gpt), batches=words(), loss_fn=None, loop=loop, options=options)
    assert_same(tried, 3)


def two_losses(model: Any, loss_fn: Any, optimizer: Any, batches: list[Batch]) -> None:
    """Adds two losses of two calls, one of them scaled."""
    for first, second in pairwise(batches):
        optimizer.zero_grad()
        loss = loss_of(model, loss_fn, first) + 0.3 * loss_of(model, loss_fn, second)
        loss.backward()
        optimizer.step()


def two_losses_of_one_output(model: Any, loss_fn: Any, optimizer: Any, batches: Any) -> None:
    """Adds two losses of one output."""
    for x, y in batches:
        optimizer.zero_grad()
        output = model(x)
        (loss_fn(output, y) + 0.3 * loss_fn(output, (y + 1) % 3)).backward()
        optimizer.step()


@pytest.mark.parametrize("loop", [two_losses, two_losses_of_one_output])
def test_several_losses_in_one_backward(loop: Any) -> None:
    assert_same(script("mlp", loop=loop), 3)


class Nothing(nn.Module):
    """A model some of whose layers are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.never, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.again = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.again(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.again(x)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_that_is_called_twice_and_one_never(ranks: int) -> None:
    assert_same(
        Script(model=built(Nothing), batches=features(7, 3), loss_fn=F.cross_entropy), ranks
    )


class Several(nn.Module):
    """A model of several inputs and outputs, in trees."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(7, 5), nn.Linear(7, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, both: dict[str, Tensor], power: int = 1) -> dict[str, Any]:
        left, right = torch.tanh(self.left(both["a"])), torch.tanh(self.right(both["b"]))
        hidden = (left * right * self.scale) ** power
        return {"logits": self.out(hidden), "hidden": [left, hidden], "power": power}


def of_tree(output: Any, y: Tensor) -> Tensor:
    left, hidden = output["hidden"]
    return F.cross_entropy(output["logits"], y) + left.square().mean() + hidden.sum(1).mean()


@pytest.mark.parametrize("ranks", [2, 3])
def test_trees_of_inputs_and_outputs(ranks: int) -> None:
    given = [(({"a": x, "b": x.flip(1)},), y) for x, y in features(7, 3)]
    assert_same(Script(model=built(Several), batches=given, loss_fn=of_tree), ranks)


class Unlearned(nn.Module):
    """A layer that computes without a gradient on the way, as rotary positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.beside, self.last = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x * self.scale(x))

    @torch.no_grad()
    def scale(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.beside(x))


def test_a_cut_inside_of_no_grad() -> None:
    pins = {"first": "pipeline:0", "beside": "pipeline:1", "last": "pipeline:2"}
    tried = Script(model=built(Unlearned), batches=features(7, 3), loss_fn=F.cross_entropy)
    assert_same(tried, 3, pins=pins)


class Kept(nn.Module):
    """A layer that takes a mask, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, kept: Tensor | None) -> Tensor:
        x = torch.tanh(self.layer(x))
        return x if kept is None else x * kept


class Masked(nn.Module):
    """Makes a mask only for rows that need one, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Kept() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x, kept = self.words(ids), None
        if not bool((ids > 0).all()):
            kept = (ids > 0).unsqueeze(-1).to(x.dtype)
            kept = kept / kept.mean(1, keepdim=True)
        for layer in self.layers:
            x = layer(x, kept)
        return x.mean(1)


def masked() -> list[Batch]:
    """Batches of which some ranks' rows have other lengths in some steps."""
    given: list[Batch] = []
    for step, (ids, y) in enumerate(words()):
        lengths = torch.tensor([6] * 2 + [4 + step % 3] * 4 + [5 + step % 2] * 6)
        given.append(((ids % 10 + 1) * (torch.arange(6) < lengths[:, None]), y[:, 0] % 8))
    return given


def test_a_mask_that_some_inputs_need() -> None:
    assert_same(Script(model=built(Masked), batches=masked(), loss_fn=F.cross_entropy), 3)


class OtherWay(Masked):
    """Its glue makes one value more of some inputs, which crosses."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, None)
            x = x if bool((ids > 0).all()) else x * 2
        return x.mean(1)


def test_a_forward_that_goes_another_way() -> None:
    tried = Script(model=built(OtherWay), batches=masked(), loss_fn=F.cross_entropy)
    with pytest.raises(UsageError, match="another way than it went for the sample"):
        tried.on_ranks(3)
