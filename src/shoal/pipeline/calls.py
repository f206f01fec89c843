"""Forms of inputs, as ranks tell them to one another before a call of the model.

A call of known forms costs one number to each other rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer
from shoal.pipeline.trees import look_into_dataclasses

_PLAIN = (int, float, str, bool, type(None))
Meet = Callable[[Sequence[int]], Sequence[int]]
Shape = tuple[tuple[int, ...], torch.dtype]


@final
class ModelCall:
    """A call of the model: the form of its arguments, and the tensors among them.

    Args:
        args: the positional arguments.
        kwargs: the arguments by name.
        modes: further values that must be the same on all ranks, by name.
        takes_gradients: whether a tensor among the arguments takes a gradient.
    """

    def __init__(
        self, args: Any, kwargs: Any, modes: Mapping[str, Any], *, takes_gradients: bool = False
    ) -> None:
        look_into_dataclasses((args, kwargs))
        self._leaves, self._form = pytree.tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.modes, self.takes_gradients = dict(modes), takes_gradients

    def with_tensors(self, tensors: Sequence[Any]) -> tuple[Any, Any]:
        """Return the arguments, with other tensors in the places of these."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._form)
        return args, kwargs

    @cached_property
    def form(self) -> str:
        """The arguments but for the tensors' shapes and values, in words, a line each."""
        rest = [leaf for leaf in self._leaves if not isinstance(leaf, Tensor)]
        plain = [leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__ for leaf in rest]
        kinds = [f"{tensor.dim()} dimensions of {tensor.dtype}" for tensor in self.tensors]
        form = " ".join(str(self._form).split())
        lines = {"arguments": form, "values": plain, "tensors": ", ".join(kinds)}
        return _in_lines(lines)

    @cached_property
    def common(self) -> str:
        """Everything that must be the same on every rank, in words, a line each."""
        return "\n".join(filter(None, [self.form, _in_lines(self.modes)]))

    def is_same(self, other: ModelCall) -> bool:
        """Return whether another call has the same arguments, also by their values."""
        if self.common != other.common or self.shapes != other.shapes:
            return False
        return all(map(torch.equal, self.tensors, other.tensors))

    @property
    def shapes(self) -> list[Shape]:
        """The shapes and types of the tensors."""
        return [(tuple(tensor.shape), tensor.dtype) for tensor in self.tensors]


@final
class CallsTold:
    """Calls that ranks have told one another.

    Args:
        comm: the ranks.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._known: dict[tuple[int, int], list[Shape]] = {}

    def tell(
        self, call: ModelCall, purpose: str, meet: Meet | None = None
    ) -> tuple[list[list[Shape]], list[int]]:
        """Return the shapes of each rank's tensors, and a number for each (a collective).

        Args:
            call: the call.
            purpose: the same words on every rank.
            meet: tells each rank a number, in place of `Comm.numbers`.

        Raises:
            RanksDiffer: ranks call with other arguments than tensors, or in other modes.
        """
        common = call.common
        own = number_of(f"{common} {call.shapes}")
        own_numbers = [own] * self._comm.size
        numbers = self._comm.numbers(own_numbers, purpose) if meet is None else meet(own_numbers)
        if any((rank, number) not in self._known for rank, number in enumerate(numbers)):
            told = self._comm.gather_objects(
                (common, [(list(shape), str(dtype)) for shape, dtype in call.shapes]), purpose
            )
            for rank, (theirs, shapes) in enumerate(told):
                if theirs != common:
                    raise RanksDiffer(
                        f"rank {rank} calls the model otherwise than rank {self._comm.rank}",
                        where=purpose,
                        got=_difference(theirs, common),
                        do="call the model with the same arguments on every rank, in the same "
                        "mode. A rank that evaluates alone does so under torch.no_grad()",
                        rank=rank,
                    )
                self._known[rank, numbers[rank]] = [
                    (tuple(shape), getattr(torch, dtype.removeprefix("torch.")))
                    for shape, dtype in shapes
                ]
        return [self._known[rank, number] for rank, number in enumerate(numbers)], [*numbers]


def _in_lines(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in values.items())


def number_of(text: str) -> int:
    """Return a number that other texts have otherwise. Ranks tell it in place of the text."""
    digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def _difference(theirs: str, own: str) -> str:
    """Return the first line in which two texts differ, of both."""
    pairs = zip(theirs.splitlines(), own.splitlines(), strict=False)
    first, second = next((pair for pair in pairs if pair[0] != pair[1]), (theirs, own))
    return f"{first} and {second.partition(': ')[2]}"
