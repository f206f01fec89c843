"""AlexNet with a head of 21,841 classes (ImageNet-22k), 8 images a rank."""

import importlib.util
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_PATH = Path(__file__).parents[2] / "examples" / "alexnet.py"
_SPEC = importlib.util.spec_from_file_location("alexnet", _PATH)
alexnet = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(alexnet)

NUM_CLASSES = 21_841
optimizer, loss = alexnet.optimizer, alexnet.loss


def data() -> DataLoader:
    """256 images of noise, by a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(256, 3, 224, 224, generator=generator)
    return DataLoader(
        TensorDataset(images, torch.randint(NUM_CLASSES, (256,), generator=generator)), batch_size=8
    )


def model() -> nn.Module:
    """A new one."""
    return alexnet.AlexNet(NUM_CLASSES)
