"""Profiling leaves no trace: what was before is what is after, bit for bit and object for
object.
"""

from __future__ import annotations

import random
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from profiled_models import Image, Text, ids, pixels, token_loss
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import SampleError
from shoal.profiling.layers import ProfileOptions, profile_model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_parameters_buffers_gradients_and_optimizer_stay() -> None:
    model = Image()
    model.norm.eval()  # on purpose, inside a model in training
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = pixels()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    model.head.weight.grad = None
    before, moments = state(model), str(optimizer.state_dict())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    values = {name: g.clone() for name, g in gradients.items() if g is not None}
    modes = [module.training for module in model.modules()]
    members = [{**vars(module)} for module in model.modules()]
    profile_model(model, F.cross_entropy, [optimizer], (x, y), ThreadComm())
    assert_equal(state(model), before)
    assert str(optimizer.state_dict()) == moments
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert_equal({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, values)
    assert [module.training for module in model.modules()] == modes
    assert model.steps == 1
    for module, attributes in zip(model.modules(), members, strict=True):
        assert vars(module).keys() == attributes.keys()
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._forward_hooks_always_called


def test_running_statistics_stay() -> None:
    """The guard above has its norm in eval mode; here forward does change the buffers."""
    model = Image()
    before = state(model)
    profile_model(model, F.cross_entropy, [], pixels(), ThreadComm())
    assert_equal(state(model), before)
    model(pixels()[0])
    assert model.norm.num_batches_tracked == 1 and not torch.equal(
        model.norm.running_mean, before["norm.running_mean"]
    )


def test_a_model_in_eval_mode_is_trained_and_given_back_in_eval_mode() -> None:
    model, told = Text().eval(), SimpleQueue[bool]()  # a list would be as before
    model.drop.register_forward_hook(lambda module, *_: told.put(module.training))
    options = ProfileOptions(row_parts=1)  # a trial of parts evaluates
    profile_model(model, token_loss, [], (ids(), ids()), ThreadComm(), options)
    seen = [told.get() for _ in range(told.qsize())]
    assert seen and all(seen) and not any(module.training for module in model.modules())


def drawn() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), random.random(), np.random.rand()


class Random(Text):
    """Draws from every generator in forward."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (1 + random.random() + float(np.random.rand()))


def test_random_state_stays() -> None:
    def seed() -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    model = Random()
    seed()
    expected = drawn()
    seed()
    profile_model(
        model, token_loss, [torch.optim.Adam(model.parameters())], (ids(), ids()), ThreadComm()
    )
    assert drawn() == expected


def test_random_state_stays_with_threads_as_ranks() -> None:
    models = [Text() for _ in range(3)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    run(3, lambda comm: profile_model(models[comm.rank], token_loss, [], (ids(), ids()), comm))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_failure_leaves_no_trace_either() -> None:
    model = Image()
    before, rng = state(model), torch.get_rng_state()

    def fails(output: Tensor, y: Tensor) -> Tensor:
        raise ValueError("no")

    with pytest.raises(SampleError, match="ValueError: no"):
        profile_model(model, fails, [], pixels(), ThreadComm())
    assert_equal(state(model), before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_forward_that_changes_its_weights_or_replaces_its_buffers() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("wide", torch.zeros(1).expand(4))

        def forward(self, x: Tensor) -> Tensor:
            self.fc.weight.data.mul_(0.5)
            self.count = self.count + 1
            return self.fc(x)

    model = Changes()
    before, buffer = state(model), model.count
    profile_model(model, F.mse_loss, [], (torch.ones(3, 2), torch.ones(3, 2)), ThreadComm())
    assert_equal(state(model), before)
    assert model.count is buffer


def test_gradients_of_the_sample_stay() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    profile_model(nn.Linear(2, 2), F.mse_loss, [], (x, torch.ones(3, 2)), ThreadComm())
    assert x.grad is None
