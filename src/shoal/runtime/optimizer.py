"""What parallelize adds to an optimizer: its step updates, on lanes, the pieces that this rank
owns.

    optimizer.step()            closure, if any; settings captured; owned parameters sent off; the
                                rest as always
    optimizer.accumulate()      a context: backwards inside send nothing, the next one outside sends
                                for all
    optimizer.clip_grad_norm_   the global norm from the owners' pieces: one number a rank is
                                exchanged
    optimizer.state_dict()      in one-process form: the owners' pieces put together (a collective)
    optimizer.load_state_dict() takes that form, and keeps this rank's pieces of it

Everything is set on the object: its class stays, and schedulers and scalers that hold it meet the
new methods. Guarded by tests/equivalence/test_owners.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.comm.stage import Stage
from shoal.comm.tables import Tables
from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer, Turn
from shoal.core.errors import UsageError
from shoal.core.pieces import Piece, line, local_gradient
from shoal.profiling.updates import attributes, like, make_step, part_of, settings
from shoal.remote.orders import GatherState, Given, OfRank, TakeState, UpdatePieces
from shoal.remote.wire import Data
from shoal.runtime.checks import check_before_steps
from shoal.runtime.engine import Engine
from shoal.runtime.methods import serve
from shoal.runtime.owners import Owners, norms_of, scale
from shoal.runtime.parts import (
    CutOptimizer,
    StageOptimizer,
    TableOptimizer,
    cut_parameters,
    far_tables,
    groups_at_tail,
    mark,
    norms_of_parts,
    shown,
)
from shoal.tensors.cut import is_cut

_SERVED = "_shoal_served"
States = dict[nn.Parameter, dict[str, Any]]  # by parameter, as in Optimizer.state


@dataclass(frozen=True)
class _Served:
    """One parallelised model whose parameters an optimizer has."""

    engine: Engine
    owners: Owners | None
    stage: Stage | None
    number: int  # of the optimizer among the model's


def extend(
    optimizer: Optimizer,
    engine: Engine | None = None,
    owners: Owners | None = None,
    number: int = 0,
    tables: Tables | None = None,
    stage: Stage | None = None,
    cut: bool = False,
) -> OwnedOptimizer | None:
    """Give an optimizer `accumulate` and `clip_grad_norm_`, and methods that serve what ranks own,
    if they own any.

    `number` is its place among the optimizers of the model, `tables` are those that servers have of
    that, `stage` is its end on hosts of its own, and `cut` says whether any of its layers is cut: a
    group of that may come later.

    Alone, without an engine, the first two do what one process would; an optimizer may be given
    several models.
    """
    served: list[_Served] = optimizer.__dict__.setdefault(_SERVED, [])
    optimizer.__dict__["accumulate"] = MethodType(partial(_accumulate, served), optimizer)
    optimizer.__dict__["clip_grad_norm_"] = MethodType(partial(_clip_grad_norm, served), optimizer)
    if engine is None:
        return None
    served.append(_Served(engine, owners, stage, number))
    check_before_steps(optimizer, engine)
    if tables is not None:
        serve(optimizer, TableOptimizer(optimizer, number, tables))
    if stage is not None:
        serve(optimizer, StageOptimizer(optimizer, number, stage))
    if cut or cut_parameters(optimizer):
        serve(optimizer, CutOptimizer(optimizer))
    if owners is None:
        return None
    owned = OwnedOptimizer(optimizer, owners, number)
    serve(optimizer, owned)
    return owned


@contextmanager
def _accumulate(served: Sequence[_Served], optimizer: Optimizer) -> Iterator[None]:
    """Send nothing in the backwards inside; the next backward outside sends the sum of all.

    Until then `.grad` is this rank's own, or an error where ranks own it.
    """
    with ExitStack() as stack:
        for each in served:
            stack.enter_context(each.engine.accumulating())
        yield


def _clip_grad_norm(
    served: Sequence[_Served],
    optimizer: Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip the norm of all gradients of this optimizer, taken as one vector, as
    torch.nn.utils.clip_grad_norm_ does.

    What ranks own stays with them, where torch's function would bring it to every rank. A
    collective then.

    Args:
        max_norm: the largest norm that is left as it is.
        norm_type: the p of the norm; may be infinite.
        error_if_nonfinite: raise where the norm is not finite.

    Returns:
        The norm before, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite` was given.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for each in served:
        each.engine.check_sent()
    all_owners = [each.owners for each in served if each.owners is not None]
    # the truth, wherever owners hold none
    here = [g for g in map(local_gradient, parameters) if g is not None]
    whole, tables = [p for p in parameters if not is_cut(p)], far_tables(parameters)
    norms = [*norms_of([g for g in map(local_gradient, whole) if g is not None], norm_type)]
    norms += norms_of_parts([p for p in parameters if is_cut(p)], norm_type)
    norms += [each for table in tables.values() for each in table.norms(norm_type)]
    stages = [(each.stage, each.number) for each in served if each.stage is not None]
    at_tail = [
        (stage, number) for stage, number in stages if not stage.names.keys().isdisjoint(parameters)
    ]
    for stage, number in at_tail:
        norms.append(
            stage.call("norm", number, groups_at_tail(stage, optimizer), [norm_type]).double()
        )
    for owners in all_owners:
        norms += owners.norms(parameters, norm_type)
    total = (
        torch.linalg.vector_norm(torch.stack(norms), norm_type)
        if norms
        else torch.zeros((), device="cpu")
    )
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"the gradients' norm of order {norm_type} is not finite: {float(total)}"
        )
    # a norm that is only asked for leaves gradients alone, also such as are not finite
    if max_norm == math.inf:
        return total.to(parameters[0].device, parameters[0].dtype)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    scale(here, factor)
    for table in tables.values():
        table.scale(factor)
    for stage, number in at_tail:
        stage.call("scale", number, groups_at_tail(stage, optimizer), [factor])
        stage.entered()  # what somebody saw of gradients is not what they are now
    for owners in all_owners:
        owners.scale(parameters, factor)
    return total.to(parameters[0].device, parameters[0].dtype)


@final
class OwnedOptimizer:
    """An optimizer some of whose parameters are updated by their owners."""

    def __init__(self, optimizer: Optimizer, owners: Owners, number: int) -> None:
        self._optimizer = optimizer
        self._owners = owners
        self._number = number  # among the model's optimizers
        self._updates = {
            transfer: Update(like(optimizer), transfer) for transfer in owners.transfers
        }
        # groups from which owned ones are taken
        self._whole: list[tuple[dict[str, Any], list[nn.Parameter]]] = []

    def check_sent(self) -> None:
        """Raise UsageError where gradients are only this rank's own."""
        self._owners.check_sent()

    def state_dict(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state in one-process form, on every rank."""
        self._owners.settle()
        self._owners.tell(GatherState(self._number))
        whole: States = {}
        for transfer, update in self._updates.items():
            self._owners.together(transfer, partial(update.gather_state, whole))
        held = [
            p
            for group in self._optimizer.param_groups
            for p in group["params"]
            if p in self._owners
        ]
        with shown(self._optimizer, {parameter: whole.get(parameter, {}) for parameter in held}):
            return original()

    def load_state_dict(self, original: Callable[[Any], None], state_dict: dict[str, Any]) -> None:
        """Take a state in one-process form."""
        self._owners.settle()
        original(state_dict)
        self.take_state()

    def take_state(self) -> None:
        """Keep the own pieces of what the optimizer holds of owned parameters, and free the
        rest.
        """
        state = self._optimizer.state
        self._owners.tell(OfRank(partial(self._state_for, state)))
        for transfer, update in self._updates.items():
            update.take_state(parts(transfer, self._owners.rank, state))
        state.update({parameter: {} for parameter in state if parameter in self._owners})

    def _state_for(self, state: Mapping[Tensor, Any], server: int) -> TakeState:
        """What a server is to take of a state in one-process form."""
        numbered = (parts(transfer, server, state) for transfer in self._owners.served)
        states = ({n: Data(part) for n, part in pieces.items()} for pieces in numbered)
        return TakeState(self._number, tuple(states))

    def state_bytes(self) -> int:
        """Bytes of the state that this rank holds of owned parameters."""
        self._owners.settle()
        return sum(update.state_bytes() for update in self._updates.values())

    def open(self) -> None:
        """Have the owned parameters updated, and take them out of the groups while the original
        updates the rest.
        """
        groups = self._optimizer.param_groups
        group_of = {
            p: index
            for index, group in enumerate(groups)
            for p in group["params"]
            if p in self._owners
        }
        captured, now = [settings(group) for group in groups], attributes(self._optimizer)
        sent_off: list[
            tuple[OwnedTransfer, list[nn.Parameter], Callable[[int], dict[int, Given]]]
        ] = []
        for transfer in self._owners.returning:
            mine = [p for p in transfer.parameters if p in group_of]
            if any(map(self._owners.has_gradient, mine)):
                self._updates[transfer].check_strides()
                sent_off.append((transfer, mine, partial(_given, transfer, group_of)))
        self._owners.tell_changes({p for _, mine, _ in sent_off for p in mine})
        number_of = {transfer: number for number, transfer in enumerate(self._owners.served)}
        served = {number_of[t]: given for t, _, given in sent_off if t in number_of}
        if served:
            self._owners.tell(
                OfRank(
                    lambda server: UpdatePieces(
                        self._number,
                        {number: given(server) for number, given in served.items()},
                        Data(captured),
                        Data(now),
                    )
                )
            )
        mark(self._optimizer, (p for _, mine, _ in sent_off for p in mine))
        for transfer, mine, given in sent_off:
            work = self._updates[transfer].work(given(self._owners.rank), captured, now, set(mine))
            self._owners.send_off(transfer, mine, work)
        self._whole = [(group, group["params"]) for group in groups]
        for group, parameters in self._whole:
            group["params"] = [p for p in parameters if p not in group_of]

    def close(self) -> None:
        """Put the owned parameters back into their groups."""
        for group, parameters in self._whole:
            group["params"] = parameters
        self._whole = []


def _given(transfer: OwnedTransfer, group_of: Mapping[Tensor, int], rank: int) -> dict[int, Given]:
    """What a rank is to do with its pieces, by number, as of now."""
    given = {}
    for number, piece in enumerate(transfer.owned[rank]):
        parameter = piece.parameter
        if parameter in group_of:
            here = local_gradient(parameter)
            gradient = None if here is None else piece.of(here).clone()
            given[number] = Given(group_of[parameter], parameter in transfer.held, gradient)
    return given


def parts(
    transfer: OwnedTransfer, rank: int, states: Mapping[Tensor, Any]
) -> dict[int, dict[str, Any]]:
    """A rank's pieces of a state in one-process form, by number, where it has any of their
    parameters.
    """
    return {
        number: part_of(states[piece.parameter], piece.parameter, partial(_formed_part, piece))
        for number, piece in enumerate(transfer.owned[rank])
        if piece.parameter in states
    }


def put_states(
    updates: Mapping[OwnedTransfer, Update], states: Sequence[Mapping[int, Data]]
) -> None:
    """Have updates keep those states of the own pieces, by number."""
    for update, pieces in zip(updates.values(), states, strict=True):
        update.take_state({number: state.value for number, state in pieces.items()})


def _formed_part(piece: Piece, whole: Tensor) -> Tensor:
    """A piece of a tensor of its parameter's shape, as the optimizer is given it."""
    return piece.formed(piece.of(whole))


@final
class Update:
    """One optimizer's update of this rank's pieces of one transfer; holds their state, and a copy
    of the optimizer.
    """

    def __init__(self, optimizer: Optimizer, transfer: OwnedTransfer) -> None:
        self._transfer = transfer
        self._copy = optimizer
        self._strides = [parameter.stride() for parameter in transfer.parameters]
        self._tensors = {
            piece: nn.Parameter(_formed_part(piece, piece.parameter)) for piece in transfer.pieces
        }

    def check_strides(self) -> None:
        """Raise UsageError where a parameter's line is no longer what it was."""
        if self._strides != [parameter.stride() for parameter in self._transfer.parameters]:
            raise UsageError(
                "a parameter lies otherwise in memory than when the model was parallelised",
                where=self._transfer.label,
                do="convert the model (memory_format, …) before parallelize",
            )

    def work(
        self,
        given: Mapping[int, Given],
        groups: Sequence[dict[str, Any]],
        now: Mapping[str, Any],
        parameters: Collection[Tensor] = (),
    ) -> Callable[[Comm], None]:
        """The update by these settings, attributes and gradients, and the return of `parameters`,
        for a lane to do.
        """

        def update(comm: Comm) -> None:
            values = self.step(self._transfer.gradients(), given, groups, now)
            come = self._transfer.gather(values, Turn.VALUES, comm)
            taken = [
                each
                for each in come
                if each[0] not in self._tensors and each[0].parameter in parameters
            ]
            if taken:
                torch._foreach_copy_(
                    [piece.of(piece.parameter) for piece, _ in taken], [value for _, value in taken]
                )
            self._transfer.close_bucket()

        return update

    def step(
        self,
        gradients: Sequence[Tensor | None],
        given: Mapping[int, Given],
        groups: Sequence[dict[str, Any]],
        now: Mapping[str, Any],
    ) -> list[Tensor]:
        """Update the own pieces by their gradients, in order; their new values."""
        filled: list[list[Tensor]] = [[] for _ in groups]
        pieces = zip(self._tensors.items(), gradients, strict=True)
        for number, ((piece, tensor), gradient) in enumerate(pieces):
            tensor.data = _formed_part(piece, piece.parameter)
            if (how := given.get(number)) is not None:
                flat = gradient if how.at_owner else how.gradient
                tensor.grad = None if flat is None else piece.formed(flat)
                filled[how.group].append(tensor)
        make_step(
            self._copy,
            [{**group, "params": each} for group, each in zip(groups, filled, strict=True)],
            now,
        )
        return self.values()

    def values(self) -> list[Tensor]:
        """The own pieces of the parameters, as they are."""
        return [piece.of(piece.parameter) for piece in self._tensors]

    def state_bytes(self) -> int:
        """Bytes of the own pieces' state."""
        values = (value for state in self._copy.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))

    def take_state(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Keep the state of the own pieces, by number, where there is one."""
        for number, tensor in enumerate(self._tensors.values()):
            self._copy.state.pop(tensor, None)
            if number in states:
                self._copy.state[tensor] = states[number]

    def gather_state(self, whole: States | None, comm: Comm) -> None:
        """Put every rank's pieces of the state into `whole`, if one is given."""
        mine = [_on_cpu(self._copy.state.get(tensor, {})) for tensor in self._tensors.values()]
        everyone = comm.gather_objects(mine)
        if whole is None:
            return
        for pieces, states in zip(self._transfer.owned, everyone, strict=True):
            for piece, state in zip(pieces, states, strict=True):
                for name, value in state.items():
                    _put(whole.setdefault(piece.parameter, {}), piece, name, value)


def _on_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.cpu() if isinstance(value, Tensor) else value for name, value in state.items()
    }


def _put(state: dict[str, Any], piece: Piece, name: str, value: Any) -> None:
    """Put a piece's value into its parameter's state: what has its form into a whole tensor, all
    else as it is.
    """
    parameter, whole = piece.parameter, piece.numel == piece.parameter.numel()
    if not (
        isinstance(value, Tensor) and value.shape == (parameter.shape if whole else (piece.numel,))
    ):
        state[name] = value
        return
    if name not in state:
        state[name] = torch.zeros_like(parameter, dtype=value.dtype)
    flat = line(value, parameter) if whole else value
    line(state[name], parameter)[piece.start : piece.stop] = flat.to(parameter.device)
