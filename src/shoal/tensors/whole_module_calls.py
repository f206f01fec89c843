"""Calls without gradients, in which a rank may be alone: modules then use whole parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shoal.contracts.comm import Comm
from shoal.tensors.cut import cut_of, is_cut


def tell_numbers(comm: Comm, numbers: Sequence[int], purpose: str) -> list[int] | None:
    """Tell rank r `numbers[r]` before a call, and return the numbers from the other ranks.

    Return None if this rank makes a call without gradients alone. In training all ranks call.
    """
    if comm.attendance is None or torch.is_grad_enabled():
        return comm.numbers(numbers, purpose)
    return comm.attendance.numbers(numbers, purpose)


@contextmanager
def holding_wholes(modules: Iterable[nn.Module], comm: Comm) -> Iterator[None]:
    """Make modules hold whole parameters in this context, instead of parts.

    This rank must be alone.
    """
    attendance = comm.attendance
    assert attendance is not None
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in modules:
            for leaf, parameter in module._parameters.items():
                if parameter is not None and is_cut(parameter):
                    replaced.append((module, leaf, parameter))
                    whole = attendance.whole(cut_of(parameter))
                    module._parameters[leaf] = nn.Parameter(whole, requires_grad=False)
        yield
    finally:
        for module, leaf, parameter in replaced:
            module._parameters[leaf] = parameter
