"""The layout of examples/gpt.py with 50,257 words, untied: two windows of 64 words a rank, of equal
chances.
"""

import importlib.util
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

_PATH = Path(__file__).parents[2] / "examples" / "gpt.py"
_SPEC = importlib.util.spec_from_file_location("gpt", _PATH)
gpt = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpt)

NUM_WORDS = 50_257
optimizer, loss = gpt.optimizer, gpt.loss


def data() -> DataLoader:
    """Two windows a rank, by a fixed seed."""
    windows = torch.randint(
        NUM_WORDS, (256, gpt.CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )
    return DataLoader(TensorDataset(windows[:, :-1], windows[:, 1:]), batch_size=2)


def model() -> nn.Module:
    """44 million parameters, 39 of them in the two ends."""
    return gpt.GPT(NUM_WORDS, gpt.CONTEXT)
