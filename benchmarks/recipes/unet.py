"""A U-Net of 8 million parameters on 48 × 48 pixels, 4 images a rank: layers that skip, and
transposed convolutions.

Source: Ronneberger et al., "U-Net: Convolutional Networks for Biomedical Image Segmentation",
MICCAI 2015, figure 1.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

PIXELS, WIDTHS = 48, (32, 64, 128, 256, 512)


def block(channels: int, width: int) -> nn.Sequential:
    """Two convolutions."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.SiLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GroupNorm(8, width),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Images (n, 3, pixels, pixels) -> a score for each pixel (n, 1, pixels, pixels)."""

    def __init__(self) -> None:
        super().__init__()
        steps = list(pairwise(WIDTHS))
        self.first = block(3, WIDTHS[0])
        self.down = nn.ModuleList(block(narrow, wide) for narrow, wide in steps)
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in reversed(steps)
        )
        self.joined = nn.ModuleList(block(2 * narrow, narrow) for narrow, _ in reversed(steps))
        self.last = nn.Conv2d(WIDTHS[0], 1, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, kept = self.first(images), []
        for down in self.down:
            kept.append(x)
            x = down(nn.functional.max_pool2d(x, 2))
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([up(x), kept.pop()], 1))
        return self.last(x)


def data() -> DataLoader:
    """Noise for images and their masks, by a fixed seed."""
    draw = torch.Generator().manual_seed(0)
    images, masks = (
        torch.rand(256, channels, PIXELS, PIXELS, generator=draw) for channels in (3, 1)
    )
    return DataLoader(TensorDataset(images, masks.round()), batch_size=4)


def model() -> nn.Module:
    """A new one."""
    return UNet()


def loss() -> nn.Module:
    """Mean binary cross entropy of pixels."""
    return nn.BCEWithLogitsLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(params, lr=1e-3)
