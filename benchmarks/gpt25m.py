"""The recipe of examples/gpt.py at 25 million parameters, four windows of text a rank."""

import importlib.util
from pathlib import Path

from torch import nn
from torch.utils.data import DataLoader

_PATH = Path(__file__).parent.parent / "examples" / "gpt.py"
_SPEC = importlib.util.spec_from_file_location("gpt", _PATH)
gpt = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(gpt)

optimizer, loss = gpt.optimizer, gpt.loss


def data() -> DataLoader:
    """Four windows of text a rank."""
    return DataLoader(gpt.data()[0].dataset, batch_size=4, shuffle=True)


def model() -> nn.Module:
    """Eight blocks of width 512."""
    return gpt.GPT(len(gpt.LETTERS), gpt.CONTEXT, width=512, num_blocks=8, num_heads=8)
