"""Tensors of a GPU on their way through the host's memory, because gloo sends from there.

    send      GPU ──copy──▶ pinned memory ──gloo──▶       waits for this copy alone
    receive   ──gloo──▶ pinned memory ──copy──▶ GPU       waits for nothing: queued on the stream

Pinned memory comes from PyTorch's own pool. A block returns to it when the copies queued from it
are done. So after the first steps no more memory has to be pinned.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """Return the tensor's values in the host's memory; the tensor itself if it lies there.

    This waits until the calling thread's stream has computed them. It does not wait for the
    device's other streams.
    """
    if tensor.device.type == "cpu":
        return tensor
    at_host = beside(tensor)
    at_host.copy_(tensor.detach(), non_blocking=True)
    torch.accelerator.current_stream(tensor.device).record_event().synchronize()
    return at_host


@final
class Later:
    """Numbers of a device on their way to the host, without a thread that waits for them."""

    def __init__(self, numbers: Tensor) -> None:
        self._at_host = beside(numbers)
        self._at_host.copy_(numbers, non_blocking=True)
        self._come = torch.accelerator.current_stream(numbers.device).record_event()

    def has_come(self) -> bool:
        """Return whether the numbers are there."""
        return self._come.query()

    def read(self) -> list[float]:
        """Return the numbers, once they are there."""
        self._come.synchronize()
        return self._at_host.tolist()


def beside(tensor: Tensor) -> Tensor:
    """Make memory in the host for values that go to, or come from, a tensor of a device."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
