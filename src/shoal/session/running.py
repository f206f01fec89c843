"""What runs a parallelised model: made by `attach`, and taken apart again by `release`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shoal.contracts.feature import Attachment
from shoal.core.errors import UsageError, WorldError
from shoal.engine.engine import Engine
from shoal.engine.weights import Weigher
from shoal.optim.owners import Owners
from shoal.remote.tables import Tables
from shoal.rewrite.apply import Rewritten, check_release


@dataclass(frozen=True)
class Running:
    """What runs a model that has been rewritten. Does not keep the model alive.

    Args:
        number: of the model in its session.
        rewritten: its sites, with their transfers.
        engine: what sends for it.
        owners: what updates parameters that have owners, if any has.
        weigher: what weighs rows.
        tables: the way to tables at servers, if there are any.
        at_servers: the model's number there, if they own any parameter.
        attachments: what features keep of it, by their names and in their order.
    """

    number: int
    rewritten: Rewritten
    engine: Engine
    owners: Owners | None
    weigher: Weigher
    tables: Tables | None
    at_servers: int | None
    attachments: Mapping[str, Attachment[Any]] = field(default_factory=dict)

    def check_release(self, model: nn.Module) -> None:
        """Refuse to release what cannot be released now, or ever.

        Raises:
            UsageError: it says what to do instead.
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
