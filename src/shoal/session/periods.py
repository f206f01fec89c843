"""Gradients that wait for the end of their period (`update_every`), in checkpoints.

A checkpoint has their sums over all ranks, each gradient times its rows, so any number of ranks may
go on: rank 0 keeps them all. Training that ends within a period drops them, and says so. Guarded by
tests/equivalence/test_update_every.py.
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
from shoal.session.session import Session, current

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

    What nobody keeps here is dropped, with a warning on rank 0: the layer has no such period, or
    shares it with layers that have gradients of other steps, or none.
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
            "are dropped: %d parameters have no such period here, or share it with parameters that "
            "have gradients of other steps",
            ", ".join(dropped[:3]),
            len(dropped),
        )


def drop_unfinished(session: Session) -> None:
    """Training has ended: drop what is kept, with a warning on rank 0 that names the layers."""
    for attached in session.attached.values():
        unfinished = [period for period in attached.engine.periods if period.steps]
        for period in unfinished:
            layers = [n for n, every in attached.plan.update_every.items() if every == period.every]
            if session.comm.rank == 0:
                _log.warning(
                    "training ends at step %d of %d of a period (update_every): the gradients that "
                    "were kept of layer %s were not applied. End with a period, or go on from a "
                    "checkpoint, which has them",
                    period.steps,
                    period.every,
                    ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if layers[3:] else ""),
                )
            period.begin()
        if unfinished:
            attached.engine.renew()


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
    # a period has one mean: of what other periods kept, or of some of its parameters, it has none
    alike = {(float(kept[_STEPS]), float(kept[_ROWS])) for kept in own.values()}
    if len(own) < len(period.parameters) or len(alike) != 1:
        return set()
    steps, rows = alike.pop()
    period.steps = int(steps)
    if weigher.usual is None:
        weigher.go_on(rows / period.steps / ranks or 1.0)
    if rank == 0:
        usual = weigher.usual or 1.0
        period.share = rows / usual
        for name, kept in own.items():
            period.put(period.parameters[name], kept[_SUM] / usual)
    return set(own)
