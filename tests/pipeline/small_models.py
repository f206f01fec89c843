"""Small models of the kinds that people train, with batches for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from one_process import Batch, features, integers, mlp, numbers
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, LENGTH, WIDTH, CLASSES, STEPS = 11, 6, 8, 5, 5


class Block(nn.Module):
    """A block of a GPT, whose residual sums are glue."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        # no bias: that of keys has no gradient, and AdamW would make steps of rounding alone
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (
            part.view(rows, length, 2, WIDTH // 2).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(WIDTH, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Words and positions, blocks, a head; with targets it returns its loss, too."""

    def __init__(self, *, tied: bool = False, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else (logits, of_words(logits, targets))


def of_words(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of all words."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Vit(nn.Module):
    """A ViT, whose glue uses parameters of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, 4)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.places = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 12, 0.0, batch_first=True, bias=False)
            for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Residual(nn.Module):
    """A basic block of ResNet-18."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.down = None
        if stride > 1 or inputs != width:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        short = x if self.down is None else self.down(x)
        x = self.relu(self.norm1(self.conv1(x)))
        x = self.norm2(self.conv2(x))
        x += short
        return self.relu(x)


class ResNet18(nn.Module):
    """ResNet-18 of small widths, for small pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        widths = [4, 4, 6, 8, 8]
        for stage in range(4):
            first, second = widths[stage : stage + 2]
            blocks = nn.Sequential(
                Residual(first, second, 1 + (stage > 0)), Residual(second, second, 1)
            )
            self.add_module(f"layer{stage + 1}", blocks)
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.conv(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.head(torch.flatten(self.pool(x), 1))


class UNet(nn.Module):
    """A U-Net: values that are used far from where they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.down3 = _conv(3, 4), _conv(4, 6), _conv(6, 8)
        self.up2, self.conv2 = nn.ConvTranspose2d(8, 6, 2, 2), _conv(12, 6)
        self.up1, self.conv1 = nn.ConvTranspose2d(6, 4, 2, 2), _conv(8, 4)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.down3(F.max_pool2d(b, 2))
        y = self.conv2(torch.cat([self.up2(c), b], 1))
        y = self.conv1(torch.cat([self.up1(y), a], 1))
        return self.out(y)


def _conv(inputs: int, width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU())


class Lstm(nn.Module):
    """Two LSTMs, of which the second begins with the state of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        y, state = self.first(self.words(ids))
        y, _ = self.second(y, state)
        return self.head(y)


class Adapted(nn.Module):
    """A frozen layer with a small trainable one beside, as LoRA has it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted() -> nn.Module:
    """A frozen GPT with adapters beside some of its layers."""
    model = Gpt().requires_grad_(False)
    for block in model.blocks:
        block.qkv = Adapted(block.qkv)
    return model


def frozen_first() -> nn.Module:
    """A GPT whose first half is frozen."""
    model = Gpt()
    for module in (model.words, model.places, *model.blocks[:2]):
        module.requires_grad_(False)
    return model


def words(rows: int = 12) -> list[Batch]:
    """Batches of words, and of the words behind them."""
    return [
        (integers(WORDS, rows, LENGTH, seed=s), integers(WORDS, rows, LENGTH, seed=s + 50))
        for s in range(STEPS)
    ]


def words_at_once() -> list[Batch]:
    """The same, for a model that takes both."""
    return [(batch, None) for batch in words()]


def pictures(rows: int = 12) -> list[Batch]:
    """Batches of pictures and classes."""
    return [(numbers(rows, 3, 8, 8, seed=s), integers(CLASSES, rows, seed=s)) for s in range(STEPS)]


def masks(rows: int = 12) -> list[Batch]:
    """Batches of pictures, and a class of each pixel."""
    return [(x, integers(2, rows, 8, 8, seed=s)) for s, (x, _) in enumerate(pictures(rows))]


@dataclass(frozen=True)
class Kind:
    """A kind of model, with its batches and its loss. No loss: the model returns it."""

    make: Callable[[], nn.Module]
    batches: Callable[[], list[Batch]]
    loss_fn: Callable[[Any, Any], Tensor] | None = F.cross_entropy


KINDS = {
    "mlp": Kind(mlp, lambda: features(7, 3)),
    "gpt": Kind(Gpt, words, of_words),
    "tied": Kind(lambda: Gpt(tied=True), words, of_words),
    "dropout": Kind(lambda: Gpt(dropout=0.3), words, of_words),
    "own loss": Kind(Gpt, words_at_once, None),
    "own loss, tied": Kind(lambda: Gpt(tied=True), words_at_once, None),
    "vit": Kind(Vit, pictures),
    "unet": Kind(UNet, masks),
    "lstm": Kind(Lstm, words, of_words),
    "adapted": Kind(adapted, words, of_words),
    "frozen first": Kind(frozen_first, words, of_words),
}
