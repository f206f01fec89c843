"""Models, losses and optimizers as people write them, small, for loops by seed (ordinary_loops.py).

A kind of model has columns of rows: the inputs of forward in their order, and `y`, the target.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

CLASSES, WORDS, TOKENS, IGNORED = 5, 17, 4, 3
Columns = dict[str, Tensor]


class Pooled(nn.Module):
    """Tokens through a recurrent network or an encoder, then a linear layer."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(WORDS, 8), body, nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(self.table(x))
        hidden = hidden[0][:, -1] if isinstance(hidden, tuple) else hidden.mean(1)
        return self.head(hidden)


class Bag(nn.Module):
    """A bag of words."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(WORDS, 8, mode="mean"), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.bag(x)))


class Block(nn.Module):
    """A block of a small GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.qkv(self.first(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0])
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    """A language model whose head and table are tied; with targets it returns its loss, too."""

    def __init__(self, own_loss: bool = False) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(WORDS, 8), nn.Embedding(TOKENS, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.table.weight
        self.own_loss = own_loss

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        hidden = self.table(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        if not self.own_loss:
            return logits
        return logits, None if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Autoencoder(nn.Module):
    """Rows through few numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 9), nn.ReLU(), nn.Linear(9, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Siamese(nn.Module):
    """Two inputs through one network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(left), self.net(right)


class Heads(nn.Module):
    """A body with a head of classes and one of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 24), nn.ReLU())
        self.classes, self.numbers = nn.Linear(24, CLASSES), nn.Linear(24, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.body(x)
        return {"classes": self.classes(hidden), "numbers": self.numbers(hidden)}


class Experts(nn.Module):
    """Experts by soft gates; a term of the gates' logits is kept for the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 16) for _ in range(3))
        self.head, self.aux = nn.Linear(16, CLASSES), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        self.aux = logits.logsumexp(1).square().mean()
        shares = logits.softmax(1)
        mixed = sum(
            share[:, None] * expert(x)
            for share, expert in zip(shares.unbind(1), self.experts, strict=True)
        )
        return self.head(torch.relu(mixed))


class Residual(nn.Module):
    """A small ResNet."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8)
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm_a, self.fc = norm(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.max_pool2d(F.relu(x + self.b(F.relu(self.norm_a(self.a(x))))), 2)
        return self.fc(x.mean((2, 3)))


class Perceptron(nn.Module):
    """A perceptron, wide enough to be cut."""

    def __init__(self, width: int, outputs: int = CLASSES) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, width), nn.Linear(width, width)
        self.fc3 = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def _numbers(*shape: int) -> Callable[[int, Generator], Tensor]:
    return lambda rows, g: torch.randn(rows, *shape, generator=g, dtype=torch.float64)


def _whole(high: int, *shape: int) -> Callable[[int, Generator], Tensor]:
    return lambda rows, g: torch.randint(high, (rows, *shape), generator=g)


@dataclass(frozen=True)
class Kind:
    """A kind of model: how it is made, its columns, and which losses fit it."""

    make: Callable[[], nn.Module]
    columns: dict[str, Callable[[int, Generator], Tensor]]
    task: str = "classes"
    norm: bool = False  # whether it has batch norm

    def rows(self, number: int, generator: Generator) -> Columns:
        """Draw rows. A target that is the input is a copy of it."""
        made = {name: draw(number, generator) for name, draw in self.columns.items()}
        return made if "y" in made else {**made, "y": made["x"].clone()}


def _recurrent(kind: Any) -> Callable[[], nn.Module]:
    return lambda: Pooled(kind(8, 8, batch_first=True))


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Pooled(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


_X, _PICTURES, _IDS = _numbers(6), _numbers(3, 6, 6), _whole(WORDS, TOKENS)
_Y, _NEXT = _whole(CLASSES), _whole(WORDS, TOKENS)
_BINARY: Callable[[int, Generator], Tensor] = lambda rows, g: _whole(2, 3)(rows, g).double()  # noqa: E731
KINDS: dict[str, Kind] = {
    "perceptron": Kind(lambda: Perceptron(16), {"x": _X, "y": _Y}),
    "wide perceptron": Kind(lambda: Perceptron(96), {"x": _X, "y": _Y}),
    "labels": Kind(lambda: Perceptron(40, 3), {"x": _X, "y": _BINARY}, "binary"),
    "numbers": Kind(lambda: Perceptron(40, 2), {"x": _X, "y": _numbers(2)}, "numbers"),
    "distributions": Kind(
        lambda: Perceptron(40),
        {"x": _X, "y": lambda rows, g: _numbers(CLASSES)(rows, g).softmax(1)},
        "distributions",
    ),
    "cnn": Kind(lambda: Residual(nn.BatchNorm2d), {"x": _PICTURES, "y": _Y}, norm=True),
    "cnn of groups": Kind(
        lambda: Residual(lambda width: nn.GroupNorm(2, width)), {"x": _PICTURES, "y": _Y}
    ),
    "lstm": Kind(_recurrent(nn.LSTM), {"x": _IDS, "y": _Y}),
    "gru": Kind(_recurrent(nn.GRU), {"x": _IDS, "y": _Y}),
    "encoder": Kind(_encoder, {"x": _IDS, "y": _Y}),
    "bag": Kind(Bag, {"x": _IDS, "y": _Y}),
    "gpt": Kind(Gpt, {"x": _IDS, "y": _NEXT}, "tokens"),
    "gpt with its loss": Kind(lambda: Gpt(True), {"x": _IDS, "y": _NEXT}, "own"),
    "autoencoder": Kind(Autoencoder, {"x": _numbers(12)}, "numbers"),
    "siamese": Kind(Siamese, {"left": _X, "right": _X, "y": _BINARY}, "pairs"),
    "heads": Kind(
        Heads, {"x": _X, "y": _Y, "to": _numbers(2)}, "heads"
    ),  # the target is a tuple of y and to
    "experts": Kind(Experts, {"x": _X, "y": _Y}, "aux"),
}

Named = namedtuple("Named", ["logits", "hidden"])


@dataclass
class Data:
    """An output as a dataclass."""

    logits: Any


DRESSES: dict[str, Callable[[Any], Any]] = {
    "dict": lambda out: {"logits": out},
    "dataclass": lambda out: Data(out),
    "tuple": lambda out: (out, None),
    "namedtuple": lambda out: Named(out, 1.0),
}


def undressed(output: Any) -> Any:
    """Return the logits in an output of any form."""
    if isinstance(output, dict) and "logits" in output:
        return output["logits"]
    if isinstance(output, Data | Named):
        return output.logits
    return output[0] if isinstance(output, tuple) and output[1] is None else output


class Dressed(nn.Module):
    """A model that returns its output in another form."""

    def __init__(self, model: nn.Module, dress: str) -> None:
        super().__init__()
        self.model, self.dress = model, dress

    def forward(self, *args: Any, **named: Any) -> Any:
        return DRESSES[self.dress](self.model(*args, **named))


class Tempered(nn.Module):
    """A loss that learns a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output * self.heat, y)


class Focal(nn.Module):
    """A loss of one's own."""

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(output, y, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).mean()


def _weights() -> Tensor:
    return torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)


def _pairs(output: Any, y: Tensor) -> Tensor:
    gap = (output[0] - output[1]).norm(dim=1)
    return (y[:, 0] * gap.square() + (1 - y[:, 0]) * F.relu(1.5 - gap).square()).mean()


def _heads(output: Any, y: Any) -> Tensor:
    loss = F.cross_entropy(output["classes"], y[0])
    return loss + 0.5 * F.mse_loss(output["numbers"], y[1])


def _of_tokens(how: dict[str, Any]) -> Callable[[Any, Any], Tensor]:
    return lambda out, y: F.cross_entropy(out.view(-1, out.size(-1)), y.view(-1), **how)


_CLASSES: dict[str, Callable[[], Any]] = {
    "module": nn.CrossEntropyLoss,
    "function": lambda: F.cross_entropy,
    "lambda": lambda: lambda out, y: F.cross_entropy(out, y),
    "smoothed": lambda: nn.CrossEntropyLoss(label_smoothing=0.1),
    "weights": lambda: nn.CrossEntropyLoss(weight=_weights()),
    "weights in a lambda": lambda: lambda out, y: F.cross_entropy(out, y, weight=_weights()),
    "ignored": lambda: nn.CrossEntropyLoss(ignore_index=IGNORED),
    "sum": lambda: nn.CrossEntropyLoss(reduction="sum"),
    "likelihood": lambda: lambda out, y: F.nll_loss(F.log_softmax(out, 1), y),
    "margin": nn.MultiMarginLoss,
    "two added": lambda: (
        lambda out, y: F.cross_entropy(out, y) + 0.1 * out.logsumexp(1).square().mean()
    ),
    "tempered": Tempered,
    "focal": Focal,
}
LOSSES: dict[str, dict[str, Callable[[], Any]]] = {
    "classes": _CLASSES,
    "binary": {
        "module": nn.BCEWithLogitsLoss,
        "pos_weight": lambda: nn.BCEWithLogitsLoss(
            pos_weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
        ),
        "function": lambda: F.binary_cross_entropy_with_logits,
        "after a sigmoid": lambda: lambda out, y: F.binary_cross_entropy(out.sigmoid(), y),
        "soft margin": nn.MultiLabelSoftMarginLoss,
    },
    "numbers": {
        "module": nn.MSELoss,
        "function": lambda: F.mse_loss,
        "absolute": nn.L1Loss,
        "smooth": nn.SmoothL1Loss,
        "huber": lambda: nn.HuberLoss(delta=0.5),
        "by hand": lambda: lambda out, y: ((out - y) ** 2).mean(),
        "sum": lambda: nn.MSELoss(reduction="sum"),
    },
    "distributions": {
        "KL": lambda: lambda out, y: F.kl_div(F.log_softmax(out, 1), y, reduction="batchmean"),
        "cross entropy": nn.CrossEntropyLoss,
    },
    "tokens": {
        "flattened": lambda: _of_tokens({}),
        "ignored": lambda: _of_tokens({"ignore_index": IGNORED}),
        "turned": lambda: lambda out, y: F.cross_entropy(out.transpose(1, 2), y),
    },
    "pairs": {"contrastive": lambda: _pairs},
    "heads": {"added": lambda: _heads},
    "aux": {"module": nn.CrossEntropyLoss, "weights": _CLASSES["weights"]},
    "own": {"own": lambda: None},
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, eps=1e-3),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, eps=1e-3, amsgrad=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, eps=1e-3, weight_decay=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.005, eps=1e-2),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.02, eps=1e-3),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01, eps=1e-3),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01, eps=1e-3),
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, lr=0.5, max_iter=2),
}
