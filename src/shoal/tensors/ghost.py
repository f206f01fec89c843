"""The native side of a tensor that has its values elsewhere.

Such a tensor answers torch's functions by itself. But an autograd.Function takes it as it lies in
memory, with neither values nor history, and its gradient would be lost. So the tensor natively
takes a gradient, and raises an error if one comes. Guarded by tests/served/test_habits.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import UsageError


def ghost(shape: Any, dtype: torch.dtype, device: torch.device, *, grad: bool) -> Tensor:
    """Return a tensor of one number in memory; with `grad` it refuses native gradients."""
    like = torch.empty((), dtype=dtype, device=device).expand(shape)
    if grad:
        like.requires_grad_().register_hook(_refuse)
    return like


def check_native(tensor: Tensor) -> None:
    """Raise UsageError if an autograd.Function has returned this tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        node = tensor.grad_fn
    if node is not None and not node.name().startswith("AliasBackward"):
        _refuse(tensor)


def _refuse(_: Tensor) -> None:
    raise UsageError(
        "an autograd.Function, or a reentrant checkpoint, takes an output that has its values "
        "elsewhere, and would lose its gradient",
        do="call it in the model's forward, checkpoint with use_reentrant=False, or give "
        'parallelize pins={"*": "replicate"}',
    )
