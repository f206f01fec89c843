"""Finds layers of any class with an own forward that multiplies input and weight.

Such a layer can be cut by inputs and by outputs, and its gradient is a product of factors, as an
nn.Linear's is. A trial finds this: the sample runs forward while every function of torch that reads
the layer's weight is watched (tensors/weight_products.py). The cost is one forward, if there is a
layer to try.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import is_parametrized

from shoal.contracts.probe import Layer, Probe, Trial
from shoal.contracts.sample import tensors_in
from shoal.core.facts import Facts, LayerProfile, first
from shoal.tensors.weight_products import Product, Products, name_of

LINEAR = "Linear"
_OTHERS = (nn.Embedding, nn.EmbeddingBag, _ConvNd)  # strategies of their own serve these


@dataclass(frozen=True)
class WeightUse(Facts):
    """The use that a layer's own forward makes of its weight.

    Args:
        served: whether multiplying its input with the weight is its only use.
        reason: why it does more, or why that is not known; '' for an nn.Linear.
        turned: whether its output is x·W, and not x·Wᵀ.
        adds_late: whether the bias is added after the product.
        weight, bias: names of the layer's parameters; '' without a bias.
        like: the class in torch.nn that the layer may work like.
    """

    served: bool = False
    reason: str = ""
    turned: bool = False
    adds_late: bool = False
    weight: str = "weight"
    bias: str = "bias"
    like: str = ""

    def works_like(self) -> str:
        return self.like

    @classmethod
    def of_ranks(cls, ranks: Sequence[WeightUse]) -> WeightUse:
        if all(use == ranks[0] for use in ranks):
            return ranks[0]
        reason = first(use.reason for use in ranks) or "ranks use its weight in other ways"
        return cls(reason=reason, like=ranks[0].like)


UNUSED = WeightUse()  # facts of a layer that was not tried


@final
class WeightProbe(Probe):
    """Looks at the functions that read a layer's weight."""

    def measure(self, layer: Layer, trial: Trial) -> WeightUse:
        return weight_uses(trial)[layer.name]


def weight_uses(trial: Trial) -> Mapping[str, WeightUse]:
    """Return how each layer uses its weight, by the layer's name."""
    return trial.once(_find_uses)


def why_no_product(layer: LayerProfile) -> str | None:
    """Return why a layer is no product of its input and its weight; None if it is one."""
    use = layer.measured(WeightUse)
    if layer.kind == LINEAR or use.served:
        return None
    return use.reason or f"this {layer.kind} was not found to multiply its input with its weight"


def like_of(module: nn.Module) -> str:
    """Return "Linear" of a layer that may be a product: it owns a matrix, and a vector or none."""
    dims = sorted(p.dim() for p in module._parameters.values() if p is not None)
    return LINEAR if dims in ([2], [1, 2]) and not isinstance(module, _OTHERS) else ""


def matrix_of(module: nn.Module, use: WeightUse) -> nn.Parameter | None:
    """Return the weight of a layer that is a product; None if it is none."""
    if type(module) is not nn.Linear and not use.served:
        return None
    return module._parameters.get(use.weight)


def _find_uses(trial: Trial) -> dict[str, WeightUse]:
    found: dict[str, WeightUse] = {}
    watched: dict[str, _Uses] = {}
    with ExitStack() as patches:
        for layer in trial.layers:
            if type(layer.module) is nn.Linear:
                found[layer.name] = WeightUse(served=True)
            elif reason := _unfit(layer.module):
                found[layer.name] = WeightUse(reason=reason)
            else:
                watched[layer.name] = _Uses(layer.module)
                patches.enter_context(own_forward(layer.module, watched[layer.name].called))
        if watched:
            trial.sample.loss()
    found |= {name: one.use() for name, one in watched.items()}
    return {
        layer.name: replace(found[layer.name], like=like_of(layer.module)) for layer in trial.layers
    }


def _unfit(module: nn.Module) -> str:
    """Return why a layer cannot be a product; '' if it may be one."""
    if is_parametrized(module):
        return "its weight is computed from other parameters"
    if not like_of(module):
        others = [name for name, p in module._parameters.items() if p is not None]
        return f"it has not just a matrix and a vector, but {', '.join(others)}" if others else ""
    if "forward" in vars(module):
        return "its forward has been replaced"
    weight, _ = _matrix_and_vector(module)
    parameter = module._parameters[weight]
    return "" if parameter is not None and parameter.requires_grad else "its weight is frozen"


def _matrix_and_vector(module: nn.Module) -> tuple[str, str]:
    """Return the names of its matrix and its vector; '' without a vector."""
    dims = {name: p.dim() for name, p in module._parameters.items() if p is not None}
    matrix = next(name for name, dim in dims.items() if dim == 2)
    return matrix, next((name for name, dim in dims.items() if dim == 1), "")


class own_forward:
    """A context in which a function runs in place of a module's own forward, which it receives."""

    def __init__(self, module: nn.Module, called: Callable[..., Any]) -> None:
        self._module, self._called = module, called

    def __enter__(self) -> None:
        vars(self._module)["forward"] = partial(self._called, self._module.forward)

    def __exit__(self, *_: object) -> None:
        del vars(self._module)["forward"]


@final
class _Uses:
    """Watches each call of one layer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._weight, self._bias = _matrix_and_vector(module)
        self._forms: set[tuple[bool, bool]] = set()  # turned, and whether the bias comes late
        self._reason = ""

    def called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one call."""
        own = self.module._parameters
        weight, bias = own[self._weight], own.get(self._bias)
        assert weight is not None
        call = _WatchedCall(weight, bias, (self._weight, self._bias))
        output = call.run(forward, args, kwargs)
        self._forms |= call.forms
        self._reason = self._reason or call.reason
        return output

    def use(self) -> WeightUse:
        """Return how the layer uses its weight."""
        if self._reason:
            return WeightUse(reason=self._reason)
        if not self._forms:
            return WeightUse(reason=f"its forward does not multiply with its {self._weight}")
        if len(self._forms) > 1:
            return WeightUse(reason=f"it multiplies with its {self._weight} in several ways")
        ((turned, late),) = self._forms
        return WeightUse(True, "", turned, late, self._weight, self._bias)


@final
class _WatchedCall(Products):
    """Notes how one call of a layer reads its parameters."""

    def __init__(self, weight: Tensor, bias: Tensor | None, names: tuple[str, str]) -> None:
        super().__init__(weight, bias)
        self._names = dict(zip(map(id, (weight, bias)), names, strict=True))
        self.forms: set[tuple[bool, bool]] = set()
        self.reason = ""
        self._turned_now = False

    def multiply(self, product: Product, plain: Callable[[], Any]) -> Any:
        self._turned_now = product.turned
        if self.bias is None or product.adds:
            self.forms.add((product.turned, False))
        return plain()

    def takes(self, product: Product) -> bool:
        return True

    def with_bias(self, due: Tensor, plain: Callable[[], Any]) -> Any:
        self.forms.add((self._turned_now, True))
        return plain()

    def without_bias(self, func: Callable[..., Any]) -> None:
        bias = self._names[id(self.bias)]
        self._because(f"its {bias} is not added right behind the product with its weight")

    def reads(self, func: Callable[..., Any], values: Sequence[Any]) -> None:
        name = name_of(func)
        if self.has_sign(values):
            self._because(f"its {self._names[id(self.weight)]} is read by {name}")
        for tensor in tensors_in(values):
            if id(tensor) in self._names:
                self._because(f"its {self._names[id(tensor)]} is read by {name}")

    def _because(self, reason: str) -> None:
        self.reason = self.reason or reason
