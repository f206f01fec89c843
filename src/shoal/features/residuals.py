"""Residuals: losses of codecs that ranks will send later. Checkpoints save and restore them.

A checkpoint keeps the sum over ranks, so that any number of ranks can go on. Guarded by
tests/features/test_residuals.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final
from weakref import ref

import torch
from torch import Tensor, nn

from shoal.codecs.carrier_memory import coded_carriers
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import StateDict
from shoal.contracts.feature import Attachment, Feature
from shoal.contracts.state_dicts import unlike_tensors
from shoal.contracts.transfer import Transfer
from shoal.core.names import first_names
from shoal.optim.residuals import add_residuals, sum_residuals
from shoal.remote.verbs import Aspect, Read, Write
from shoal.remote.wire import Data
from shoal.session.compiled_models import without_compilation
from shoal.session.opening import Opening
from shoal.session.running import Running
from shoal.session.session import current

_log = logging.getLogger("shoal")


@final
@dataclass(frozen=True)
class KeepResiduals(Feature[Opening]):
    """Residuals of codecs, which go into checkpoints and on under another plan."""

    name: ClassVar[str] = "residuals"

    @classmethod
    def unasked(cls) -> KeepResiduals:
        return cls()

    def attach(self, opening: Opening) -> Attachment[Running]:
        return Residuals(opening)


@final
class Residuals(Attachment[Running]):
    """Residuals that the ranks of one model owe one another.

    Args:
        opening: the model that is attached.
    """

    def __init__(self, opening: Opening) -> None:
        self._model: ref[nn.Module] = ref(opening.model)
        self._comm: Comm = opening.comm
        self._is_local = opening.plan.is_local
        self._has_codecs = any(choice.codec for choice in opening.plan.choices)
        self._running: Running | None = None

    def start(self, running: Running) -> None:
        self._running = running

    @property
    def running(self) -> Running:
        """Engine and other parts that run the model."""
        assert self._running is not None
        return self._running

    def own(self) -> StateDict:
        """Return the residuals that this rank owes. Not a collective."""
        return _owed_residuals(self.running.settled_transfers())

    def state(self) -> Any:
        """Return the residuals of all ranks, on every rank; None if there are none (a collective).

        "local" says whether ranks step by themselves. Residuals are of differences of weights then.
        """
        sums = self.sums()
        return {"sums": sums, "local": self._is_local} if sums else None

    def sums(self) -> StateDict:
        """Return the sums of all ranks' residuals, in the form of `residuals` (a collective)."""
        model = self._model()
        if model is None or not self._has_codecs:
            return {}  # every rank returns here
        owners = self.running.owners
        served = owners.served if owners is not None else ()
        transfers = self.running.settled_transfers()
        own = _owed_residuals(transfer for transfer in transfers if transfer not in served)
        listed = [
            [name, what, numbers.numel(), numbers.dtype == torch.float64]
            for name, entries in own.items()
            for what, numbers in entries.items()
        ]
        everywhere: list[list[list[Any]]] = self._comm.gather_objects(
            listed, "shoal.save: what codecs owe"
        )
        sums: StateDict = {}
        device = next(model.parameters()).device
        rows = sorted({tuple(row) for of_rank in everywhere for row in of_rank})
        for name, what, numel, double in rows:
            dtype = torch.float64 if double else torch.float32
            numbers = own.get(name, {}).get(what, torch.zeros(numel, dtype=dtype, device=device))
            total = numbers.clone()
            self._comm.all_reduce(total)
            sums.setdefault(name, {})[what] = total
        if owners is not None and any(coded_carriers(served)):
            owners.tell(Read(Aspect.RESIDUALS))
            add_residuals(sums, sum_residuals(owners))
        return sums

    def problem(self, state: Any) -> str:
        if not isinstance(state, dict) or not isinstance(state.get("local"), bool):
            return 'no dict with "sums" and "local"'
        if unlike := unlike_tensors(state.get("sums")):
            return unlike
        kept = [tensor for of_kind in state["sums"].values() for tensor in of_kind.values()]
        flat = all(tensor.dim() == 1 and tensor.is_floating_point() for tensor in kept)
        return "" if flat else "sums that are not flat, or not floating point"

    def load(self, state: Any) -> None:
        """Have ranks owe the residuals of a checkpoint, of any plan and any number of ranks.

        Each rank takes the part that it owns. If the terms of a linear codec are summed
        (codecs/summed_terms.py) nobody owns a part, so rank 0 takes all. A residual is dropped,
        with a warning on rank 0, if the plan is exact here or the parameter has another size.
        """
        self.give({} if state is None else state["sums"], local=bool(state and state["local"]))

    def give(self, sums: Mapping[str, Mapping[str, Tensor]], *, local: bool) -> None:
        """Have ranks owe the sums of earlier residuals.

        Args:
            sums: the sums of all ranks' `residuals`, the same on every rank.
            local: whether ranks stepped by themselves.
        """
        model = self._model()
        if sums and self._is_local != local:
            _warn_of_dropped(list(sums), "local steps have begun or ended")
            sums = {}
        named = {} if model is None else dict(model.named_parameters())
        fitting = {
            name: entries
            for name, entries in sums.items()
            if name in named and all(n.numel() == named[name].numel() for n in entries.values())
        }
        coded: set[str] = set()
        for carrier in coded_carriers(self.running.settled_transfers()):
            exact_again = bool(carrier.given_up)
            carrier.give(self._comm.rank, {} if exact_again else fitting)
            coded.update(() if exact_again else carrier.bucket.numels)
        self._give_servers(fitting)
        dropped = [name for name in sums if name not in fitting or name not in coded]
        _warn_of_dropped(dropped, "its size is another now, or it is sent exactly")

    def _give_servers(self, sums: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Have each server owe the residuals of its pieces, and forget its earlier ones."""
        owners = self.running.owners
        served = list(coded_carriers(owners.served)) if owners is not None else []

        def of_server(server: int) -> Write:
            coded = [carrier for carrier in served if not carrier.given_up]
            names = {span.name for carrier in coded for span in carrier.bucket.spans[server]}
            own = {name: dict(sums[name]) for name in names & sums.keys()}
            return Write(Aspect.RESIDUALS, Data(own))

        if owners is not None and served:
            owners.tell(of_server)

    def release(self, *, goes_on: bool) -> None:
        if goes_on:
            return
        owed = [
            name
            for name, entries in self.own().items()
            if any(numbers.any() for numbers in entries.values())
        ]
        _warn_of_dropped(owed, "nobody sends it after unparallelize")


def residuals_of(model: nn.Module) -> Residuals:
    """Return the attachment that keeps the residuals of a parallelised model."""
    kept = current().attached[without_compilation(model)].running.attachments[KeepResiduals.name]
    assert isinstance(kept, Residuals)
    return kept


def residuals(model: nn.Module) -> StateDict:
    """Return this rank's residuals of a model's gradients and parameters, at a step boundary.

    Not a collective, but it waits for parameters on their way.

    Returns:
        Tensors by parameter name: "gradient", in the unit of gradients, and "parameter", the amount
        that owners have and the other ranks lack. They are flat, float32 (float64 if the model is),
        in the order of the parameter's memory. {} if nothing is owed.
    """
    return residuals_of(model).own() if without_compilation(model) in current().attached else {}


def _owed_residuals(transfers: Iterable[Transfer]) -> StateDict:
    owed: StateDict = {}
    for transfer in transfers:
        if transfer.carrier is not None:
            add_residuals(owed, transfer.carrier.residuals())
    return owed


def _warn_of_dropped(names: Sequence[str], why: str) -> None:
    if names and current().comm.rank == 0:
        _log.warning("what codecs had lost of %s is dropped: %s", first_names(names, most=3), why)
