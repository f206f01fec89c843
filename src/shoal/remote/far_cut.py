"""The cut of a parameter of which other hosts have all: this rank has no element of it.

Tables at servers (tables.py) and parameters at hosts without rows (far_parameters.py) share it. A
gradient that the script has read here and changed is sent to the hosts before they use theirs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.contracts.comm import Comm
from shoal.contracts.row_weights import Weighing
from shoal.core.pieces import local_gradient, set_local_gradient
from shoal.tensors.cut import Cut, CutParameter, cut_of, part_of

_OVERWRITING = frozenset(("copy_", "fill_", "zero_"))  # functions that need no values from before


class FarCut(Cut):
    """The cut of a parameter that other hosts have.

    Its local gradient has no elements. If there is one, the hosts have a gradient.

    Args:
        name: the parameter's dotted name.
        parameter: the parameter.
        comm: the ranks that train.
        weighs: tells the weight of this rank's rows in the running backward.
    """

    def __init__(self, name: str, parameter: nn.Parameter, comm: Comm, weighs: Weighing) -> None:
        super().__init__(name, parameter, comm, weighs)
        self._parameter = parameter

    @abstractmethod
    def write_values(self, whole: Tensor) -> None:
        """Give the hosts other values (a collective: rank 0's are taken)."""

    @abstractmethod
    def write_gradient(self, whole: Tensor) -> None:
        """Give the hosts another gradient (a collective: that of rank 0 is taken)."""

    def change(
        self, function: Callable[..., Any], subject: Tensor, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        def whole(leaf: Any) -> Any:
            return cut_of(leaf).whole(part_of(leaf)) if isinstance(leaf, CutParameter) else leaf

        overwrites = function.__name__ in _OVERWRITING
        values = (
            torch.empty_like(self.like, device="cpu") if overwrites else self.whole(subject)
        ).requires_grad_(subject.requires_grad)
        args, kwargs = pytree.tree_map(whole, (tuple(args), dict(kwargs)))
        function(values, *args, **kwargs)  # torch does it, or refuses it
        self.write_values(values.detach())

    def assign(self, parameter: Tensor, whole: Tensor | None) -> None:
        super().assign(parameter, whole)
        self._version = -1  # the hosts do not know it

    def tell(self) -> None:
        """Give the hosts a gradient that the script has read and changed."""
        seen = self._seen
        if (
            seen is not None
            and local_gradient(self._parameter) is self._its_part
            and seen._version != self._version
        ):
            self.write_gradient(seen)
            self._version = seen._version

    def begin(self) -> None:
        """A backward begins on every rank: a gradient that was read is not all of it any more."""
        self.tell()
        if self._seen is not None and self._has_gradient():
            self._mark()
        self._seen = self._its_part = None

    def _has_gradient(self) -> bool:
        return local_gradient(self._parameter) is not None

    def _mark(self) -> None:
        """Note that the hosts have a gradient."""
        self._seen = self._its_part = None
        set_local_gradient(self._parameter, torch.empty_like(self.part(self.like), device="cpu"))
