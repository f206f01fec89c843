"""One call of a layer that is cut by outputs, and the ways in which ranks read its output.

    all ranks read it      they compute together, as functions of cut outputs do (cut_functions.py)
    one rank reads it      it gets the other ranks' parts of its own rows, and computes by itself.
                           No gradient goes back through that
    in unlike ways         for example rank 0 takes a softmax for its log, and the others the loss:
                           all gather the output once, and each computes its own way on the whole

A rank cannot know whether its reading and another rank's come from the same line of the script. So
each reading by all ranks is noted. If rank 0 computes the loss for its log, and then once more to
train, the others have met the first reading, and the second one returns the noted result.

Guarded by tests/alone/test_outputs.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final
from weakref import ref

import torch
from torch import Tensor

from shoal.contracts.attendance import OutputKey, Reading, SharedOutput
from shoal.core.errors import RanksDiffer
from shoal.tensors.boundary import CallRows

GATHERING = "gathering"


class Step(NamedTuple):
    """A function of each row of an output."""

    function: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    def __str__(self) -> str:
        name = getattr(self.function, "__name__", "")
        return f"{name}{self.args}{dict(self.kwargs) or ''}"


Recipe = tuple[Step, ...]  # functions that make an output of a layer's output


class ReadsLocally(Exception):
    """This rank computes by itself.

    Args:
        rows: the values of this rank's rows, as the layer gave them.
        is_alone: whether this is the only rank that reads them.
    """

    def __init__(self, rows: Tensor, *, is_alone: bool) -> None:
        super().__init__()
        self.rows, self.is_alone = rows, is_alone


@final
class SharedCut(SharedOutput):
    """This rank's part of the output of all ranks' rows.

    Args:
        key: the call that made it.
        part: the part, without history.
        rows: the rows of every rank.
        widths: the number of each rank's outputs.
    """

    def __init__(self, key: OutputKey, part: Tensor, rows: CallRows, widths: Sequence[int]) -> None:
        super().__init__(key)
        self._part, self._rows, self._widths = part, rows, widths

    def given(self, reader: int) -> Sequence[Tensor]:
        return [self._part.split(self._rows.counts)[reader]]

    def coming(self) -> Mapping[int, Sequence[Tensor]]:
        mine = self._rows.mine
        others = self._rows.comm.others
        return {rank: [self._part.new_empty(mine, self._widths[rank])] for rank in others}

    def joined(self, coming: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
        comm = self._rows.comm
        parts = {comm.rank: self.given(comm.rank), **coming}
        return [torch.cat([parts[rank][0] for rank in range(comm.size)], 1)]


@final
class OutputCall:
    """A call of a layer, shared by everything that is computed from its output.

    Args:
        product: this rank's part of the output.
        rows: the rows of every rank.
        widths: the number of each rank's outputs.
        layer: the layer, or a part of it that makes an output of its own.
    """

    def __init__(self, product: Tensor, rows: CallRows, widths: Sequence[int], layer: str) -> None:
        assert rows.comm.attendance is not None
        self._product, self._rows, self._widths = product, rows, widths
        key = rows.comm.attendance.output_key(layer)
        self._part = SharedCut(key, product.detach(), rows, widths)
        rows.comm.attendance.share(self._part)
        self.whole_rows: Tensor | None = None  # gathered after ranks have read it in unlike ways
        self._noted: dict[str, list[tuple[Sequence[Tensor], Any]]] = {}  # readings by all ranks

    def hold(self) -> None:
        """Keep this rank's part until the next call of the layer."""
        if (attendance := self._rows.comm.attendance) is not None:
            attendance.hold(self._part)

    def meet(self, number: int, purpose: str, *, trains: bool) -> list[int]:
        """Tell every rank a number before all read the output, and return theirs.

        Raises:
            ReadsLocally: this rank computes by itself.
        """
        comm = self._rows.comm
        numbers = [number] * comm.size
        if comm.attendance is None:
            return comm.numbers(numbers, purpose)
        reading: Reading = comm.attendance.read(self._part, purpose, numbers, trains=trains)
        if reading.told is not None:
            comm.journal.begins(purpose)
            return reading.told
        if reading.values is not None:
            (rows,) = reading.values
            if trains:
                rows = read_alone(rows, f"rank {comm.rank} alone", purpose)
            raise ReadsLocally(rows, is_alone=True)
        comm.journal.begins(f"gathering of the {self._part.key}")
        with torch.enable_grad():
            self.whole_rows = self._rows.to_rows(self._product, self._widths, 1 / comm.size)
        raise ReadsLocally(self.whole_rows, is_alone=False)

    def purpose(self, use: str, recipe: Recipe) -> str:
        """Describe a reading in words, alike on every rank that reads in the same way."""
        steps = "".join(f", {step}" for step in recipe)
        return f"{use} of the {self._part.key}, which is cut{steps}"

    def note(self, purpose: str, given: Sequence[Tensor], result: Any) -> None:
        """Note a reading by all ranks, with gradients that come back through it.

        Gathered rows are forgotten once their gradient has come.
        """
        noted = self._noted.setdefault(purpose, [])
        noted.append((given, result))
        if purpose.startswith(GATHERING) and result.requires_grad:
            call = ref(self)
            result.register_hook(lambda _: _forget(call, purpose))

    def noted(self, purpose: str, given: Sequence[Tensor] = ()) -> Any:
        """Return the result of an earlier reading by all ranks, of the same tensors; or None."""
        for earlier, result in self._noted.get(purpose, ()):
            if all(map(torch.equal, earlier, given)):
                return result
        return None


def _forget(call: ref[OutputCall], purpose: str) -> None:
    if (there := call()) is not None:
        there._noted.pop(purpose, None)


def read_alone(values: Tensor, who: str, purpose: str) -> Tensor:
    """Return values that this rank alone has read; a gradient that comes back is an error."""
    if not values.is_floating_point():
        return values
    anchor = torch.zeros((), requires_grad=True, device="cpu")
    with torch.enable_grad():
        alone: Tensor = _ReadAlone.apply(values, anchor, who, purpose)  # type: ignore[no-untyped-call]
    return alone


class _ReadAlone(torch.autograd.Function):
    """The values of an output that one rank has read alone."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, anchor: Tensor, who: str, purpose: str) -> Tensor:
        ctx.who, ctx.purpose = who, purpose
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        raise RanksDiffer(
            f"{ctx.who} goes back through an output that it has read alone: {ctx.purpose}",
            do="compute the loss that is trained on every rank, and leave it out on all ranks or "
            "on none. What one rank computes for its log, compute under torch.no_grad()",
        )
