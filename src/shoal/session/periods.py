"""Gradients that wait for the end of their period (`update_every`), in checkpoints.

A checkpoint has their sums over all ranks, each gradient times its rows, so any number of ranks may
go on: rank 0 keeps them all. Guarded by tests/equivalence/test_update_every.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.contracts.exchange import StateDict
from shoal.contracts.period import Period
from shoal.engine.weights import Weigher
from shoal.session.additions import uncompiled
from shoal.session.session import current

_SUM, _ROWS, _STEPS = "accumulated", "rows", "steps"
_log = logging.getLogger("shoal")


def is_kept(state: Mapping[str, Any]) -> bool:
    """Whether a parameter's state is what `kept_sums` gives."""
    return _SUM in state


def kept_sums(model: nn.Module) -> StateDict:
    """What all ranks keep of a model, by parameter name; {} between periods (a collective).

    "accumulated": flat, in the order of the parameter's memory, the sum over ranks and steps of
    gradients times rows. "rows" of all these, and "steps".
    """
    session = current()
    attached = session.attached.get(uncompiled(model))
    found: StateDict = {}
    if attached is None:
        return found
    usual = attached.running.weigher.usual or 1.0
    for period in attached.engine.periods:
        if not period.steps:  # as on every rank
            continue
        rows = _number(period.share * usual)
        session.comm.all_reduce(rows)
        for name, parameter in period.parameters.items():
            total = period.sum_of(parameter)
            total = (total.float() if total.itemsize < 4 else total).mul_(usual)
            session.comm.all_reduce(total)
            found[name] = {_SUM: total, _ROWS: rows.clone(), _STEPS: _number(period.steps)}
    return found


def _number(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, device="cpu")


def give_kept(model: nn.Module, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Have ranks keep what all kept together; without any of it periods begin anew.

    What nobody keeps here, as the layer has no such period, is dropped, with a warning on rank 0.
    """
    session = current()
    attached = session.attached.get(uncompiled(model))
    taken: set[str] = set()
    if attached is not None and attached.engine.periods:
        for period in attached.engine.periods:
            weigher = attached.running.weigher
            taken |= _given(period, state, weigher, session.comm.rank, session.comm.size)
        attached.engine.renew()
    dropped = [name for name in state if name not in taken]
    if dropped and session.comm.rank == 0:
        _log.warning(
            "%s: the checkpoint has gradients of steps before their update (update_every), which "
            "are dropped, as %d parameters have no such period here",
            ", ".join(dropped[:3]),
            len(dropped),
        )


def _given(
    period: Period,
    state: Mapping[str, Mapping[str, Tensor]],
    weigher: Weigher,
    rank: int,
    ranks: int,
) -> set[str]:
    """Have this rank keep its part; the names of what is kept."""
    period.begin()
    own = {
        name: kept
        for name, kept in state.items()
        if name in period.parameters
        and len(kept[_SUM]) == period.parameters[name].numel()
        and float(kept[_STEPS]) < period.every
    }
    for kept in own.values():
        period.steps, rows = int(kept[_STEPS]), float(kept[_ROWS])
    if own and weigher.usual is None:
        weigher.go_on(rows / period.steps / ranks or 1.0)
    if own and rank == 0:
        usual = weigher.usual or 1.0
        period.share = rows / usual
        for name, kept in own.items():
            period.put(period.parameters[name], kept[_SUM] / usual)
    return set(own)
