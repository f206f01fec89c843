"""Running: the parts that run a parallelised model. `attach` makes them, `release` ends them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shoal.contracts.feature import Attachment
from shoal.contracts.transfer import Transfer
from shoal.core.errors import UsageError, WorldError
from shoal.engine.engine import Engine
from shoal.engine.weights import Weigher
from shoal.optim.owners import Owners
from shoal.remote.tables import Tables
from shoal.rewrite.apply import Rewritten, check_release


@dataclass(frozen=True)
class Running:
    """Engine and other parts that run a rewritten model. They do not keep the model alive.

    Args:
        number: the model's number in its session.
        rewritten: the model's sites, with their transfers.
        engine: the engine that sends for the model.
        owners: the owners that update parameters, if any parameter has one.
        weigher: the weigher of rows.
        tables: the way to tables at servers, if there are any.
        at_servers: the model's number at servers, if they own any parameter.
        attachments: the features' attachments, by the features' names and in their order.
    """

    number: int
    rewritten: Rewritten
    engine: Engine
    owners: Owners | None
    weigher: Weigher
    tables: Tables | None
    at_servers: int | None
    attachments: Mapping[str, Attachment[Any]] = field(default_factory=dict)

    def settled_transfers(self) -> list[Transfer]:
        """Return the model's transfers, once parameters on their way are there."""
        if self.owners is not None:
            self.owners.settle()
        return list(self.engine.transfers)

    def check_release(self, model: nn.Module) -> None:
        """Refuse a release that is impossible now, or for ever.

        Raises:
            UsageError: the model cannot be released. The error says how to go on.
            WorldError: a backward has ended half-way.
        """
        check_release(model, self.rewritten)
        if self.engine.is_accumulating:
            raise UsageError(
                "gradients that were accumulated on this rank have not been sent",
                do="do one more backward, outside optimizer.accumulate()",
            )
        if self.engine.keeps_gradients:
            raise UsageError(
                "gradients are kept until the step that ends their update period",
                got=", ".join(f"step {p.steps} of {p.every}" for p in self.engine.periods),
                do="go on until these end, or save a checkpoint, which has them",
            )
        if self.engine.is_open:
            raise WorldError(
                "a backward has ended half-way, or goes on still",
                do="start again from a checkpoint; if this is a hook: call it behind backward",
            )
