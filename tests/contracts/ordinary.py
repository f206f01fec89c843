"""What a model and its optimizer look like before `parallelize`, to be found again afterwards."""

from __future__ import annotations

import copy
import io
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.contracts.comm import Comm, Pending
from shoal_tools.testing.comm_wrapper import Around

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
)


@dataclass(frozen=True)
class Ordinary:
    """A model and its optimizer as one process has them."""

    model: nn.Module
    optimizer: Optimizer
    form: Any

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer) -> Ordinary:
        """As they are now."""
        return cls(model, optimizer, _form(model, optimizer))

    def assert_again(self) -> None:
        """They are the same objects, of the same form, and nothing of Shoal's is left on them."""
        assert _form(self.model, self.optimizer) == self.form
        for parameter in self.model.parameters():
            assert not parameter._backward_hooks
            assert not parameter._post_accumulate_grad_hooks
            gradient = parameter.grad
            assert gradient is None or gradient.shape == parameter.shape
        named = dict(self.model.named_parameters())
        assert all(any(key is p for p in named.values()) for key in self.optimizer.state)
        assert all(
            value.shape == parameter.shape
            for parameter, state in self.optimizer.state.items()
            for name, value in state.items()
            if isinstance(value, Tensor) and name != "step"
        )
        for each in (self.model, self.optimizer, copy.deepcopy(self.model)):
            assert b"shoal" not in _saved(each)


def _form(model: nn.Module, optimizer: Optimizer) -> Any:
    """All but values."""
    modules = {
        name: (id(module), type(module), sorted(vars(module)), _hooks(module))
        for name, module in model.named_modules()
    }
    parameters = {
        name: (id(p), type(p), sorted(vars(p)), p.shape, p.stride(), p.dtype, p.requires_grad)
        for name, p in model.named_parameters()
    }
    groups = [
        [(id(group), sorted(group), list(map(id, group["params"])))]
        for group in optimizer.param_groups
    ]
    hooks = [
        list(hooks.values())
        for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    ]
    return modules, parameters, type(optimizer), sorted(vars(optimizer)), groups, hooks


def _hooks(module: nn.Module) -> list[Any]:
    return [list(getattr(module, name).values()) for name in _HOOKS]


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@final
class CountedChannels(Around):
    """`inner`, which knows the names of the channels that are open."""

    def __init__(self, inner: Comm, name: str = "", channels: list[str] | None = None) -> None:
        super().__init__(inner)
        self._name = name
        self.channels = [] if channels is None else channels

    def send(self, tensor: Tensor, to: int) -> Pending:
        return self.inner.send(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> Pending:
        return self.inner.receive(tensor, source)

    def channel(self, name: str, *, idle: bool = False) -> CountedChannels:
        self.channels.append(name)
        return CountedChannels(self.inner.channel(name, idle=idle), name, self.channels)

    def group(self, ranks: Sequence[int]) -> CountedChannels:
        return CountedChannels(self.inner.group(ranks), "", self.channels)

    def close(self) -> None:
        if self._name in self.channels:
            self.channels.remove(self._name)
        super().close()


def lanes() -> int:
    """How many lanes have a thread, on all ranks of this process together."""
    return sum(thread.name == "shoal-lane" for thread in threading.enumerate())


def becomes(value: Callable[[], Any], expected: Any, within_s: float = 5.0) -> bool:
    """Whether something takes a value soon, as of what other threads do."""
    end_s = time.monotonic() + within_s
    while value() != expected and time.monotonic() < end_s:
        time.sleep(0.01)
    return bool(value() == expected)
