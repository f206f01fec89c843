"""The scale of a loss, in mixed precision: which GradScaler steps an optimizer, and its state.

Gradients are summed while they are scaled, so ranks with unlike scales train different models. An
optimizer does not know its scaler. But `scaler.step(optimizer)` calls `optimizer.step()`, so the
scaler is found among the callers of a step. Ranks compare its state in the next backward
(engine/common.py). Costs a look at some frames in each step, and a copy of two numbers if there is
a scaler. It has waited for the device just before, unless it steps a fused optimizer: then the look
is taken once in many steps. Guarded by tests/equivalence/test_in_common.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import final

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

_STEP = GradScaler.step.__code__
_MOST_FRAMES = 24  # callers of a step
_SELDOM = 64  # steps of a fused optimizer on a device, from one look to the next


@final
class SeenScaler:
    """The state of the scaler that has stepped an optimizer last, as numbers by name."""

    def __init__(self) -> None:
        self.state: Mapping[str, float] = {}
        self._steps = 0

    def look(self, optimizer: Optimizer) -> None:
        """Find the scaler among the callers of a step, and note its state."""
        frame: FrameType | None = sys._getframe(1)
        for _ in range(_MOST_FRAMES):
            if frame is None or frame.f_code is _STEP:
                break
            frame = frame.f_back
        if frame is None or frame.f_code is not _STEP:
            return
        scaler: GradScaler = frame.f_locals["self"]
        waits = getattr(optimizer, "_step_supports_amp_scaling", False) and scaler._device != "cpu"
        if not waits or self._steps % _SELDOM == 0:
            state = scaler.state_dict() or {"scale": 1.0}  # without a state, it is disabled
            self.state = {name.lstrip("_"): float(value) for name, value in state.items()}
        self._steps += 1
