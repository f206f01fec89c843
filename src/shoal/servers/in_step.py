"""A server's part of a model whose workers keep step: it does with them what they do.

It has the same transfers, updates and lanes as a worker, without the model. Guarded by
tests/equivalence/test_servers.py. Who tells it: servers.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

from shoal.codecs.coded import exchange_named
from shoal.codecs.remembering import coded_carriers
from shoal.contracts.comm import Comm
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import OwnedTransfer
from shoal.core.buckets import Buckets
from shoal.core.registry import named
from shoal.engine.engine import Engine
from shoal.optim.owners import Owners, put_values
from shoal.optim.residuals import sum_residuals
from shoal.optim.update import PieceUpdate, put_states
from shoal.remote.orders import (
    Numbers,
    OwnersRole,
    ParameterForm,
    Residuals,
    ServedSite,
    UpdatePieces,
    Values,
)
from shoal.remote.wire import Data


def transfers_of(
    sites: Sequence[ServedSite], comm: Comm, *, stale: bool
) -> Iterator[OwnedTransfer]:
    """The transfers that workers have of these sites, of parameters without values."""
    forms = {name: form for site in sites for name, form in site.parameters.items()}
    shells = {name: _shell(form) for name, form in forms.items()}
    for site in sites:
        place = Place(
            layers={},
            parameters={name: shells[name] for name in site.parameters},
            spans=site.spans,
            rank=comm.rank,
            ranks=comm.workers,
            servers=comm.size - comm.workers,
            stale=stale,
            buckets=Buckets("low"),
            owners=site.owners,
        )
        strategy = named(Strategy, site.strategy)
        exchange = exchange_named(site.exchange)
        for transfer in strategy.apply(place, exchange, site.label):
            if isinstance(transfer, OwnedTransfer):
                yield transfer


def _shell(form: ParameterForm) -> nn.Parameter:
    """A parameter of that form, of which only what is written takes memory."""
    return nn.Parameter(
        torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="cpu")
    )


@final
class InStep(OwnersRole):
    """A server's part of a model whose workers keep step: it does with them what they do."""

    def __init__(
        self,
        transfers: Sequence[OwnedTransfer],
        updates: Sequence[Mapping[OwnedTransfer, PieceUpdate]],
        there: Sequence[Comm],
        back: Sequence[Comm],
    ) -> None:
        self.transfers, self._updates = transfers, updates
        self._engine = Engine(transfers, (), there, back)
        self._owners = Owners(self._engine, transfers, there[0].rank)
        self.check, self.close = self._engine.routes.check, self._engine.close

    def finish(self, meanwhile: Callable[[], None]) -> None:
        """Finish what workers wait for."""
        self._owners.settle()

    def observed(self) -> Counter[int]:
        """Nobody runs ahead."""
        return Counter()

    def start(self) -> None:
        """Nothing to begin with."""

    def take_values(self, values: Values) -> None:
        self._owners.settle()
        put_values(self.transfers, values)

    def take_state(self, optimizer: int, states: Sequence[Mapping[int, Data]]) -> None:
        self._owners.settle()
        put_states(self._updates[optimizer], states)

    def exchange(self) -> None:
        for transfer in self.transfers:
            self._engine.routes.settle(transfer)
            transfer.follow(set(transfer.held))
            self._engine.routes.exchange(transfer)

    def update(self, order: UpdatePieces) -> None:
        # order 7: on the lanes, behind the sums of this backward
        for number, pieces in order.given.items():
            transfer = self.transfers[number]
            update = self._updates[order.optimizer][transfer]
            updated = {transfer.pieces[piece].parameter for piece in pieces}
            work = update.work(pieces, order.groups.value, order.attributes.value, updated)
            self._owners.send_off(transfer, (), work)

    def gather_state(self, optimizer: int) -> None:
        self._owners.settle()
        for transfer, update in self._updates[optimizer].items():
            gather = partial(update.gather_state, None)
            self._owners.together(transfer, gather, "optimizer.state_dict(): state of")

    def fetch_all(self) -> None:
        self._owners.fetch_all()

    def bound_errors(self, most_error: float) -> None:
        for carrier in coded_carriers(self.transfers):
            carrier.most_error = most_error

    def sum_residuals(self) -> None:
        sum_residuals(self._owners)

    def take_residuals(self, sums: Residuals) -> None:
        self._owners.settle()
        for carrier in coded_carriers(self.transfers):
            carrier.give(self._owners.rank, sums)

    def norms(self, parameters: Numbers, order: float) -> None:
        self._owners.norms(self._named(parameters), order)

    def scale(self, parameters: Numbers, factor: Tensor) -> None:
        self._owners.scale(self._named(parameters), factor)

    def _named(self, numbers: Numbers) -> list[Tensor]:
        return [self.transfers[number].parameters[index] for number, index in numbers]
