"""A vision transformer of 5 million parameters on 64 tiles of 8 × 8 pixels, 16 images a rank.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021; the blocks are torch's own.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES, WIDTH, BLOCKS, HEADS, TILE, PIXELS = 100, 256, 6, 8, 8, 64


class ViT(nn.Module):
    """Images (n, 3, pixels, pixels) -> a score for each class (n, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles = nn.Conv2d(3, WIDTH, TILE, TILE)
        self.position = nn.Parameter(torch.zeros(1, (PIXELS // TILE) ** 2 + 1, WIDTH))
        self.summary = nn.Parameter(torch.zeros(1, 1, WIDTH))
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, BLOCKS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tiles = self.tiles(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.summary.expand(len(tiles), -1, -1), tiles], 1) + self.position
        return self.head(self.norm(self.blocks(tokens)[:, 0]))


def data() -> DataLoader:
    """Noise for images of PIXELS × PIXELS pixels, by a fixed seed."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(1024, 3, PIXELS, PIXELS, generator=draw)
    return DataLoader(
        TensorDataset(images, torch.randint(CLASSES, (1024,), generator=draw)), batch_size=16
    )


def model() -> nn.Module:
    """A new one."""
    return ViT()


def loss() -> nn.Module:
    """Mean cross entropy."""
    return nn.CrossEntropyLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(params, lr=1e-3)
