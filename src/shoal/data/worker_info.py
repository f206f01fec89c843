"""Torch's record of a worker, as the user's own code sees it: `get_worker_info()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data._utils import worker as torch_worker


class WorkerInfo:
    """Torch's record of a worker, with the user's own dataset."""

    def __init__(self, info: Any, dataset: Any) -> None:
        self._info, self.dataset = info, dataset

    def __getattr__(self, name: str) -> Any:
        if name == "_info":  # a copy is being made, and does not have it yet
            raise AttributeError(name)
        return getattr(self._info, name)


def begin(seen: Any, worker: int, init: Callable[[int], object] | None) -> None:
    """Show the user's code this record, and call the user's `worker_init_fn`."""
    module: Any = torch_worker
    module._worker_info = seen
    if init is not None:
        init(worker)
