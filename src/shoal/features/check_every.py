"""`check_every`: ranks compare weights and optimizer state after every so many backwards.

They compare the tensors that each rank updates itself. engine/replicas.py says how, and how they
act on a difference. The check runs only if ranks keep step, because only then the bits must be
equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from shoal.contracts.cadence import Event
from shoal.contracts.feature import Attachment, Feature
from shoal.contracts.transfer import OwnedTransfer
from shoal.core.numbers import check_whole
from shoal.core.option import Flag, option, read_whole
from shoal.core.role import Role
from shoal.engine.replicas import EVERY, Replicas
from shoal.session.opening import Opening
from shoal.session.running import Running


@final
@dataclass(frozen=True)
class CheckReplicas(Feature[Opening]):
    """Comparison of the bits of weights and optimizer state that each rank updates itself.

    Args:
        every: number of backwards from one comparison to the next; 0: never.

    Examples:
        >>> from shoal.features.check_every import CheckReplicas
        >>> CheckReplicas().every
        100
    """

    name: ClassVar[str] = "check_every"
    every: int = option(
        EVERY,
        keyword="check_every",
        flag=Flag(
            f"From one comparison of the ranks' copies to the next; 0 for none. {EVERY} by "
            "default.",
            "--check-every",
            read=read_whole("steps"),
            metavar="STEPS",
        ),
    )

    def __post_init__(self) -> None:
        rule = "check_every is a whole number of steps, or 0"
        check_whole(rule, self.every, 0, do="give 100, or 0 for no check of replicas")

    @classmethod
    def unasked(cls) -> CheckReplicas:
        return cls()

    def attach(self, opening: Opening) -> Attachment[Running] | None:
        return _Checks(self.every, opening) if self.every and opening.plan.in_step else None


@final
class _Checks(Attachment[Running]):
    """The comparisons of one model's replicas.

    Args:
        every: number of backwards from one to the next.
        opening: the model that is attached.
    """

    def __init__(self, every: int, opening: Opening) -> None:
        self._every, self._optimizers = every, tuple(opening.optimizers)

    def start(self, running: Running) -> None:
        weights = {
            name: parameter
            for site, _ in running.rewritten.sites
            # skip tables that send rows: a pass over all rows would take longer than the steps
            if site.strategy.role in (Role.BUCKET, Role.LAYER)
            for name, parameter in site.place.parameters.items()
        }
        owned = [
            transfer
            for transfer in running.rewritten.transfers
            if isinstance(transfer, OwnedTransfer) and not transfer.served and transfer.pieces
        ]
        if weights or owned:
            lane = running.engine.routes.lanes[0]
            replicas = Replicas(weights, owned, self._optimizers, lane, self._every)
            running.engine.listen(Event.BACKWARD_ENDED, replicas.on_backward_end)
