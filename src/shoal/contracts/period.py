"""Period: the gradients of layers that are exchanged and applied only once in every k steps.

    step 1, 2 … k−1   when backward ends, each gradient is multiplied by this rank's share of rows,
                      added to its sum here, and removed: an optimizer finds no gradient, and so
                      leaves the parameter alone
    step k            when a gradient lands, its sum is added to it. It is sent as usual, with the
                      shares of all k steps. The total is divided by their mean over ranks

So the applied gradient is the mean over the rows of k steps. This costs a copy of the gradients of
these layers, and saves k−1 of k of their exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from shoal.core.pieces import line, local_gradient, set_local_gradient, shape_like

# least share. A number keeps its bits when it is multiplied and divided by this (in float16 it
# becomes 0). Added to 1, it changes nothing
LEAST = 2.0**-60


@final
class Period:
    """Gradients kept for one model's layers with the same period.

    Args:
        every: steps, more than 1.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.steps = 0  # number of backwards with gradients in the sums
        self.share = 0.0  # this rank's share, summed over these steps
        self.parameters: dict[str, nn.Parameter] = {}  # parameters by dotted name
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._whole: set[nn.Parameter] = set()  # parameters with `.grad` over all k steps by now
        # gradients of the last period, until the next backward; None if owners hold them
        self._given: dict[nn.Parameter, Tensor | None] = {}

    def join(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep the gradients of these parameters, too."""
        self.parameters.update(parameters)

    @property
    def is_due(self) -> bool:
        """Whether the next backward that sends ends the period."""
        return self.steps == self.every - 1

    @torch.no_grad()
    def keep(self, share: float) -> None:
        """Keep the gradients that a backward within the period has left in `.grad`."""
        self.steps += 1
        self.share += share
        for parameter in self.parameters.values():
            gradient = local_gradient(parameter)
            if gradient is None:
                continue
            set_local_gradient(parameter, None)
            if parameter in self._sums:
                self._sums[parameter].add_(gradient, alpha=max(share, LEAST))
            else:
                self._sums[parameter] = gradient * max(share, LEAST)

    @torch.no_grad()
    def complete(self, parameter: nn.Parameter, share: float) -> None:
        """Set `.grad` to the sum over all steps, once, in the backward that ends the period."""
        if parameter in self._whole:  # another transfer has another part of it
            return
        self._whole.add(parameter)
        gradient, total = local_gradient(parameter), self._sums.pop(parameter, None)
        if gradient is not None:
            own = gradient * max(share, LEAST)
            set_local_gradient(parameter, own if total is None else total.add_(own))
        elif total is not None:
            set_local_gradient(parameter, total)

    def begin(self) -> None:
        """Drop all gradients and begin a new period."""
        self.steps, self.share = 0, 0.0
        self._sums.clear()
        self._whole.clear()
        self._given.clear()

    def end(self) -> None:
        """Begin the next period. The gradients of the last one are in `.grad` or at owners."""
        self.begin()
        self._given = {p: local_gradient(p) for p in self.parameters.values()}

    @torch.no_grad()
    def list_old_gradients(self) -> list[str]:
        """Return the parameters that still have the last period's gradient in `.grad`. Ask once,
        before the next backward.

        A gradient is cleared if it was set to None, replaced or filled with zeros.
        """
        if not self._given:
            return []
        given, self._given = self._given, {}
        return [
            name
            for name, parameter in self.parameters.items()
            if (gradient := local_gradient(parameter)) is not None
            and (given.get(parameter) is None or given[parameter] is gradient)
            and bool(gradient.any())
        ]

    def sum_of(self, parameter: nn.Parameter) -> Tensor:
        """Return a copy of a parameter's sum, flat, in the order of the parameter's memory."""
        if parameter in self._sums:
            return line(self._sums[parameter], parameter).clone()
        return torch.zeros_like(line(parameter, parameter))

    def put(self, parameter: nn.Parameter, flat: Tensor) -> None:
        """Keep this as a parameter's sum, in the form that `sum_of` returns."""
        if flat.any():
            flat = flat.to(parameter.device, parameter.dtype)
            self._sums[parameter] = shape_like(flat, parameter)

    def tensors(self) -> Sequence[Tensor]:
        """Return all sums."""
        return list(self._sums.values())
