"""A parameter that other ranks have, on a host that never looks at it: its form alone is here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor

from shoal.core.errors import UsageError
from shoal.tensors.cut import Cut


@final
class Nowhere(Cut):
    """A parameter of which this host has no element, and gets none."""

    def part(self, whole: Tensor) -> Tensor:
        return whole.reshape(-1)[:0]

    def whole(self, part: Tensor) -> Tensor:
        raise self._refused()

    def mean(self, wholes: Tensor) -> Tensor:
        raise self._refused()

    def change(
        self, function: Callable[..., Any], subject: Tensor, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        raise self._refused()

    def gradient(self, parameter: Tensor, local: Tensor | None) -> Tensor | None:
        return local

    def _refused(self) -> UsageError:
        return UsageError(
            "a host that brings no rows uses a parameter that it does not hold",
            where=f"parameter {self.name}",
            do="give the layers that use it to one rank",
        )
