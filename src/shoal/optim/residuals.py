"""Losses of codecs on parameters that servers own: workers and servers sum them together."""

from __future__ import annotations

from functools import partial

from shoal.codecs.carrier_memory import Remembering
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import StateDict
from shoal.optim.owners import Owners


def sum_residuals(owners: Owners) -> StateDict:
    """Sum the losses of all ranks and servers on the servers' parameters (a collective).

    Returns:
        By parameter name, then "gradient" or "parameter": a flat tensor of all the parameter's
        elements, on every rank.
    """
    sums: StateDict = {}
    owners.settle()
    for transfer in owners.served:
        if isinstance(carrier := transfer.carrier, Remembering):
            work = partial(_sum, carrier, sums)
            owners.together(transfer, work, "shoal.save: what codecs owe of")
    return sums


def _sum(carrier: Remembering, sums: StateDict, comm: Comm) -> None:
    add_residuals(sums, carrier.summed_residuals(comm))


def add_residuals(sums: StateDict, more: StateDict) -> None:
    """Add losses to the sums by parameter."""
    for name, entries in more.items():
        known = sums.setdefault(name, {})
        for what, numbers in entries.items():
            known[what] = known[what] + numbers if what in known else numbers
