"""Common weights: the weights that ranks have in common although they step by themselves.

    global_weights   the model has these weights for a while: to evaluate
    saving           the same, with the transfers under way, and optimizers have the mean of the
                     ranks' states: to save
    outer_state      the outer rule's state by parameter, for checkpoints of any number of ranks

If servers have the weights, all ranks meet before any of them looks at the weights, and once more
afterwards. So all ranks see one moment, in which everything that was pushed has been added.

In the warm-up all ranks exchange gradients, so each of them has everything.

Guarded by tests/equivalence/test_local_steps.py and test_geo.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import StateDict
from shoal.contracts.state import states
from shoal.core.errors import UsageError
from shoal.core.outer_step import Outer
from shoal.engine.engine import Engine
from shoal.session.compiled_models import without_compilation
from shoal.strategies.geo import GeoTransfer
from shoal.strategies.local import LocalTransfer
from shoal.strategies.quorum import QuorumTransfer
from shoal.strategies.state_agreement import OfState


@final
class LocalWeights:
    """The weights that the ranks of one model have in common.

    Args:
        engine: the engine that sends them.
        comm: the ranks.
        outer: the rule by which ranks come together.
    """

    def __init__(self, engine: Engine, comm: Comm, outer: Outer) -> None:
        self._engine, self._comm, self._outer = engine, comm, outer

    @property
    def _in_rounds(self) -> list[LocalTransfer | QuorumTransfer]:
        kinds = LocalTransfer | QuorumTransfer
        return [t for t in self._engine.transfers if isinstance(t, kinds)]

    def _meet(self) -> None:
        """Bring every rank to the newest weights, if rounds have a quorum (a collective)."""
        for transfer in self._in_rounds:
            if isinstance(transfer, QuorumTransfer):
                transfer.meet()

    @property
    def _at_servers(self) -> list[GeoTransfer]:
        return [t for t in self._engine.transfers if isinstance(t, GeoTransfer)]

    def _ask_servers(self, ask: Callable[[GeoTransfer, Comm], None], purpose: str) -> None:
        """Have each transfer ask servers something while no worker pushes (a collective).

        Args:
            ask: `GeoTransfer.look` or `GeoTransfer.put`.
            purpose: the same in words, which stand before "the weights".
        """
        if not (at_servers := self._at_servers):
            return
        routes = self._engine.routes
        self._comm.gather_objects(None, f"local steps: before ranks {purpose} the weights")
        for transfer in at_servers:
            routes.later(transfer, partial(ask, transfer), f"{purpose} the weights of")
        for transfer in at_servers:
            routes.settle(transfer)
        self._comm.gather_objects(None, f"local steps: ranks {purpose} the weights")

    def common(self, *, latest: bool = False) -> dict[str, Tensor]:
        """Return the values that all ranks have in common, by name in the model.

        Args:
            latest: whether transfers under way count. If not, the values are from the beginning of
                the running round.
        """
        common: dict[str, Tensor] = {}
        for transfer in self._engine.transfers:
            if isinstance(transfer, LocalTransfer):
                common |= transfer.common(latest=latest)
            elif isinstance(transfer, QuorumTransfer):
                common |= transfer.common()
            elif isinstance(transfer, GeoTransfer):
                for name, piece in transfer.pieces.items():
                    common.setdefault(name, torch.empty_like(piece.parameter).detach())
                transfer.global_into(common, latest=latest)
            elif isinstance(transfer, OfState) and transfer.local is not None:
                common |= transfer.common()
        return common

    @contextmanager
    def latest(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Lend the model the weights in common, and optimizers the mean of their states.

        A collective, which waits for transfers under way. The outer rule's state, and the residuals
        of codecs, are of that moment, too.
        """
        self._engine.wait()
        self._meet()
        self._ask_servers(GeoTransfer.look, "look at")
        common = self.common(latest=True)
        for transfer in self._at_servers:
            transfer.forget()
        held = _tensors(model)
        with having(held, common), self._mean_states(optimizers):
            yield

    def take_global(self, model: nn.Module) -> None:
        """Give the model the weights that all ranks have in common, to keep (a collective)."""
        self._engine.settle()
        self._meet()
        self._ask_servers(GeoTransfer.look, "look at")
        held = _tensors(model)
        with torch.no_grad():
            for name, value in self.common(latest=True).items():
                held[name].copy_(value)

    def outer_state(self) -> StateDict:
        """Return the outer rule's state by parameter name (a collective)."""
        found: StateDict = {}
        for transfer in self._in_rounds:
            found |= transfer.state(self._comm)
        return found

    def check(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise UsageError if an outer rule's state is that of another model."""
        own = {name: p for transfer in self._in_rounds for name, p in transfer.parameters.items()}
        for transfer in self._at_servers:
            own |= {name: piece.parameter for name, piece in transfer.pieces.items()}
        unknown = [name for name in sorted(state) if name not in own]
        others = [
            name for name in own if name in state and _numel(state[name]) != own[name].numel()
        ]
        for names, got in (
            (unknown, "parameters that this model does not train"),
            (others, "parameters of other sizes"),
        ):
            if names:
                raise UsageError(
                    "the outer rule's state is that of another model",
                    where=f"parameter {names[0]}",
                    got=f"{len(names)} {got}",
                    do="load a checkpoint of this model",
                )

    def give_servers(self) -> None:
        """Give servers the weights with which a round begins, if they have any (a collective)."""
        self._ask_servers(GeoTransfer.put, "give servers")

    @contextmanager
    def _mean_states(self, optimizers: Sequence[Optimizer]) -> Iterator[None]:
        """Lend the optimizers the means over ranks of their states (a collective).

        An island counts as one rank. A parameter is left out unless every rank has the same state
        of it: a checkpoint then has rank 0's state.
        """
        own: list[tuple[Tensor, Tensor]] = []
        for optimizer in optimizers:
            parameters = _parameters(optimizer)
            listed = {
                number: list(optimizer.state[parameter])
                for number, parameter in enumerate(parameters)
                if parameter in optimizer.state
            }
            everywhere = self._comm.gather_objects(listed, "optimizer.state_dict()")
            for number, names in everywhere[0].items():
                if any(other.get(number) != names for other in everywhere):
                    continue
                for value in optimizer.state[parameters[number]].values():
                    if isinstance(value, Tensor) and value.is_floating_point():
                        own.append((value, value.detach().clone()))
                        self._average(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for value, before in own:
                    value.copy_(before)

    @torch.no_grad()
    def _average(self, value: Tensor) -> None:
        """Put the mean over ranks into a tensor (a collective)."""
        value.div_(self._parts)
        flat = value.reshape(-1).contiguous()
        self._comm.all_reduce(flat)
        value.copy_(flat.view(value.shape))

    @property
    def _parts(self) -> int:
        """Divisor of a sum over ranks, such that each island counts as one rank."""
        if not self._outer.islands:
            return self._comm.size
        hosts = self._comm.topology.ranks_on
        return len(hosts) * len(hosts[self._comm.topology.hosts[self._comm.rank]])

    @contextmanager
    def at_round(self, model: nn.Module) -> Iterator[None]:
        """Lend the model the weights with which the running round began."""
        with having(_tensors(model), self.common()):
            yield


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def having(held: Mapping[Any, Tensor], values: Mapping[Any, Tensor]) -> Iterator[None]:
    """Lend tensors other values. At the end of the context they have their own again."""
    own = {name: held[name].detach().clone() for name in values}
    with torch.no_grad():
        for name, value in values.items():
            held[name].copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in own.items():
                held[name].copy_(value)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the present parameters and buffers by name."""
    model = without_compilation(model)
    of_state = {name: s.tensor for name, s in states(model, None).items()}
    return {
        **dict(model.named_parameters()),
        **{name: tensor for name, tensor in of_state.items() if tensor is not None},
    }


def _numel(state: Mapping[str, Tensor]) -> int:
    return state["momentum"].numel()
