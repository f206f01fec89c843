"""Numbers that the end tells ranks, with their types."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.contracts.comm import Comm

_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def with_kind(number: Tensor) -> Tensor:
    """Return a number and its type as a message."""
    told = number.detach().to(torch.float64).reshape(1)
    code = torch.tensor([_DTYPES.index(number.dtype)], dtype=torch.float64, device=told.device)
    return torch.cat([told, code])


def received_number(comm: Comm, source: int, device: torch.device) -> Tensor:
    """Return the number of a message that a rank sends."""
    kind = torch.zeros(2, dtype=torch.float64, device=device)
    comm.finish([comm.receive(kind, source)])
    return kind[0].to(_DTYPES[int(kind[1])])
