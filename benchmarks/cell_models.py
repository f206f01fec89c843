"""Sixteen small models for `cells.py`: conv nets, transformers, recurrent, recommenders, U-Nets.

Each is written here, in one of the usual ways, and small enough that a step takes 0.03 to 0.3 s on
one core. Inputs are noise, by a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Optimizers = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SGD: Optimizers = partial(torch.optim.SGD, lr=0.01)
MOMENTUM: Optimizers = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
ADAM: Optimizers = partial(torch.optim.Adam, lr=1e-3)
ADAMW: Optimizers = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True)
class Kind:
    """A model, one batch of a rank, the loss and the optimizer."""

    family: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Any, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Optimizers


def over_words(scores: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of all words of all rows."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def images(
    rows: int, size: int, classes: int
) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Noise and classes."""
    return lambda draw: (
        torch.randn(rows, 3, size, size, generator=draw),
        torch.randint(classes, (rows,), generator=draw),
    )


def words(rows: int, length: int, known: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    """Words, and the next ones."""

    def drawn(draw: torch.Generator) -> tuple[Tensor, Tensor]:
        text = torch.randint(known, (rows, length + 1), generator=draw)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return drawn


# ------------------------------------------------------------------------------------------------
# conv nets


def conv(inputs: int, outputs: int, size: int = 3, **how: Any) -> nn.Sequential:
    """A convolution, batch norm and ReLU."""
    layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False, **how)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


def plain() -> nn.Module:
    """Like AlexNet: most parameters are in two wide linear layers."""
    convolutions = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        for a, b in pairwise((3, 32, 64, 128))
    ]
    wide = [nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*convolutions, nn.Flatten(), *wide)


def vgg() -> nn.Module:
    """Two convolutions a size, and linear layers."""
    blocks = [
        nn.Sequential(
            nn.Conv2d(a, b, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(b, b, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        for a, b in pairwise((3, 32, 64, 128, 256))
    ]
    wide = [nn.Linear(1024, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 100)]
    return nn.Sequential(*blocks, nn.Flatten(), *wide)


class Residual(nn.Module):
    """Two convolutions beside a way around them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.first = conv(inputs, outputs, stride=stride)
        self.second = conv(outputs, outputs)
        self.around = nn.Identity() if stride == 1 else conv(inputs, outputs, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x)) + self.around(x)
        return out


def resnet() -> nn.Module:
    """Six residual blocks of three widths."""
    widths = (24, 24, 24, 64, 64, 160, 160)
    blocks = [Residual(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(
        conv(3, 24), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 100)
    )


def mobile() -> nn.Module:
    """Many small layers: a convolution of each channel by itself, then one of 1 × 1."""
    widths = (16, 32, 64, 64, 128, 128, 256, 256)
    blocks = [
        nn.Sequential(conv(a, a, groups=a, stride=1 if a == b else 2), conv(a, b, 1))
        for a, b in pairwise(widths)
    ]
    return nn.Sequential(
        conv(3, 16), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)
    )


class Branches(nn.Module):
    """Three branches, joined."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        part = outputs // 4
        self.one = conv(inputs, part, 1)
        self.three = nn.Sequential(conv(inputs, part, 1), conv(part, 2 * part))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(inputs, part, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.pooled(x)], 1)


def inception() -> nn.Module:
    """Six of them at two sizes."""
    widths = (48, 96, 128, 192)
    large = [Branches(a, b) for a, b in pairwise(widths)]
    small = [Branches(192, 320), Branches(320, 320), Branches(320, 384)]
    middle, end = nn.MaxPool2d(2), [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(384, 50)]
    return nn.Sequential(conv(3, 48, stride=2), *large, middle, *small, *end)


# ------------------------------------------------------------------------------------------------
# transformers


class Attention(nn.Module):
    """Of four heads."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return out


class Block(nn.Module):
    """Attention, then two linear layers, each beside a way around it."""

    def __init__(self, width: int, causal: bool = False) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, causal)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        out: Tensor = x + self.mlp(x)
        return out


class LanguageModel(nn.Module):
    """Words to scores of words."""

    def __init__(self, known: int, width: int, blocks: int, length: int, causal: bool) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(known, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, causal) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, known, bias=False)
        self.register_buffer("places", torch.arange(length))

    def forward(self, text: Tensor) -> Tensor:
        x = self.word(text) + self.place(self.places)
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores


class Patches(nn.Module):
    """Images to classes, by patches; a mixer has products over patches in place of attention."""

    def __init__(self, size: int, patch: int, width: int, blocks: int, mixes: bool) -> None:
        super().__init__()
        count = (size // patch) ** 2
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.place = nn.Parameter(torch.zeros(1, count, width))
        kinds = [Mixer(count, width) if mixes else Block(width) for _ in range(blocks)]
        self.blocks, self.head = nn.Sequential(*kinds), nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2) + self.place
        classes: Tensor = self.head(self.blocks(tokens).mean(1))
        return classes


class Mixer(nn.Module):
    """Products over patches, then over channels."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.over_patches, self.over_channels = (
            nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size))
            for size in (count, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.over_channels(self.norms[1](x))
        return out


class Translator(nn.Module):
    """torch's own nn.Transformer between two vocabularies."""

    def __init__(self, known: int = 3000, width: int = 128) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(known, width), nn.Embedding(known, width)
        self.both = nn.Transformer(width, 4, 2, 2, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, known)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        scores: Tensor = self.head(self.both(self.source(source), self.target(target)))
        return scores


def pairs_of_texts(draw: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Six texts in two languages."""
    source, target = torch.randint(3000, (2, 6, 33), generator=draw)
    return (source[:, 1:].contiguous(), target[:, :-1].contiguous()), target[:, 1:].contiguous()


# ------------------------------------------------------------------------------------------------
# recurrent models


class RecurrentWords(nn.Module):
    """Words to scores of words, by an LSTM."""

    def __init__(self, known: int = 2000, width: int = 192, hidden: int = 320) -> None:
        super().__init__()
        self.word = nn.Embedding(known, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, known)

    def forward(self, text: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.word(text))[0])
        return scores


class Frames(nn.Module):
    """Frames of sound to phonemes, by two GRU layers in both directions."""

    def __init__(self, hidden: int = 160) -> None:
        super().__init__()
        self.front = nn.Conv1d(40, 96, 5, padding=2)
        self.gru = nn.GRU(96, hidden, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, 60)

    def forward(self, frames: Tensor) -> Tensor:
        x = self.front(frames.transpose(1, 2)).relu().transpose(1, 2)
        scores: Tensor = self.head(self.gru(x)[0])
        return scores


def frames(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Eight sentences of 48 frames."""
    return (
        torch.randn(8, 48, 40, generator=draw),
        torch.randint(60, (8, 48), generator=draw),
    )


# ------------------------------------------------------------------------------------------------
# recommenders


class Clicks(nn.Module):
    """Like DLRM: ten tables whose gradients are sparse, and two perceptrons."""

    def __init__(self, rows: int = 20_000, width: int = 16, tables: int = 10) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum", sparse=True) for _ in range(tables)
        )
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width))
        self.top = nn.Sequential(
            nn.Linear((tables + 1) * width, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
            nn.ReLU(),
            nn.Linear(256, 1),
        )

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        found = [table(ids[:, i : i + 1]) for i, table in enumerate(self.tables)]
        clicks: Tensor = self.top(torch.cat([self.bottom(numbers), *found], 1))
        return clicks.squeeze(1)


def clicks(draw: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """512 rows; few ids come often."""
    ids = (20_000 ** torch.rand(512, 10, generator=draw)).long() - 1
    numbers = torch.randn(512, 13, generator=draw)
    return (numbers, ids.clamp(0)), torch.rand(512, generator=draw).round()


class Towers(nn.Module):
    """A tower for users and one for things, each with a table whose gradient is dense."""

    def __init__(self, users: int = 6000, things: int = 4000, width: int = 48) -> None:
        super().__init__()
        self.user, self.thing = nn.Embedding(users, width), nn.Embedding(things, width)
        self.users, self.things = (
            nn.Sequential(
                nn.Linear(width, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 64)
            )
            for _ in range(2)
        )

    def forward(self, users: Tensor, things: Tensor) -> Tensor:
        return (self.users(self.user(users)) * self.things(self.thing(things))).sum(1)


def meetings(draw: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """1,024 users and things, and whether they went together."""
    users, things = (torch.randint(known, (1024,), generator=draw) for known in (6000, 4000))
    return (users, things), torch.rand(1024, generator=draw).round()


# ------------------------------------------------------------------------------------------------
# U-Nets


class Middle(nn.Module):
    """Attention over all pixels, which know at which time they are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 64), nn.SiLU(), nn.Linear(64, width))
        self.attention = Attention(width, causal=False)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        x = x + self.time(time)[:, :, None, None]
        mixed = self.attention(x.flatten(2).transpose(1, 2))
        out: Tensor = x + mixed.transpose(1, 2).unflatten(2, x.shape[2:])
        return out


class UNet(nn.Module):
    """Down and up again, joined at each size; some are told a time."""

    def __init__(self, widths: tuple[int, ...], timed: bool = False) -> None:
        super().__init__()
        steps = list(pairwise(widths))
        self.first = self.block(3, widths[0])
        self.down = nn.ModuleList(self.block(a, b) for a, b in steps)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in reversed(steps))
        self.joined = nn.ModuleList(self.block(2 * a, a) for a, _ in reversed(steps))
        self.last = nn.Conv2d(widths[0], 3 if timed else 1, 1)
        self.middle = Middle(widths[-1]) if timed else None

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        """Two convolutions."""
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.GroupNorm(4, outputs),
            nn.SiLU(),
        )

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        x, kept = self.first(x), []
        for down in self.down:
            kept.append(x)
            x = down(F.max_pool2d(x, 2))
        if self.middle is not None:
            x = self.middle(x, time)
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([up(x), kept.pop()], 1))
        out: Tensor = self.last(x)
        return out


def masks(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Six images, and which of their pixels are something."""
    x = torch.randn(6, 3, 32, 32, generator=draw)
    return x, torch.rand(6, 1, 32, 32, generator=draw).round()


def noise(draw: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Six images with noise, at a time, and the noise."""
    x, target = torch.randn(2, 6, 3, 32, 32, generator=draw)
    return (x, torch.rand(6, 1, generator=draw)), target


MODELS = {
    "plain": Kind("conv net", plain, images(32, 32, 10), F.cross_entropy, MOMENTUM),
    "vgg": Kind("conv net", vgg, images(6, 32, 100), F.cross_entropy, MOMENTUM),
    "resnet": Kind("conv net", resnet, images(8, 32, 100), F.cross_entropy, MOMENTUM),
    "mobile": Kind("conv net", mobile, images(12, 32, 100), F.cross_entropy, ADAM),
    "inception": Kind("conv net", inception, images(12, 32, 50), F.cross_entropy, SGD),
    "gpt": Kind(
        "transformer",
        lambda: LanguageModel(1000, 192, 4, 64, causal=True),
        words(4, 64, 1000),
        over_words,
        ADAMW,
    ),
    "bert": Kind(
        "transformer",
        lambda: LanguageModel(8000, 128, 3, 48, causal=False),
        words(6, 48, 8000),
        over_words,
        ADAM,
    ),
    "vit": Kind(
        "transformer",
        lambda: Patches(32, 4, 144, 4, mixes=False),
        images(8, 32, 100),
        F.cross_entropy,
        ADAMW,
    ),
    "mixer": Kind(
        "transformer",
        lambda: Patches(32, 4, 192, 5, mixes=True),
        images(10, 32, 100),
        F.cross_entropy,
        ADAM,
    ),
    "translator": Kind("transformer", Translator, pairs_of_texts, over_words, ADAMW),
    "lstm": Kind("recurrent", RecurrentWords, words(8, 24, 2000), over_words, ADAM),
    "gru": Kind("recurrent", Frames, frames, over_words, MOMENTUM),
    "clicks": Kind("recommender", Clicks, clicks, F.binary_cross_entropy_with_logits, SGD),
    "towers": Kind("recommender", Towers, meetings, F.binary_cross_entropy_with_logits, ADAM),
    "unet": Kind(
        "U-Net",
        lambda: UNet((16, 32, 64, 128)),
        masks,
        F.binary_cross_entropy_with_logits,
        ADAMW,
    ),
    "diffuser": Kind("U-Net", lambda: UNet((16, 32, 64, 160), timed=True), noise, F.mse_loss, ADAM),
}
