"""Local steps with a quorum: plans that have one, and the transfer of a model's parameters.

The rounds themselves are in strategies/quorum.py. Guarded by tests/equivalence/test_quorum.py.
"""

from __future__ import annotations

from shoal.contracts.feature import PlanFacts
from shoal.core.errors import PlanError
from shoal.core.outer_step import Outer
from shoal.core.plan import Plan
from shoal.session.opening import Opening
from shoal.strategies.quorum import QuorumTransfer


def check_quorum(plan: Plan, facts: PlanFacts) -> None:
    """Refuse what does not go together with a quorum (PlanError)."""
    for choice in plan.choices:
        if choice.codec:
            raise PlanError(
                "with a quorum weights travel exactly",
                where=f"layer {choice.layer}",
                got=choice.way,
                do="leave out pins with codecs and codecs=, or leave out the quorum",
            )
    if facts.profile is not None and facts.profile.moving:
        raise PlanError(
            "training changes buffers on each rank otherwise, and ranks that a round does not wait "
            "for cannot agree on them",
            where=", ".join(state.name for state in facts.profile.moving[:3]),
            do='give buffers="local", with which each rank keeps its own, or leave out the quorum',
        )


def quorum_of(opening: Opening, outer: Outer) -> QuorumTransfer | None:
    """Return the transfer of all parameters if rounds have a quorum (a collective)."""
    if outer.quorum is None:
        return None
    channel = opening.channel("rounds", idle=True)
    transfer = QuorumTransfer(channel, opening.comm, outer)
    opening.threads.append(transfer.office)
    return transfer
