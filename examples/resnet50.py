"""ResNet-50, in torchvision's layout: 25,557,032 parameters, all but one layer convolutions and
their norms.

He et al., "Deep residual learning for image recognition" (2015), with the stride in the 3x3
convolution as torchvision has it. 128x128 images, 1,000 classes, 4 images a rank, noise made
beforehand.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut, which is a 1x1 convolution where the shape
    changes.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.relu(self.bn3(self.conv3(x)) + shortcut)


def stage(inputs: int, width: int, num_blocks: int, stride: int) -> nn.Sequential:
    """Blocks of one width; the first of them may halve the image."""
    first = Bottleneck(inputs, width, stride)
    return nn.Sequential(
        first, *(Bottleneck(4 * width, width, stride=1) for _ in range(num_blocks - 1))
    )


class ResNet50(nn.Module):
    """A stem, four stages that halve the image and double the channels, and one linear layer."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = stage(64, 64, 3, stride=1)
        self.layer2 = stage(256, 128, 4, stride=2)
        self.layer3 = stage(512, 256, 6, stride=2)
        self.layer4 = stage(1024, 512, 3, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2048, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


def data() -> DataLoader:
    """64 images of noise, sixteen times over, by a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(64, 3, 128, 128, generator=generator)
    labels = torch.randint(1000, (64,), generator=generator)
    return DataLoader(ConcatDataset([TensorDataset(images, labels)] * 16), batch_size=4)


def model() -> nn.Module:
    """A new ResNet-50."""
    return ResNet50()


def loss() -> nn.Module:
    """Mean cross entropy over the images."""
    return nn.CrossEntropyLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True)
