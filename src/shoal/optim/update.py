"""One optimizer's update of the pieces that a rank owns, made on a lane by a copy of the optimizer.

10  the update of the own pieces
11  the return: their new values go to all ranks

Workers and servers make it in the same way. The numbers are from
docs/ideas/walk-optimizer-step.md. Guarded by tests/equivalence/test_owners.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer, Turn
from shoal.core.errors import UsageError
from shoal.core.pieces import Piece, line, local_gradient
from shoal.optim.part import States
from shoal.profiling.updates import make_step, part_of
from shoal.remote.verbs import PieceOrder


def steps_of(
    transfer: OwnedTransfer, group_of: Mapping[nn.Parameter, int], rank: int
) -> dict[int, PieceOrder]:
    """Return a rank's orders for its pieces of a transfer, by number, as of now."""
    steps = {}
    for number, piece in enumerate(transfer.owned[rank]):
        parameter = piece.parameter
        if parameter in group_of:
            whole = local_gradient(parameter)
            gradient = None if whole is None else piece.of(whole).clone()
            steps[number] = PieceOrder(group_of[parameter], parameter in transfer.held, gradient)
    return steps


def state_of_pieces(
    transfer: OwnedTransfer, rank: int, states: Mapping[Tensor, Any]
) -> dict[int, dict[str, Any]]:
    """Return a rank's pieces of a state in one-process form, by number, if they have a state."""
    return {
        number: part_of(states[piece.parameter], piece.parameter, partial(_form_part, piece))
        for number, piece in enumerate(transfer.owned[rank])
        if piece.parameter in states
    }


def put_states(
    updates: Mapping[OwnedTransfer, PieceUpdate], states: Sequence[Mapping[int, dict[str, Any]]]
) -> None:
    """Put states of the rank's own pieces, by number, into updates."""
    for update, pieces in zip(updates.values(), states, strict=True):
        update.take_state(pieces)


def _form_part(piece: Piece, whole: Tensor) -> Tensor:
    """Return a piece of a tensor of its parameter's shape, in the form that the optimizer takes."""
    return piece.formed(piece.of(whole))


@final
class PieceUpdate:
    """The update of this rank's pieces of one transfer, with their state.

    Args:
        optimizer: a copy, which no other object uses.
        transfer: the transfer of the pieces.
    """

    def __init__(self, optimizer: Optimizer, transfer: OwnedTransfer) -> None:
        self._transfer = transfer
        self._copy = optimizer
        self._strides = [parameter.stride() for parameter in transfer.parameters]
        # a sum, and its form, by the number of the piece
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}
        self._tensors = {
            piece: nn.Parameter(_form_part(piece, piece.parameter)) for piece in transfer.pieces
        }

    def check_strides(self) -> None:
        """Raise UsageError if a parameter's memory layout has changed."""
        if self._strides != [parameter.stride() for parameter in self._transfer.parameters]:
            raise UsageError(
                "a parameter lies otherwise in memory than when the model was parallelised",
                where=self._transfer.label,
                do="convert the model (memory_format, …) before parallelize",
            )

    def work(
        self,
        steps: Mapping[int, PieceOrder],
        groups: Sequence[dict[str, Any]],
        attributes: Mapping[str, Any],
        parameters: Collection[Tensor] = (),
    ) -> Callable[[Comm], None]:
        """Return the lane's work: the update, and the return of new values.

        Args:
            steps: orders for this rank's pieces, by number.
            groups: settings of the optimizer's groups.
            attributes: attributes of the optimizer.
            parameters: parameters that take new values from their owners.
        """

        def update(comm: Comm) -> None:
            self._transfer.open_update(parameters)  # step 10
            values = self.step(self._transfer.gradients(), steps, groups, attributes)  # order 8
            gathered = self._transfer.gather(values, Turn.VALUES, comm)  # step 11
            new_values = [
                (piece.of(piece.parameter), value)
                for piece, value in gathered
                if piece.parameter in parameters
                and not (self._transfer.exact and piece in self._tensors)
            ]
            if new_values:
                torch._foreach_copy_([old for old, _ in new_values], [new for _, new in new_values])
            self._transfer.close_bucket()

        return update

    def step(
        self,
        gradients: Sequence[Tensor | None],
        steps: Mapping[int, PieceOrder],
        groups: Sequence[dict[str, Any]],
        attributes: Mapping[str, Any],
    ) -> list[Tensor]:
        """Update the own pieces by their gradients, in order, and return their new values."""
        members: list[list[Tensor]] = [[] for _ in groups]
        pieces = zip(self._tensors.items(), gradients, strict=True)
        for number, ((piece, tensor), gradient) in enumerate(pieces):
            begin = piece.parameter.data_ptr() + piece.start * tensor.itemsize
            if tensor.data_ptr() != begin:  # the parameter has new memory since
                tensor.data = _form_part(piece, piece.parameter)
            if (step := steps.get(number)) is not None:
                flat = gradient if step.at_owner else step.gradient
                tensor.grad = self._form(number, piece, flat)
                members[step.group].append(tensor)
        filled = [{**group, "params": own} for group, own in zip(groups, members, strict=True)]
        make_step(self._copy, filled, attributes)
        return self.values()

    def _form(self, number: int, piece: Piece, flat: Tensor | None) -> Tensor | None:
        """Return a gradient in its parameter's form, which is made once for an owner's sum."""
        if flat is None:
            return None
        known, formed = self._gradients.get(number, (None, None))
        if known is not flat:
            formed = piece.formed(flat)
            self._gradients[number] = flat, formed
        return formed

    def values(self) -> list[Tensor]:
        """Return the present values of the rank's own pieces."""
        return [piece.of(piece.parameter) for piece in self._tensors]

    def state_bytes(self) -> int:
        """Return the bytes of the own pieces' state."""
        values = (value for state in self._copy.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def take_state(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Take the state of the own pieces, by number, if there is one."""
        for number, tensor in enumerate(self._tensors.values()):
            self._copy.state.pop(tensor, None)
            if number in states:
                self._copy.state[tensor] = states[number]

    def gather_state(self, whole: States | None, comm: Comm) -> None:
        """Put every rank's pieces of the state into `whole`, if one is given (a collective)."""
        of_ranks = comm.gather_objects(self.own_states()(), "optimizer.state_dict()")
        if whole is not None:
            self.join_states(whole, of_ranks)

    def own_states(self) -> Callable[[], list[Any]]:
        """Return a function that gives the states of the own pieces, even after the model is gone.

        The function holds no parameter, because hooks on parameters lead to the model.
        """
        optimizer, tensors = self._copy, [*self._tensors.values()]
        return lambda: [_on_cpu(optimizer.state.get(tensor, {})) for tensor in tensors]

    def join_states(self, whole: States, of_ranks: Sequence[Sequence[Any]]) -> None:
        """Put the states of every rank's pieces into `whole`."""
        for pieces, states in zip(self._transfer.owned, of_ranks, strict=True):
            for piece, state in zip(pieces, states, strict=True):
                for name, (value, at_host) in state.items():
                    of_parameter = whole.setdefault(piece.parameter, {})
                    _put_together(of_parameter, piece, name, value, at_host)


def _on_cpu(state: Mapping[str, Any]) -> dict[str, tuple[Any, bool]]:
    """Return the values on the CPU, and whether each is on the host anyway."""
    return {
        name: (value.cpu(), value.device.type == "cpu")
        if isinstance(value, Tensor)
        else (value, True)
        for name, value in state.items()
    }


def _put_together(
    state: dict[str, Any], piece: Piece, name: str, value: Any, at_host: bool
) -> None:
    """Put a piece's value into its parameter's state.

    A value in the piece's form goes into a whole tensor on the parameter's device. Other values go
    in unchanged. A count of steps stays on the host, too, as torch's optimizers want it.
    """
    parameter, is_all = piece.parameter, piece.numel == piece.parameter.numel()
    if not isinstance(value, Tensor):
        state[name] = value
        return
    form = parameter.shape if is_all else (piece.numel,)
    has_form = value.shape == form
    stays = at_host and (not has_form or name == "step")
    value = value.to("cpu" if stays else parameter.device)
    if not has_form:
        state[name] = value
        return
    if name not in state:
        state[name] = torch.zeros_like(parameter, dtype=value.dtype, device=value.device)
    flat = line(value, parameter) if is_all else value
    line(state[name], parameter)[piece.start : piece.stop] = flat
