"""AlexNet, in torchvision's layout: 61,100,840 parameters, 96 % of them in three fully connected
layers.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks" (2014). 224x224
images, 1,000 classes,
8 images a rank. The images are noise made beforehand: what is measured is the step, not the reading
of data.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset


class AlexNet(nn.Module):
    """Five convolutions, then 9,216 -> 4,096 -> 4,096 -> classes.

    No dropout unless asked for, where torchvision has 0.5: with it N workers and one process draw
    different numbers, and `shoal check` could not compare them.
    """

    def __init__(self, num_classes: int = 1000, dropout: float = 0.0) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(64, 192, kernel_size=5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(192, 384, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(384, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(256, 256, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(images)).flatten(1))


def data() -> DataLoader:
    """64 images of noise, sixteen times over, by a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 224, 224, generator=generator)
    labels = torch.randint(1000, (64,), generator=generator)
    return DataLoader(ConcatDataset([TensorDataset(images, labels)] * 16), batch_size=8)


def model() -> nn.Module:
    """A new AlexNet."""
    return AlexNet()


def loss() -> nn.Module:
    """Mean cross entropy over the images."""
    return nn.CrossEntropyLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(params, lr=0.01, momentum=0.9, fused=True)
