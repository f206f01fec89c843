"""Handwritten digits: a small convolutional network with a fat fully connected head. The demo:
`make demo`.

scikit-learn's 1,797 real 8x8 images. Of 2.1 million parameters 98 % sit in one Linear layer of the
head, and at this batch its inputs and output gradients are far smaller than its weight: the case in
which sending gradients is a waste.
"""

from collections.abc import Iterable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 12


def data() -> tuple[DataLoader, DataLoader]:
    """1,437 images to train on and 360 to test on, cut by a fixed seed."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    return (
        DataLoader(TensorDataset(images[train], labels[train]), batch_size=32, shuffle=True),
        DataLoader(TensorDataset(images[test], labels[test]), batch_size=120),
    )


def model() -> nn.Module:
    """Two convolutions, then 1,024 -> 2,048 -> 10."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    )


def loss() -> nn.Module:
    """Mean cross entropy over the images."""
    return nn.CrossEntropyLoss()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True)


def accuracy(output: Tensor, target: Tensor) -> tuple[int, int]:
    """Images whose likeliest class is the right one, of how many."""
    return int((output.argmax(1) == target).sum()), len(target)
