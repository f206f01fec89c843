"""What runs a parallelised model: made by `attach`, and taken apart again by `release`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from shoal.core.errors import UsageError, WorldError
from shoal.engine.engine import Engine
from shoal.engine.weights import Weigher
from shoal.optim.owners import Owners
from shoal.optim.part import Part
from shoal.remote.tables import Tables
from shoal.rewrite.apply import Rewritten, check_release
from shoal.session.rounds import Rounds
from shoal.session.watch import Watched
from shoal.strategies.sync_batchnorm import SyncNorms


@dataclass(frozen=True)
class Running:
    """What runs a model that has been rewritten. Does not keep the model alive."""

    number: int  # of the model in its session
    rewritten: Rewritten
    engine: Engine
    owners: Owners | None  # where any parameter has owners
    parts: tuple[Part, ...]  # of all its optimizers
    watched: Watched
    weigher: Weigher
    tables: Tables | None  # where servers have any
    at_servers: int | None  # the model's number there, where they own any parameter
    norms: SyncNorms | None = None  # that go by the rows of all ranks
    rounds: Rounds | None = None  # where ranks step by themselves

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
                "gradients are kept until the step that ends their period (update_every)",
                got=", ".join(f"step {p.steps} of {p.every}" for p in self.engine.periods),
                do="go on until these end, or save a checkpoint, which has them",
            )
        if self.engine.is_open:
            raise WorldError(
                "a backward has ended half-way, or goes on still",
                do="start again from a checkpoint; if this is a hook: call it behind backward",
            )
