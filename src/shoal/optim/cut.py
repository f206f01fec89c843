"""Parameters that are cut over the ranks: each rank updates its part with the optimizer's own code.

    step              the parameters are the parts, for as long as the optimizer's own code runs
    state_dict        every rank's parts are put together (a collective)
    load_state_dict   this rank keeps its parts

The update of a part equals the same part of the whole's update: otherwise the layer would not have
been cut (profiling/updates.py). Guarded by tests/equivalence/test_cut.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.contracts.attendance import Wanted
from shoal.contracts.comm import Comm
from shoal.core.pieces import set_local_gradient
from shoal.optim.owners import norm, scale
from shoal.optim.part import Keeping, Part, States
from shoal.profiling.updates import part_of as part_of_state
from shoal.tensors.cut import Cut, SpreadCut, cut_of, is_cut, lay_like, opened, part_of


@final
class CutStates:
    """The states of this rank's parts. They outlive the model and its optimizer.

    It holds no parameter, because hooks on parameters lead to the model.
    """

    def __init__(self) -> None:
        self.of_cuts: list[tuple[Cut, dict[str, Any]]] = []

    def parts(self) -> list[tuple[SpreadCut, Tensor, Tensor]]:
        """Return each cut with its part of a state, twice. The order is the same on all ranks."""
        return [
            (cut, value, value)
            for cut, state in self.of_cuts
            for value in state.values()
            if isinstance(cut, SpreadCut)
            and isinstance(value, Tensor)
            and value.shape == cut.part(cut.like).shape
        ]


@final
class CutPart(Part):
    """The parameters that are cut over the ranks of one model.

    Args:
        optimizer: the user's optimizer.
        boundary: the channel that the model's cut layers use. The part knows them by it.
    """

    def __init__(self, optimizer: Optimizer, boundary: Comm) -> None:
        super().__init__(optimizer)
        self._boundary = boundary
        self._opened = ExitStack()
        self._states: States = {}  # within a step they are in `optimizer.state`
        self.states = CutStates()

    def has(self, parameter: nn.Parameter) -> bool:
        return is_cut(parameter) and cut_of(parameter).comm is self._boundary

    def open(self) -> None:
        """Let the parameters be the parts, with gradients of the same memory layout.

        Fused optimizers rely on the layout. A gradient that was looked at is a view of the whole
        one, and may have another layout.
        """
        if (attendance := self._boundary.attendance) is not None:
            attendance.step_begins()
        parameters, state = self.parameters(), self.optimizer.state
        self.absorb(parameters)
        for parameter in parameters:
            state.pop(parameter, None)
            if parameter in self._states:
                state[parameter] = self._states.pop(parameter)
        self._opened.callback(self._put_away, parameters)
        for parameter in parameters:
            gradient, part = cut_of(parameter).settle(parameter), part_of(parameter)
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if gradient.stride() != part.stride():
                self._opened.callback(set_local_gradient, parameter, gradient)
                set_local_gradient(parameter, torch.empty_like(part).copy_(gradient))
        self._opened.enter_context(opened(parameters))  # step 7

    def close(self) -> None:
        self._opened.close()
        if (attendance := self._boundary.attendance) is not None:
            attendance.step_ends()

    def _put_away(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep the parts' states, and leave entries that stand for the whole states."""
        state = self.optimizer.state
        for parameter in parameters:
            if parameter in state:
                self._states[parameter] = state.pop(parameter)
        self.mark({**self._states, **self._entries})
        self._show_states()

    def _show_states(self) -> None:
        """Show the states to ranks that are alone."""
        if self._boundary.attendance is not None:
            self.states.of_cuts = [(cut_of(p), state) for p, state in self._states.items()]

    def norms(self, order: float) -> list[Tensor]:
        """Return the norm of every rank's parts, in rank order."""
        if not self.parameters():
            return []
        self._settle()
        local = norm([gradient for gradient in self.local_gradients() if gradient.numel()], order)
        norms = [torch.empty_like(local) for _ in range(self._boundary.size)]
        self._boundary.journal.begins(
            "optimizer.clip_grad_norm_(): norms of parameters that are cut"
        )
        self._boundary.all_gather(norms, local)
        return norms

    def _settle(self) -> None:
        for parameter in self.parameters():
            cut_of(parameter).settle(parameter)

    def scale(self, factor: Tensor) -> None:
        self._settle()
        scale(self.local_gradients(), factor)

    def whole_state(self) -> States:
        attendance = self._boundary.attendance
        if attendance is not None and self.parameters():
            purpose = "optimizer.state_dict(): state of parameters that are cut"
            if attendance.numbers((), purpose, Wanted.STATES) is None:
                whole = attendance.whole
                return self.kept_state(Keeping(lambda part, cut: lay_like(cut.layout, whole(part))))
        return self.kept_state(Keeping(_whole))

    def kept_state(self, keeping: Keeping) -> States:
        kept: States = {}
        for parameter in self.parameters():
            if parameter in self._states:
                cut, part = cut_of(parameter), part_of(parameter)
                assert isinstance(cut, SpreadCut)
                kept[parameter] = {
                    name: keeping.spread(value, cut) if _is_part(value, part) else value
                    for name, value in self._states[parameter].items()
                }
        return kept

    def take_state(self) -> None:
        state = self.optimizer.state
        self._states = {
            parameter: part_of_state(state.pop(parameter), cut.like, cut.part)
            for parameter in self.parameters()
            for cut in [cut_of(parameter)]
            if parameter in state
        }
        self.mark(self._states)
        self._show_states()

    def state_bytes(self) -> int:
        values = (value for state in self._states.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _whole(part: Tensor, cut: SpreadCut) -> Tensor:
    """Return the whole tensor with a part on every rank, in the parameter's memory layout."""
    purpose = f"optimizer.state_dict(): state of {cut.name}"
    return lay_like(cut.layout, cut.gathered(part, purpose))


def _is_part(value: Any, part: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == part.shape
