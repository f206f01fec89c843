"""Finds layers that make each output from one row of the weight: they can be cut by outputs.

Such a layer with rows [a, b) of its weight and bias gives outputs [a, b). Torch's own nn.Linear and
nn.Conv2d (of one group) do so. A trial finds it of classes made from them, such as a head that
scales its rows to length 1 for a margin loss. The trial runs the layer's own forward on random
numbers of float64, with each part of its weight that a rank would have.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shoal.contracts.probe import Trial
from shoal.core.pieces import cut_sizes

_KINDS = (nn.Linear, nn.Conv2d)
_NEARLY = 1e-9  # share of the largest output, in float64


def rowwise(trial: Trial) -> dict[str, bool]:
    """Find such layers by name. The sample runs forward once if a layer has to be tried."""
    found = {layer.name: made_of_weight(layer.module) for layer in trial.layers}
    able = [layer for layer in trial.layers if found[layer.name]]
    to_try = [layer for layer in able if type(layer.module) not in _KINDS]
    tried: dict[str, bool] = {}

    def attempt(name: str) -> Any:
        def enter(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            inputs = [*args, *kwargs.values()]
            fits = len(inputs) == 1 and isinstance(inputs[0], Tensor)
            fits = fits and tried.get(name, True) and _gives_parts(module, inputs[0], trial.ranks)
            tried[name] = fits

        return enter

    if to_try:
        with ExitStack() as hooks:
            for layer in to_try:
                hook = layer.module.register_forward_pre_hook(attempt(layer.name), with_kwargs=True)
                hooks.callback(hook.remove)
            trial.sample.loss()
    return found | {layer.name: tried.get(layer.name, False) for layer in to_try}


def row_dims(module: nn.Module) -> int:
    """Return the dimensions in a row of input: features, or channels, height and width."""
    return 3 if isinstance(module, nn.Conv2d) else 1


def made_of_weight(module: nn.Module) -> bool:
    """Return whether its outputs depend on its input, a trainable weight and a bias alone."""
    weight = module._parameters.get("weight")
    if (
        not isinstance(module, _KINDS)
        or weight is None
        or not weight.requires_grad
        or "forward" in vars(module)
    ):
        return False
    if module._parameters.keys() - {"weight", "bias"} or module._buffers or module._modules:
        return False
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        return False
    return type(module) in _KINDS or len(inspect.signature(module.forward).parameters) == 1


class _Looked(nn.Parameter):
    """A parameter that hides `.data`, because a part's data differ from the whole parameter's."""

    @property
    def data(self) -> Any:
        raise AttributeError("data")

    @data.setter
    def data(self, value: Any) -> None:
        raise AttributeError("data")


@torch.no_grad()
def _gives_parts(module: nn.Module, x: Tensor, ranks: int) -> bool:
    """Return whether parts of its parameters give the same parts of its outputs.

    Each row of input must give its own row of output, too.
    """
    own = {
        name: parameter for name, parameter in module._parameters.items() if parameter is not None
    }
    outputs, dim, row = len(own["weight"]), -row_dims(module), x.shape[-row_dims(module) :]
    drawn = {
        name: torch.randn_like(parameter, dtype=torch.float64) for name, parameter in own.items()
    }
    rows = torch.randn(4, *row, dtype=torch.float64, device=x.device)
    spans = [
        *pairwise(accumulate(cut_sizes(outputs, max(ranks, 2)), initial=0)),
        (0, 1),
        (1, outputs),
    ]
    try:
        whole = _with_parameters(module, drawn, rows)
        pairs = [(_with_parameters(module, drawn, rows[1:3]), whole[1:3])]
        for start, stop in spans:
            part = {name: parameter[start:stop] for name, parameter in drawn.items()}
            pairs.append(
                (_with_parameters(module, part, rows), whole.narrow(dim, start, stop - start))
            )
        nearly = _NEARLY * whole.abs().max()
        alike = all(
            got.shape == expected.shape and (got - expected).abs().max() <= nearly
            for got, expected in pairs
        )
    except Exception:  # the user's own forward may raise any exception
        return False
    finally:
        module._parameters.update(own)
    return alike and whole.shape[:1] == rows.shape[:1] and whole.shape[dim] == outputs


def _with_parameters(module: nn.Module, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the output of its own forward, with these tensors in place of its parameters."""
    module._parameters.update(
        {name: _Looked(value, requires_grad=False) for name, value in values.items()}
    )
    output: Tensor = module.forward(x)
    return output
