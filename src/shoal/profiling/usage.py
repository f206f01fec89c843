"""Finds layers with a weight that is also used without calling the layer, and says how.

A strategy that rebuilds a weight's gradient from its layer's inputs and outputs (factor), or keeps
a part of it (column, embedding), sees only calls of the layer's own forward. But
nn.MultiheadAttention, for one, reads `out_proj.weight` and never calls `out_proj`. To find such
uses, every torch function of one forward is watched for parameters among its arguments while
another module runs. A view of a weight that was taken before forward escapes this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shoal.contracts.probe import Layer
from shoal.contracts.sample import tensors_in
from shoal.contracts.strategy import Strategy
from shoal.profiling.identity import ROOT
from shoal.profiling.weight_use import UNUSED, WeightUse, like_of

_OWN_FUNCTION: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: F.linear,
    nn.Embedding: F.embedding,
    nn.EmbeddingBag: F.embedding_bag,
}
_NAMES = frozenset(kind.__name__ for kind in _OWN_FUNCTION)


# functions that bring a tensor's values to Python, where they may decide the next call
_LOOKS = frozenset(
    ("item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
)


class Readers(TorchFunctionMode):
    """Parameters that are read, and the first use of a layer's weight outside its own forward.

    It also notes whether a module looks at values before a layer is called.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.borrowed: dict[str, str] = {}
        self.read: set[str] = set()
        # modules that are called after a look at numbers, on which the call may depend
        self.decided: dict[str, str] = {}
        self._decides = ""
        self._model = model
        self._owners = {
            id(p): (layer, name) for layer in layers for name, p in layer.parameters.items()
        }
        self._running: list[tuple[str, nn.Module]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._running and not self._decides and getattr(func, "__name__", "") in _LOOKS:
            name, module = self._running[-1]
            self._decides = (
                f"{name} ({type(module).__name__}) looks at a tensor's values ({func.__name__}), "
                "by which other layers may be called in other steps or on other ranks"
            )
        # only a result with tensors uses the weight: a shape or a type does not
        if next(tensors_in(result), None) is not None:
            for tensor in tensors_in((args, kwargs or {})):
                if id(tensor) in self._owners:
                    self._note(func, tensor, *self._owners[id(tensor)])
        return result

    def _note(self, func: Callable[..., Any], tensor: Tensor, layer: Layer, parameter: str) -> None:
        self.read.add(parameter)
        leaf = parameter.rpartition(".")[2]
        reader, module = self._running[-1] if self._running else ("the loss", None)
        if module is None:
            self.borrowed.setdefault(layer.name, f"its {leaf} is read by {reader}")
        elif all(own is not tensor for own in module._parameters.values()):
            kind = type(module).__name__
            self.borrowed.setdefault(
                layer.name, f"its {leaf} is read by {reader} ({kind}) without calling it"
            )
        elif type(module) in _OWN_FUNCTION and func not in _OWN_FUNCTION.values():
            self.borrowed.setdefault(
                layer.name, f"its {leaf} is read by {getattr(func, '__name__', func)}"
            )

    @contextmanager
    def watching(self) -> Iterator[Readers]:
        """Watch the code inside. The hooks that follow modules are removed at the end."""

        def enter(name: str) -> Callable[[nn.Module, Any], None]:
            def note(module: nn.Module, args: Any) -> None:
                self._running.append((name, module))
                if self._decides:
                    self.decided.setdefault(name, self._decides)

            return note

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._running.pop()

        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                hooks.callback(
                    module.register_forward_pre_hook(enter(name or ROOT), prepend=True).remove
                )
                hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
            with self:
                yield self


def outside_use(
    model: nn.Module,
    layers: Sequence[Layer],
    borrowed: Mapping[str, str],
    rowwise: Mapping[str, bool],
    uses: Mapping[str, WeightUse],
) -> dict[str, str]:
    """Return by layer why its weight cannot be served through its own forward, or ''.

    `borrowed` is from `Readers`. If a layer is `rowwise`, its own forward may be any.
    """
    tied = _tied_modules_of(model)
    return {
        layer.name: tied.get(layer.name)
        or borrowed.get(layer.name)
        or unlike(layer, rowwise=rowwise[layer.name], use=uses[layer.name])
        for layer in layers
    }


def unlike(layer: Layer, *, rowwise: bool, use: WeightUse = UNUSED) -> str:
    """Return why a layer's own forward and backward are not as torch has them, or ''.

    If a layer is `rowwise`, its own forward may be any.
    """
    is_product = use.served and type(layer.module) not in _OWN_FUNCTION
    own = "" if rowwise or is_product else _unlike_torch(layer.module, use.reason)
    return own or _hook_reason(layer)


def kind_of(module: nn.Module) -> str:
    """Return the name of its class, in full if it only imitates a torch class that Shoal serves."""
    kind = type(module)
    imitates = _is_product(module) and kind not in _OWN_FUNCTION and kind.__name__ in _NAMES
    return f"{kind.__module__}.{kind.__qualname__}" if imitates else kind.__name__


def unable_before(strategy: Strategy, module: nn.Module, servers: int) -> str:
    """Return why a strategy cannot serve a module, as far as that shows before a measurement.

    Args:
        strategy: the strategy.
        module: the layer.
        servers: number of hosts that own parameters and do not train.
    """
    like = like_of(module)
    return strategy.unable(kind_of(module), servers, like) or strategy.unfit(module)


def _is_product(module: nn.Module) -> bool:
    """Return whether it looks like one of torch's own products, by its base class or its name."""
    return isinstance(module, tuple(_OWN_FUNCTION)) or type(module).__name__ in _NAMES


def _tied_modules_of(model: nn.Module) -> dict[str, str]:
    """Name the modules that hold a parameter of another module, and that module."""
    holders: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for name, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            holders[id(parameter)].append((name or ROOT, leaf))
    reasons: dict[str, str] = {}
    for held in holders.values():
        for name, leaf in held:
            other = next((other for other, _ in held if other != name), None)
            if other is not None:
                reasons.setdefault(name, f"its {leaf} is tied to {other}")
    return reasons


def _hook_reason(layer: Layer) -> str:
    """Return whether a hook of the user sees or changes the gradients of its parameters."""
    for name, parameter in layer.parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"its {name.rpartition('.')[2]} has a gradient hook"
    return ""


def _unlike_torch(module: nn.Module, reason: str) -> str:
    """Return how a linear layer or table differs from torch's own; '' for other modules."""
    if not _is_product(module):
        return ""
    if type(module) not in _OWN_FUNCTION:
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        kinds = "torch.nn.Linear, torch.nn.Embedding or torch.nn.EmbeddingBag"
        found = f", and {reason}" if reason else ""
        return f"it is a {kind}, not exactly a {kinds}{found}"
    if "forward" in vars(module):
        return "its forward has been replaced"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed from other parameters"
    if not weight.requires_grad:
        return "its weight is frozen"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.max_norm is not None:
            return "max_norm: its forward changes its weight"
        if module.scale_grad_by_freq:
            how_often = "how often an id comes in the whole batch"
            return f"scale_grad_by_freq: its gradient depends on {how_often}"
    return ""
