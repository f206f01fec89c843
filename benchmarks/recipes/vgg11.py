"""VGG-11 at 64 pixels, 8 images a rank: convolutions and linear layers of like size, no
normalisation.

Source: Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image
Recognition", ICLR
2015, table 1.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 100
# channels; after each a maximum over 2 × 2
STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def data() -> DataLoader:
    """Noise for images of 64 × 64 pixels, by a fixed seed."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(512, 3, 64, 64, generator=draw)
    return DataLoader(
        TensorDataset(images, torch.randint(CLASSES, (512,), generator=draw)), batch_size=8
    )


def layers() -> list[nn.Module]:
    """The convolutions."""
    made: list[nn.Module] = []
    channels = 3
    for stage in STAGES:
        for width in stage:
            made += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        made.append(nn.MaxPool2d(2))
    return made


def classifier() -> list[nn.Module]:
    """The linear layers."""
    hidden = 2048
    return [
        nn.Flatten(),
        nn.Linear(4 * STAGES[-1][-1], hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    ]


def model() -> nn.Module:
    """A new one."""
    return nn.Sequential(*layers(), *classifier())


def loss() -> nn.Module:
    """Mean cross entropy."""
    return nn.CrossEntropyLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)
