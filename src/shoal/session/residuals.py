"""What codecs have lost and ranks will still send: told and given back, for checkpoints.

A checkpoint keeps the sum over ranks, so that any number of ranks can go on. Guarded by
tests/session/test_residuals.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.codecs.remembering import coded_carriers
from shoal.contracts.exchange import StateDict
from shoal.contracts.transfer import Transfer
from shoal.optim.residuals import add_residuals, sum_residuals
from shoal.remote.orders import OfRank, SumResiduals, TakeResiduals
from shoal.session.additions import uncompiled
from shoal.session.session import current

_log = logging.getLogger("shoal")


def residuals(model: nn.Module) -> StateDict:
    """What this rank owes of a model's gradients and parameters, at a step boundary.

    Not a collective; it waits for parameters on their way.

    Returns:
        By parameter name: "gradient", in the unit of gradients, and "parameter", which owners have
        beyond what all ranks have. Flat, float32 (float64 where the model is), in the order of the
        parameter's memory. {} where nothing is owed.
    """
    return _owed(_settled(model))


def _owed(transfers: Iterable[Transfer]) -> StateDict:
    owed: StateDict = {}
    for transfer in transfers:
        if transfer.carrier is not None:
            add_residuals(owed, transfer.carrier.residuals())
    return owed


def summed_residuals(model: nn.Module) -> StateDict:
    """What all ranks owe together, on every rank: as `residuals` (a collective)."""
    session = current()
    attached = session.attached.get(uncompiled(model))
    if attached is None or not any(choice.codec for choice in attached.plan.choices):
        return {}  # as on every rank
    owners = attached.running.owners
    served = owners.served if owners is not None else ()
    own = _owed(transfer for transfer in _settled(model) if transfer not in served)
    listed = [
        [name, what, numbers.numel(), numbers.dtype == torch.float64]
        for name, entries in own.items()
        for what, numbers in entries.items()
    ]
    everywhere: list[list[list[Any]]] = session.comm.gather_objects(
        listed, "shoal.save: what codecs owe"
    )
    sums: StateDict = {}
    device = next(model.parameters()).device
    for name, what, numel, double in sorted({tuple(row) for rank in everywhere for row in rank}):
        dtype = torch.float64 if double else torch.float32
        numbers = own.get(name, {}).get(what, torch.zeros(numel, dtype=dtype, device=device))
        total = numbers.clone()
        session.comm.all_reduce(total)
        sums.setdefault(name, {})[what] = total
    if owners is not None and any(coded_carriers(served)):
        owners.tell(SumResiduals())
        add_residuals(sums, sum_residuals(owners))
    return sums


def give_residuals(
    model: nn.Module, sums: Mapping[str, Mapping[str, Tensor]], *, local: bool = False
) -> None:
    """Have ranks owe what ranks owed together, whatever plan and number of ranks that were.

    Each takes what it owns. What nobody owes here, as the plan is exact there or the parameter has
    another size, is dropped, with a warning on rank 0.

    Args:
        model: a parallelised one.
        sums: of all ranks' `residuals`, the same on every rank.
        local: whether ranks stepped by themselves, so that it is of differences of weights.
    """
    session = current()
    attached = session.attached.get(uncompiled(model))
    if sums and attached is not None and bool(attached.plan.local_steps) != local:
        _warn_of_dropped(list(sums), "local steps have begun or ended")
        sums = {}
    coded: set[str] = set()
    sizes = {name: p.numel() for name, p in uncompiled(model).named_parameters()}
    fitting = {
        name: entries
        for name, entries in sums.items()
        if all(numbers.numel() == sizes.get(name) for numbers in entries.values())
    }
    for carrier in coded_carriers(_settled(model)):
        exact_again = bool(carrier.given_up)
        carrier.give(session.comm.rank, {} if exact_again else fitting)
        coded.update(() if exact_again else carrier.bucket.numels)
    _give_servers(model, fitting)
    dropped = [name for name in sums if name not in fitting or name not in coded]
    _warn_of_dropped(dropped, "its size is another now, or it is sent exactly")


def _give_servers(model: nn.Module, sums: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Have each server owe what was owed of its pieces; what it owed is forgotten."""
    attached = current().attached.get(uncompiled(model))
    owners = attached.running.owners if attached is not None else None
    served = list(coded_carriers(owners.served)) if owners is not None else []

    def of_server(server: int) -> TakeResiduals:
        coded = [carrier for carrier in served if not carrier.given_up]
        names = {span.name for carrier in coded for span in carrier.bucket.spans[server]}
        return TakeResiduals({name: dict(sums[name]) for name in names & sums.keys()})

    if owners is not None and served:
        owners.tell(OfRank(of_server))


def warn_of_residuals(model: nn.Module) -> None:
    """Say on rank 0 of which parameters codecs have lost something that nobody will send."""
    owed = [
        name
        for name, entries in residuals(model).items()
        if any(numbers.any() for numbers in entries.values())
    ]
    _warn_of_dropped(owed, "nobody sends it after unparallelize")


def _warn_of_dropped(names: Sequence[str], why: str) -> None:
    if names and current().comm.rank == 0:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        _log.warning("what codecs had lost of %s is dropped: %s", ", ".join(names[:3]) + more, why)


def _settled(model: nn.Module) -> list[Transfer]:
    attached = current().attached.get(uncompiled(model))
    if attached is None:
        return []
    if attached.running.owners is not None:
        attached.running.owners.settle()
    return list(attached.engine.transfers)
