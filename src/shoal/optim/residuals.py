"""What codecs have lost of parameters that servers own: workers and servers sum it up together."""

from __future__ import annotations

from functools import partial

from shoal.codecs.remembering import Remembering
from shoal.contracts.comm import Comm
from shoal.contracts.exchange import StateDict
from shoal.optim.owners import Owners


def sum_residuals(owners: Owners) -> StateDict:
    """What all ranks owe together of what servers have a part of (a collective, servers too).

    Returns:
        By parameter name, then "gradient" or "parameter": flat, of the whole parameter's elements,
        on every rank.
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
    """Add what is owed beside it to what is owed."""
    for name, entries in more.items():
        known = sums.setdefault(name, {})
        for what, numbers in entries.items():
            known[what] = known[what] + numbers if what in known else numbers
