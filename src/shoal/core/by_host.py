"""Tensors of a GPU on their way through the host, where gloo carries them.

    send      GPU ──copy──▶ pinned memory ──gloo──▶       waits for this copy alone
    receive   ──gloo──▶ pinned memory ──copy──▶ GPU       waits for nothing: queued on the stream

Pinned memory comes from PyTorch's own pool, which takes a block back when the copies queued from it
are done. So after the first steps no memory is pinned any more.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


def staged(tensor: Tensor) -> Tensor:
    """The tensor's values at the host; the tensor itself where it lies there.

    Waits until the device has computed them. Nothing else that the device does is waited for: of
    its streams, only the calling thread's.
    """
    if tensor.device.type == "cpu":
        return tensor
    at_host = beside(tensor)
    at_host.copy_(tensor.detach(), non_blocking=True)
    torch.accelerator.current_stream(tensor.device).record_event().synchronize()
    return at_host


@final
class Later:
    """Some numbers of a device, on their way to the host, which nobody waits for."""

    def __init__(self, numbers: Tensor) -> None:
        self._at_host = beside(numbers)
        self._at_host.copy_(numbers, non_blocking=True)
        self._come = torch.accelerator.current_stream(numbers.device).record_event()

    def has_come(self) -> bool:
        """Whether they are there."""
        return self._come.query()

    def read(self) -> list[float]:
        """The numbers, once they are there."""
        self._come.synchronize()
        return self._at_host.tolist()


def beside(tensor: Tensor) -> Tensor:
    """Memory at the host for values that go to, or come from, a tensor of a device."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
