"""Owners: the gradients, updates and optimizer state of the parameters that ranks own in pieces.

    backward           slices' sums go to their owners                         OwnedTransfer.run
    optimizer.step()   settings are captured; the rest is updated as always; returns at once
     on each lane      own pieces are updated by a copy of the optimizer,
                       the new values go to all                                PieceUpdate.work
    next forward       the first use of a parameter waits for its own
                       transfer, and for nothing else                          arrive

Exactly one synchronous step: a look at a parameter or a gradient in between gives the right one
(guarded_parameters.py). Collectives, called by every rank: reading `.grad` before it is cleared,
optimizer.clip_grad_norm_, state_dict. Guarded by tests/equivalence/test_owners.py and
test_access.py.

Reference: Xu et al., "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training",
2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from threading import RLock
from typing import final
from weakref import ref

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import OwnedTransfer, Turn
from shoal.core.pieces import line, local_gradient, set_local_gradient, shape_like
from shoal.engine.engine import Engine
from shoal.engine.lanes import Errand
from shoal.remote.orders import PerServer, Tell
from shoal.remote.verbs import Aspect, Norm, Numbers, Read, ScaleBy, Values, Verb, Write
from shoal.remote.wire import Data
from shoal.tensors.guarded_parameters import ComingParameter, GuardedParameter, guard, unguard


def tell_nobody(verb: Verb | PerServer, /) -> None:
    """Where there are no servers."""


def norms_of(tensors: Sequence[Tensor], order: float) -> tuple[Tensor, ...]:
    """Return the norm of each tensor, in float64, on the CPU. For a GPU all wait at once."""
    numbers = [
        t.detach() if t.layout is torch.strided else t.detach().coalesce().values() for t in tensors
    ]
    norms = [torch.linalg.vector_norm(t, order, dtype=torch.float64) for t in numbers]
    if not norms:
        return ()
    device = norms[0].device
    return torch.stack([tensor_norm.to(device) for tensor_norm in norms]).cpu().unbind()


def norm(tensors: Sequence[Tensor], order: float) -> Tensor:
    """Return the norm of all their elements together, in float64, on the CPU."""
    norms = norms_of(tensors, order) or (torch.zeros((), dtype=torch.float64, device="cpu"),)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), order)
    return total


def scale(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients by a number, which is copied once to each of their devices."""
    factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for gradient in gradients:
        where = gradient.device, gradient.dtype
        if where not in factors:
            factors[where] = factor.to(*where, non_blocking=True)
        values = gradient if gradient.layout is torch.strided else gradient._values()
        values.mul_(factors[where])


def values_of(transfers: Mapping[int, OwnedTransfer], parameters: Set[Tensor], rank: int) -> Write:
    """Copies of a rank's pieces of those parameters, of these transfers by number."""
    values: Values = {
        number: {
            index: piece.of(piece.parameter).clone()
            for index, piece in enumerate(transfer.owned[rank])
            if piece.parameter in parameters
        }
        for number, transfer in transfers.items()
    }
    return Write(Aspect.VALUES, Data(values))


def put_values(transfers: Sequence[OwnedTransfer], values: Values) -> None:
    """Put values into the rank's own pieces."""
    for number, pieces in values.items():
        for index, value in pieces.items():
            piece = transfers[number].pieces[index]
            piece.of(piece.parameter).copy_(value)


def gather_values(transfer: OwnedTransfer, comm: Comm) -> None:
    """Bring every owner's pieces of a transfer's parameters to all ranks (a collective)."""
    own = [piece.of(piece.parameter) for piece in transfer.pieces]
    of_ranks = comm.gather_objects(own, f"gathering the parameters of {transfer.label}")
    with torch.no_grad():
        for pieces, values in zip(transfer.owned, of_ranks, strict=True):
            for piece, value in zip(pieces, values, strict=True):
                piece.of(piece.parameter).copy_(value)


@final
class Owners:
    """The parameters with owners of one model, and their new values on the way.

    Args:
        engine: the engine that runs the transfers.
        transfers: the transfers of parameters that have owners.
        rank: this rank.
        tell: the function that tells servers.
        late: the number of served transfers that come back once they are summed.
        beside: the channel for work of all ranks together, if workers run ahead of one another.
    """

    def __init__(
        self,
        engine: Engine,
        transfers: Sequence[OwnedTransfer],
        rank: int,
        tell: Tell = tell_nobody,
        late: int = 0,
        beside: Comm | None = None,
    ) -> None:
        self.transfers = tuple(transfers)
        self.served = served = tuple(transfer for transfer in transfers if transfer.served)
        # transfers that are sent when backward is over, and come back when they are summed
        first = served[max(0, len(served) - late) :]
        # The order in which forward needs them. Autograd runs nodes from last to first, so forward
        # needs last the parameter that is first to have all of its gradient.
        summed = (transfer for transfer in reversed(self.transfers) if transfer not in first)
        self.returning = (*first, *summed)
        self.rank = rank
        self.tell: Tell = tell
        known = (p for transfer in self.served for p in transfer.parameters)
        self._versions = {p: p._version for p in known}  # versions that servers know
        self._came: dict[Tensor, int] = {}  # versions that owners have sent
        # parameters with memory that a view shares, and these views
        self._open: dict[Tensor, list[ref[Tensor]]] = {}
        self._engine, self._beside = engine, beside
        # guards marks of parameters on their way: any thread may look at one while a step begins
        self._marking = RLock()
        # a large parameter is cut among several transfers
        self._transfers: dict[nn.Parameter, list[OwnedTransfer]] = {}
        for transfer in transfers:
            for parameter in transfer.parameters:
                self._transfers.setdefault(parameter, []).append(transfer)
                guard(parameter, self)
        self._came |= {parameter: parameter._version for parameter in self._transfers}

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._transfers

    def fetch(self, parameter: nn.Parameter) -> None:
        """Bring all owners' gradients to every rank, if this parameter's is at its owner."""
        self._engine.check_sent()
        if self._is_held(parameter):
            self.fetch_all()

    @torch.inference_mode(False)  # the gradients are used in a step outside of inference mode
    def fetch_all(self) -> None:
        """Bring all gradients that are at their owners to every rank (a collective)."""
        self.tell(Read(Aspect.GRADIENT))
        holding = [transfer for transfer in self.transfers if transfer.held]
        held = {parameter for transfer in holding for parameter in transfer.held}
        lines = {parameter: torch.empty_like(line(parameter, parameter)) for parameter in held}
        fetched = [_Fetch(transfer, lines) for transfer in holding]
        for fetch in fetched:
            self._engine.routes.later(fetch.transfer, fetch.run, "read gradients (.grad) of")
        for fetch in fetched:
            self._engine.routes.settle(fetch.transfer)
            fetch.publish()

    def assign(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Set a parameter's gradient from now on."""
        set_local_gradient(parameter, gradient)
        for transfer in self._transfers[parameter]:
            transfer.held.discard(parameter)

    def arrive(self, parameter: nn.Parameter) -> None:
        """Wait for the transfers that bring new values of this parameter."""
        for transfer in self._transfers[parameter]:
            self._engine.routes.settle(transfer)  # step 12
        with self._marking:
            for member in {
                member for transfer in self._transfers[parameter] for member in transfer.parameters
            }:
                came = isinstance(member, ComingParameter) and not any(
                    map(self._engine.routes.is_busy, self._transfers[member])
                )
                if came:
                    member.__class__ = GuardedParameter
                    self._came[member] = member._version
                    if member in self._versions:
                        self._versions[member] = member._version

    def laid_open(self, parameter: nn.Parameter, memory: Tensor) -> None:
        """Note that a view shares this memory: while it lives, the parameter counts as changed."""
        if parameter in self._versions:
            kept = [view for view in self._open.get(parameter, ()) if view() is not None]
            self._open[parameter] = [*kept, ref(memory)]

    def tell_changes(self, parameters: Iterable[nn.Parameter]) -> None:
        """Give servers the values of parameters that have changed since servers sent them."""
        here = [p for p in parameters if p in self._versions and not isinstance(p, ComingParameter)]
        changed = {p for p in here if p._version != self._versions[p] or p in self._open}
        if changed:
            numbered = dict(enumerate(self.served))
            self.tell(partial(values_of, numbered, changed))
            self._versions |= {p: p._version for p in changed}
            for parameter in changed & self._open.keys():
                self._open[parameter] = [
                    view for view in self._open[parameter] if view() is not None
                ]
                if not self._open[parameter]:
                    del self._open[parameter]

    def changes(self) -> list[Tensor]:
        """Return the parameters that have changed since their owners sent them."""
        return [
            parameter
            for parameter, version in self._came.items()
            if not isinstance(parameter, ComingParameter) and parameter._version != version
        ]

    def settle(self) -> None:
        """Wait for all values on their way."""
        for transfer in self.transfers:
            self.arrive(transfer.parameters[0])

    @property
    def backwards(self) -> int:
        """Number of backwards that have sent gradients."""
        return self._engine.routes.step

    def release(self) -> None:
        """Make the parameters ordinary, with their gradients (a collective)."""
        self.settle()
        if any(transfer.held for transfer in self.transfers):
            self.fetch_all()
        for parameter in self._transfers:
            unguard(parameter)

    def check_sent(self) -> None:
        """Raise UsageError if gradients are only this rank's own."""
        self._engine.check_sent()

    def has_gradient(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient is here or at its owners, without waiting."""
        return self._is_held(parameter) or local_gradient(parameter) is not None

    def _is_held(self, parameter: nn.Parameter) -> bool:
        return any(parameter in transfer.held for transfer in self._transfers[parameter])

    def norms(self, parameters: Sequence[Tensor], order: float) -> list[Tensor]:
        """The norm of each owner's pieces of those gradients, in rank order (a collective)."""
        self.tell(Norm(self._numbers(parameters), order))
        self.settle()
        numbers: list[Tensor] = []
        for served in (False, True):
            some = [transfer for transfer in self.transfers if transfer.served == served]
            own_norm = norm(_gradients(some, parameters), order)

            def gather(comm: Comm, own_norm: Tensor = own_norm) -> None:
                all_of_them = [torch.empty_like(own_norm) for _ in range(comm.size)]
                comm.all_gather(all_of_them, own_norm)
                numbers.extend(all_of_them)

            if some:
                self.together(some[0], gather, "optimizer.clip_grad_norm_(): norms beside")
        return numbers

    def scale(self, parameters: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply those parameters' gradients, where it is the owners that hold them."""
        self.tell(ScaleBy(self._numbers(parameters), factor))
        self.settle()
        scale(_gradients(self.transfers, parameters), factor)

    def _numbers(self, parameters: Iterable[Tensor]) -> Numbers:
        """Return the numbers by which servers know these parameters."""
        wanted = set(parameters)
        return tuple(
            (number, index)
            for number, transfer in enumerate(self.served)
            for index, parameter in enumerate(transfer.parameters)
            if parameter in wanted
        )

    def together(self, transfer: OwnedTransfer, work: Callable[[Comm], None], purpose: str) -> None:
        """Do work at once on all ranks of a transfer (a collective)."""
        if self._beside is not None:
            work(self._beside)
            return
        self._engine.routes.later(transfer, work, purpose)
        self._engine.routes.settle(transfer)

    def refresh(self) -> None:
        """Take the values of the servers, while workers that run ahead stand still."""
        assert self._beside is not None
        self.settle()
        self.tell(Read(Aspect.VALUES))
        for transfer in self.served:
            gather_values(transfer, self._beside)
        with self._marking:
            self._versions = {p: p._version for p in self._versions}
            self._came = {p: p._version for p in self._came}
            self._open.clear()

    def send_off(
        self,
        transfer: OwnedTransfer,
        parameters: Iterable[nn.Parameter],
        work: Callable[[Comm], None],
    ) -> Errand:
        """Let a lane bring new values of some parameters of a transfer.

        Until then, any use of them waits.
        """
        with self._marking:
            errand = self._engine.routes.later(transfer, work, "update and return")
            for parameter in parameters:
                torch.autograd.graph.increment_version(parameter)
                parameter.__class__ = ComingParameter
        return errand


def _gradients(transfers: Iterable[OwnedTransfer], parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's pieces of the parameters' gradients, if their owners hold them."""
    wanted = set(parameters)
    return [
        gradient
        for transfer in transfers
        for piece, gradient in zip(transfer.pieces, transfer.gradients(), strict=True)
        if gradient is not None and piece.parameter in wanted and piece.parameter in transfer.held
    ]


@final
class _Fetch:
    """One transfer's gradients, on their way into whole parameters on every rank."""

    def __init__(self, transfer: OwnedTransfer, lines: Mapping[nn.Parameter, Tensor]) -> None:
        self.transfer = transfer
        self._lines = lines
        self._used: set[nn.Parameter] = set()

    def run(self, comm: Comm) -> None:
        own_gradients = [
            torch.zeros_like(piece.of(piece.parameter)) if gradient is None else gradient
            for piece, gradient in zip(self.transfer.pieces, self.transfer.gradients(), strict=True)
        ]
        for piece, value in self.transfer.gather(own_gradients, Turn.GRADIENTS, comm):
            if piece.parameter in self._lines:
                self._lines[piece.parameter][piece.start : piece.stop] = value
        self._used = self.transfer.used()
        self.transfer.close_bucket()

    def publish(self) -> None:
        for parameter in self.transfer.held:
            gradient = (
                shape_like(self._lines[parameter], parameter).detach()
                if parameter in self._used
                else None
            )
            set_local_gradient(parameter, gradient)
        self.transfer.held.clear()
