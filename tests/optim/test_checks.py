"""Which GradScaler steps an optimizer, and when its numbers are read."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from shoal.optim import checks
from shoal.optim.checks import SeenScaler


def optimizer() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], 0.1)


class OwnScaler(GradScaler):
    """A scaler that steps by way of its base class."""

    def step(self, optimizer, *args, **kwargs):  # type: ignore[no-untyped-def]
        return super().step(optimizer, *args, **kwargs)


@pytest.mark.parametrize("kind", [GradScaler, OwnScaler])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_scaler_is_found_that_steps(kind: type[GradScaler], enabled: bool) -> None:
    stepped, seen = optimizer(), SeenScaler()
    stepped.register_step_pre_hook(lambda *_: seen.look(stepped))
    stepped.step()
    assert seen.state == {}
    scaler = kind("cpu", init_scale=8.0, enabled=enabled)
    scaler.scale(torch.ones(()))
    scaler.step(stepped)
    assert seen.state["scale"] == (8.0 if enabled else 1.0)
    assert ("growth_tracker" in seen.state) == enabled


class OnDevice:
    """A scaler whose numbers are on a device: to read them waits for it."""

    _device = "cuda"

    def __init__(self) -> None:
        self.reads = 0

    def state_dict(self) -> dict[str, float]:
        self.reads += 1
        return {"scale": 8.0}

    def step(self, stepped: torch.optim.Optimizer, seen: SeenScaler) -> None:
        seen.look(stepped)


@pytest.mark.parametrize("fused", [True, False])
def test_a_device_is_seldom_waited_for(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_STEP", OnDevice.step.__code__)
    stepped, seen, scaler = optimizer(), SeenScaler(), OnDevice()
    stepped._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
    for number in range(1, 129):
        scaler.step(stepped, seen)
        assert scaler.reads == (1 + (number - 1) // 64 if fused else number)
