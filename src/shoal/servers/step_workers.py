"""A server's part of a model with workers that keep step: it works on their lanes, as they do.

It has the same transfers, updates and lanes as a worker, without the model. Guarded by
tests/equivalence/test_servers.py. It is told by servers.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import assert_never, final

import torch
from torch import Tensor, nn

from shoal.codecs.carrier_memory import coded_carriers
from shoal.codecs.coded_exchange import read_exchange
from shoal.contracts.comm import Comm
from shoal.contracts.strategy import Place, Strategy
from shoal.contracts.transfer import OwnedTransfer
from shoal.core.buckets import Buckets
from shoal.core.registry import named
from shoal.engine.engine import Engine
from shoal.optim.owners import Owners, put_values
from shoal.optim.residuals import sum_residuals
from shoal.optim.update import PieceUpdate, put_states
from shoal.remote.orders import ParameterForm, ServedSite
from shoal.remote.verbs import (
    Aspect,
    MakeStep,
    Norm,
    Numbers,
    Pull,
    Push,
    Read,
    Residuals,
    ScaleBy,
    States,
    Sum,
    Values,
    Verb,
    Write,
    unasked,
)


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
        exchange = read_exchange(site.exchange)
        for transfer in strategy.apply(place, exchange, site.label):
            if isinstance(transfer, OwnedTransfer):
                yield transfer


def _shell(form: ParameterForm) -> nn.Parameter:
    """Make a parameter of that form. Only parts that are written take memory."""
    return nn.Parameter(
        torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="cpu")
    )


@final
class InStep:
    """A server's part of a model with workers that keep step."""

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
        """Finish everything that workers wait for."""
        self._owners.settle()

    def observed(self) -> Counter[int]:
        """Nobody runs ahead."""
        return Counter()

    def obey(self, verb: Verb) -> None:
        """Do the server's share of the work that all workers do now."""
        match verb:
            case Sum():
                self._sum()
            case MakeStep():
                self._step(verb)
            case Read():
                self._read(verb)
            case Write():
                self._write(verb)
            case Norm(parameters, order):
                self._owners.norms(self._named(parameters), order)
            case ScaleBy(parameters, factor):
                self._owners.scale(self._named(parameters), factor)
            case Pull() | Push():
                raise unasked(verb)
            case _:
                assert_never(verb)

    def _sum(self) -> None:
        for transfer in self.transfers:
            self._engine.routes.settle(transfer)
            transfer.follow(set(transfer.held))
            self._engine.routes.exchange(transfer)

    def _step(self, step: MakeStep) -> None:
        # order 7: on the lanes, behind the sums of this backward
        for number, pieces in step.pieces.items():
            transfer = self.transfers[number]
            update = self._updates[step.optimizer][transfer]
            updated = {transfer.pieces[piece].parameter for piece in pieces}
            work = update.work(pieces, step.groups.value, step.attributes.value, updated)
            self._owners.send_off(transfer, (), work)

    def _read(self, read: Read) -> None:
        match read.aspect:
            case Aspect.GRADIENT:
                self._owners.fetch_all()
            case Aspect.STATE:
                self._owners.settle()
                for transfer, update in self._updates[read.optimizer].items():
                    gather = partial(update.gather_state, None)
                    self._owners.together(transfer, gather, "optimizer.state_dict(): state of")
            case Aspect.RESIDUALS:
                sum_residuals(self._owners)
            case Aspect.VALUES | Aspect.ERROR_BOUND:
                raise unasked(read)
            case _:
                assert_never(read.aspect)

    def _write(self, write: Write) -> None:
        carriers = coded_carriers(self.transfers)
        match write.aspect:
            case Aspect.VALUES:
                self._owners.settle()
                put_values(self.transfers, write.holds(Values))
            case Aspect.STATE:
                self._owners.settle()
                put_states(self._updates[write.optimizer], write.holds(States))
            case Aspect.RESIDUALS:
                self._owners.settle()
                sums = write.holds(Residuals)
                for carrier in carriers:
                    carrier.give(self._owners.rank, sums)
            case Aspect.ERROR_BOUND:
                most_error = write.holds(float)
                for carrier in carriers:
                    carrier.most_error = most_error
            case Aspect.GRADIENT:
                raise unasked(write)
            case _:
                assert_never(write.aspect)

    def _named(self, numbers: Numbers) -> list[Tensor]:
        return [self.transfers[number].parameters[index] for number, index in numbers]
