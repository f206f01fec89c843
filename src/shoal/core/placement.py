"""Placement: the owner of each parameter in a plan (`sliced`, `server`).

    "balanced"         each bucket is cut into its owners' shares, across parameters: every owner
                       has as many bytes
    "round-robin"      whole parameters, dealt to the owners in turn over the whole model, in the
                       plan's order
    "hash"             whole parameters, by CRC-32 of the dotted name modulo the owners: a layer
                       that is added or removed moves no other
    {pattern: rank}    whole parameters, to the rank that a dotted name or glob gives (the last
                       match counts); parameters without a match are cut as under "balanced"

Turns count all parameters of the plan, whatever strategy serves them. So the choice for one layer
moves no other layer, and a turn follows from the plan alone, the same on every rank. Under `server`
turns go round the servers only. Whole parameters cost time on the busiest owner's link. Through
`direct` the owner of n bytes moves (P−1)·n each way. Owners of 1/P each move 2·n·(P−1)/P. In return
an optimizer may look at whole tensors (profiling/updates.py).

Source: Paddle's distribute transpiler dispatches variables to parameter servers in these two ways
(fluid/transpiler/ps_dispatcher.py: RoundRobin, HashName). Its hash is Python's; the hash here is
the same in every process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from shoal.core.errors import PlanError
from shoal.core.names import matched

Placement = str | dict[str, int]
POLICIES = ("balanced", "round-robin", "hash")
BALANCED = POLICIES[0]


@dataclass(frozen=True)
class Owner:
    """Owner of one whole parameter: a rank, or the owner with the turn `number`."""

    number: int
    given: bool = False  # the number is that of a rank, as the user gave it

    def among(self, owners: Sequence[int]) -> int:
        """Return the owner's rank, if turns go round these owners."""
        return self.number if self.given else owners[self.number % len(owners)]


def owners_of(placement: Placement, layers: Mapping[str, Sequence[str]]) -> dict[str, Owner]:
    """Return the owners of the parameters that one rank owns whole; all others are cut.

    Args:
        placement: a policy's name, or ranks by dotted name or glob.
        layers: names of the parameters of each layer, in the plan's order.

    Returns:
        Owners by the parameter's dotted name.

    Raises:
        PlanError: the placement is not valid, or a name in it matches nothing.
    """
    check_form(placement)
    parameters = [name for names in layers.values() for name in names]
    if placement == "balanced":
        return {}
    if placement == "round-robin":
        return {name: Owner(turn) for turn, name in enumerate(parameters)}
    if placement == "hash":
        return {name: Owner(crc32(name.encode())) for name in parameters}
    assert isinstance(placement, dict)
    owners: dict[str, Owner] = {}
    known = [*layers, *(name for name in parameters if name not in layers)]
    for pattern, rank in placement.items():
        for name in matched(pattern, known, "placement of", "layer or parameter"):
            owners |= dict.fromkeys(layers.get(name, (name,)), Owner(rank, given=True))
    return owners


def check_form(placement: Any, source: str = "the placement") -> None:
    """Raise PlanError unless the value is a policy or a mapping from names to ranks."""
    if isinstance(placement, str) and placement in POLICIES:
        return
    if isinstance(placement, dict) and all(
        isinstance(name, str) and type(r) is int for name, r in placement.items()
    ):
        return
    raise PlanError(
        f"{source} is neither a policy nor ranks by name",
        got=repr(placement)[:200],
        expected=f"one of {', '.join(POLICIES)}, or ranks by dotted name or glob",
        do=f'write "{BALANCED}", or for instance {{"head.weight": 0}}',
    )


def check_placement(
    placement: Any,
    layers: Mapping[str, Sequence[str]],
    workers: int,
    servers: int = 0,
    *,
    stale: bool = False,
) -> None:
    """Refuse a placement that matches nothing, or names a rank that can own nothing.

    Args:
        placement: the placement as the user gave it.
        layers: names of the parameters of each layer.
        workers: number of ranks that train: ranks 0 … workers − 1.
        servers: number of servers, the ranks after them.
        stale: whether workers run ahead of one another, so that they own nothing.

    Raises:
        PlanError: it does not fit. The message names the change to make.
    """
    owners = owners_of(placement, layers)
    able = range(workers if stale else 0, workers + servers)
    for name, owner in owners.items():
        if owner.given and owner.number not in able:
            runs_ahead = stale and owner.number in range(workers)
            raise PlanError(
                f"the placement gives {name} to a rank that cannot own it",
                got=f"rank {owner.number}"
                + (", which runs ahead of the others" if runs_ahead else ""),
                expected=f"one of the ranks {able[0]} … {able[-1]}"
                + (", the servers" if stale else ""),
                do="change the rank in the placement"
                + (", or set the staleness to 0" if runs_ahead else ""),
            )
