"""MobileNet at 64 pixels, 16 images a rank: 3 million parameters in many small layers, and much to
compute for them.

Source: Howard et al., "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision
Applications",
2017, table 1.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 100
# (channels in, out, stride) of each convolution by channel with its mixing one
LAYERS = (
    (32, 64, 1),
    (64, 128, 2),
    (128, 128, 1),
    (128, 256, 2),
    (256, 256, 1),
    (256, 512, 2),
    *((512, 512, 1),) * 5,
    (512, 1024, 2),
    (1024, 1024, 1),
)


def convolution(
    channels: int, width: int, size: int, stride: int, groups: int = 1
) -> nn.Sequential:
    """One with its normalisation."""
    made = nn.Conv2d(channels, width, size, stride, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(made, nn.BatchNorm2d(width), nn.ReLU())


def data() -> DataLoader:
    """Noise for images of 64 × 64 pixels, by a fixed seed."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(1024, 3, 64, 64, generator=draw)
    return DataLoader(
        TensorDataset(images, torch.randint(CLASSES, (1024,), generator=draw)), batch_size=16
    )


def model() -> nn.Module:
    """A new one."""
    body = [
        part
        for channels, width, stride in LAYERS
        for part in (
            convolution(channels, channels, 3, stride, channels),
            convolution(channels, width, 1, 1),
        )
    ]
    first = convolution(3, 32, 3, 2)
    return nn.Sequential(
        first, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, CLASSES)
    )


def loss() -> nn.Module:
    """Mean cross entropy."""
    return nn.CrossEntropyLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, weight_decay=1e-4)
