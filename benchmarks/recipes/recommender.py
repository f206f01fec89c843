"""A recommender as DLRM trains it on Criteo's clicks: 26 sparse nn.EmbeddingBag, two perceptrons.

512 rows a rank.

The tables have the sizes of Criteo's Kaggle set, at most 100,000 rows of 64 each: 215 MB together.
Ids are synthetic and skewed as clicks are: the logarithm of an id is uniform.

Reference: Naumov et al., "Deep Learning Recommendation Model", 2019.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, Dataset

CRITEO = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
MOST, WIDTH, NUMBERS, ROWS = 100_000, 64, 13, 512
SIZES = tuple(min(size, MOST) for size in CRITEO)


class Clicks(Dataset):
    """Rows of 13 numbers, 26 ids, and whether there was a click."""

    def __init__(self, rows: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._numbers = torch.randn(rows, NUMBERS, generator=generator)
        drawn = torch.rand(rows, len(SIZES), generator=generator)
        sizes = torch.tensor(SIZES, dtype=torch.float32)
        self._ids = (sizes.pow(drawn).long() - 1).clamp(min=0)
        self._clicks = torch.rand(rows, generator=generator).round()

    def __len__(self) -> int:
        return len(self._clicks)

    def __getitem__(self, row: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"numbers": self._numbers[row], "ids": self._ids[row]}, self._clicks[row]


def perceptron(*widths: int) -> list[nn.Module]:
    """Linear layers of these widths, a ReLU behind each."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers


class Recommender(nn.Module):
    """Products of every two of 27 vectors, one of the numbers and one of each id."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(size, WIDTH, mode="sum", sparse=True) for size in SIZES
        )
        self.bottom = nn.Sequential(*perceptron(NUMBERS, 512, 256, WIDTH))
        vectors = 1 + len(SIZES)
        pairs = torch.tril_indices(vectors, vectors, -1)
        self.register_buffer("pairs", pairs[0] * vectors + pairs[1])
        self.top = nn.Sequential(*perceptron(pairs.shape[1] + WIDTH, 512, 256), nn.Linear(256, 1))

    def forward(self, numbers: Tensor, ids: Tensor) -> Tensor:
        bottom = self.bottom(numbers)
        looked_up = [table(ids[:, i : i + 1]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([bottom, *looked_up], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.top(torch.cat([bottom, products], 1)).squeeze(1)


def data() -> DataLoader:
    """As many rows as the lab's ranks take in some steps."""
    return DataLoader(Clicks(1 << 13), batch_size=ROWS)


def model() -> nn.Module:
    """A new one."""
    return Recommender()


def loss() -> object:
    """Mean binary cross entropy."""
    return binary_cross_entropy_with_logits


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain SGD, which takes sparse gradients."""
    return torch.optim.SGD(params, lr=0.1)
