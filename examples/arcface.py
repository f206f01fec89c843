"""A head of cosines with an additive angular margin (ArcFace), as face recognition trains over a
million identities.

A class of its own for the head: `F.linear` on rows of length 1. Each of its outputs follows from
one row of its weight, so Shoal can cut it over the ranks with the loss computed there (`--pin
3=head`, or by itself where there are very many classes): neither logits nor the gradients of the
classes then cross the network.

Source: Deng et al., "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", CVPR 2019,
equation 3. Here on
scikit-learn's digits, whose ten classes need no such thing.
"""

from collections.abc import Iterable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 10
SCALE, MARGIN = 16.0, 0.3  # faces: 64 and 0.5


class Cosine(nn.Linear):
    """(…, M) features to (…, N) cosines of the angles between them and the classes' own."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(F.normalize(input, dim=-1), F.normalize(self.weight, dim=-1))


class ArcFace(nn.Module):
    """Mean cross entropy of (K, N) cosines times SCALE, the angle to the right class widened by
    MARGIN radians.
    """

    def forward(self, cosines: Tensor, target: Tensor) -> Tensor:
        # where the right class is as good as certain, what the others add is below float32
        cosines = cosines.double()
        right = cosines.gather(1, target.unsqueeze(1)).squeeze(1).clamp(-1 + 1e-7, 1 - 1e-7)
        log_sum = torch.logsumexp(SCALE * cosines, 1)
        widened = SCALE * torch.cos(torch.acos(right) + MARGIN)
        changed = torch.exp(widened - log_sum) - torch.exp(SCALE * right - log_sum)
        return (log_sum + torch.log1p(changed) - widened).mean()


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
    """A convolution, 64 features, and the head."""
    features = nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    )
    return nn.Sequential(
        features, nn.Linear(32 * 4 * 4, 64), nn.BatchNorm1d(64), Cosine(64, 10, bias=False)
    )


def loss() -> nn.Module:
    """ArcFace."""
    return ArcFace()


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def accuracy(output: Tensor, target: Tensor) -> tuple[int, int]:
    """Images whose nearest class is the right one, of how many."""
    return int((output.argmax(1) == target).sum()), len(target)
