"""Period: the gradients of layers that are exchanged and applied once in so many steps.

    step 1, 2 … k−1   as backward ends each gradient is added to its sum here, times this rank's
                      share of rows, and taken away: an optimizer sees none, and leaves the
                      parameter alone
    step k            as a gradient lands its sum is added to it; it goes as always, with the shares
                      of all k steps, by whose mean over ranks the sum is divided

So what is applied is the mean over the rows of k steps. Costs a copy of the gradients of these
layers, and saves k−1 of k of their exchanges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from shoal.core.pieces import line, local_gradient, set_local_gradient, unlined

# of a share. Multiplied and divided by, a number keeps its bits (float16: becomes 0); added to 1 it
# is nothing
LEAST = 2.0**-60


@final
class Period:
    """What is kept of one model's layers with the same period.

    Args:
        every: steps, more than 1.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.steps = 0  # whose gradients are kept
        self.share = 0.0  # this rank's, of all these
        self.parameters: dict[str, nn.Parameter] = {}  # by dotted name
        self._sums: dict[nn.Parameter, Tensor] = {}
        self._whole: set[nn.Parameter] = set()  # whose gradient is that of all k steps by now
        # what the last period gave, until the next backward; None where owners hold it
        self._given: dict[nn.Parameter, Tensor | None] = {}

    def join(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Keep the gradients of these, too."""
        self.parameters.update(parameters)

    @property
    def is_due(self) -> bool:
        """Whether the next backward that sends ends the period."""
        return self.steps == self.every - 1

    @torch.no_grad()
    def keep(self, share: float) -> None:
        """A backward has ended within the period: keep what it has left in `.grad`."""
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
        """In the backward that ends the period: have `.grad` be that of all steps, once."""
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
        """Begin anew, with nothing."""
        self.steps, self.share = 0, 0.0
        self._sums.clear()
        self._whole.clear()
        self._given.clear()

    def end(self) -> None:
        """A period has ended, all of it is in `.grad` or at owners, and the next begins."""
        self.begin()
        self._given = {p: local_gradient(p) for p in self.parameters.values()}

    @torch.no_grad()
    def uncleared(self) -> list[str]:
        """Whose `.grad` still has what the last period gave; asked once, before the next backward.

        What was set to None, replaced or filled with zeros is cleared.
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
        """What is kept of a parameter, flat, in the order of its memory; a copy."""
        if parameter in self._sums:
            return line(self._sums[parameter], parameter).clone()
        return torch.zeros_like(line(parameter, parameter))

    def put(self, parameter: nn.Parameter, flat: Tensor) -> None:
        """Keep this of a parameter, as `sum_of` has it."""
        if flat.any():
            flat = flat.to(parameter.device, parameter.dtype)
            self._sums[parameter] = unlined(flat, parameter)

    def tensors(self) -> Sequence[Tensor]:
        """All that is kept."""
        return list(self._sums.values())
