"""A recipe of one of the small models, which the environment names."""

import os
from collections.abc import Callable, Iterable

import torch
from one_process import built
from small_models import KINDS
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

KIND = KINDS[os.environ["PIPELINE_KIND"]]


def data() -> DataLoader:
    pairs = KIND.batches()
    x, y = (torch.cat([pair[side] for pair in pairs]) for side in (0, 1))
    return DataLoader(TensorDataset(x.float() if x.is_floating_point() else x, y), batch_size=6)


def model() -> nn.Module:
    return built(KIND.make, torch.float32)


def loss() -> Callable[..., Tensor]:
    return KIND.loss_fn


def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)
