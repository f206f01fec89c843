"""The output of a pipeline for a rank that reads it alone, or otherwise than the others.

The end gives the reader the values of its rows. The reader computes functions of them by itself. If
all ranks read, but in unlike ways, each gets the values of its rows, with a gradient that goes back
to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.contracts.attendance import OutputKey, SharedOutput
from shoal.contracts.comm import Comm
from shoal.pipeline.calls import ModelCall
from shoal.pipeline.expressions import EndResult, Expression, with_slices
from shoal.tensors.output_call import read_alone

MODEL = "the model in a pipeline"


class ReadsHere(Exception):
    """This rank computes functions of an output by itself.

    Args:
        values: the values of its rows, by their numbers among the output's tensors.
        is_alone: whether no other rank reads them.
    """

    def __init__(self, values: Mapping[int, Tensor], *, is_alone: bool) -> None:
        super().__init__()
        self.values, self.is_alone = values, is_alone


@final
class EndPart(SharedOutput):
    """The output of all ranks' rows, which the end has.

    Args:
        key: the call that made it.
        comm: the ranks.
        end: the rank with the end.
        ended: the output.
        device: the device of values that come here.
    """

    def __init__(
        self, key: OutputKey, comm: Comm, end: int, ended: Expression, device: torch.device
    ) -> None:
        super().__init__(key)
        self._comm, self._end, self._device = comm, end, device
        self.readings: list[tuple[ModelCall, Any]] = []  # functions of all ranks, and results
        self.gathered: Mapping[int, Tensor] | None = None  # values, read in unlike ways
        # numbers are told as soon as there are any
        self.numbers = [n for n, form in enumerate(ended.forms) if not is_number(form)]
        self._forms = [(ended.forms[n].shape, ended.forms[n].dtype) for n in self.numbers]
        self._values = {
            rank: [tensors[n].detach() for n in self.numbers]
            for rank, tensors in ended.of_ranks.items()
        }

    def given(self, reader: int) -> Sequence[Tensor]:
        return self._values.get(reader, ())

    def coming(self) -> Mapping[int, Sequence[Tensor]]:
        if self._comm.rank == self._end:
            return {}
        empty = [torch.empty(s, dtype=dtype, device=self._device) for s, dtype in self._forms]
        return {self._end: empty}

    def joined(self, coming: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
        return list(coming.get(self._end, self.given(self._comm.rank)))

    def noted(self, call: ModelCall) -> Any:
        """Return the results of an earlier reading of all ranks, of the same call; or None."""
        return next((made for earlier, made in self.readings if earlier.is_same(call)), None)

    def dropped(self) -> None:
        self.readings, self.gathered = [], None

    def named(self, values: Sequence[Tensor], trains: str) -> dict[int, Tensor]:
        """Return values that this rank alone has read, by their numbers.

        `trains` is the purpose if a gradient may come back, else "".
        """
        who = f"rank {self._comm.rank} alone"
        own = [read_alone(value, who, trains) if trains else value for value in values]
        return dict(zip(self.numbers, own, strict=True))


@final
class LocalResults:
    """The results of expressions for this rank's rows, which it computes by itself.

    Args:
        read: returns the values of another forward's output.
        known: the results of expressions that are known.
    """

    def __init__(
        self,
        read: Callable[[Any], Mapping[int, Tensor]],
        known: Mapping[Expression, Mapping[int, Tensor]],
    ) -> None:
        self._read, self._known = read, dict(known)

    def of(self, result: EndResult) -> Tensor:
        """Return a result."""
        expression, number = result.expression, result.number
        if number in expression.told:
            return expression.told[number]
        if expression not in self._known:
            self._known[expression] = self._compute(expression)
        return self._known[expression][number]

    def _compute(self, expression: Expression) -> Mapping[int, Tensor]:
        if expression.function is None:
            return self._read(expression.forwards[0])
        args, kwargs = with_slices(
            pytree.tree_map(
                lambda leaf: self.of(leaf) if isinstance(leaf, EndResult) else leaf,
                expression.arguments,
            )
        )
        with expression.modes.again():
            output = expression.function(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        return dict(enumerate(tensors))


def is_number(form: Tensor) -> bool:
    """Return whether a result is a number, which is told every rank as soon as it is computed."""
    return not form.dim() and form.is_floating_point()
