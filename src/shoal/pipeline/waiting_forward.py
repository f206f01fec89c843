"""A call that waits until its loss is known, and goes there and back for it then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import torch

from shoal.core.errors import UsageError
from shoal.pipeline.alone_output import is_number
from shoal.pipeline.early_loss import EarlyLoss
from shoal.pipeline.expressions import EndResult, Expression
from shoal.pipeline.kept_gradients import WAY_OUT
from shoal.pipeline.run import ForwardRun
from shoal.pipeline.schedule_run import ScheduledRun, SoughtLoss

Later = Callable[[], AbstractContextManager[None]]


@final
class WaitingForward:
    """One call that waits.

    Args:
        run: the call.
        ended: its output.
        later: returns a context in which stations are computed behind the call.

    Raises:
        UsageError: gradients need a scaled loss, which is not scaled yet.
    """

    def __init__(self, run: ForwardRun, ended: Expression, later: Later) -> None:
        self.ended = ended
        self._run, self._later = run, later
        model: Any = run.pipeline.model
        halves = any(p.dtype == torch.float16 for p in model.parameters())
        if halves or any(on and dtype == torch.float16 for _, on, dtype in run.modes.autocast):
            raise UsageError(
                'schedule="1f1b" goes back before a scaler has scaled the loss, and gradients of '
                "float16 vanish without it",
                do=f"use bfloat16, which needs no scaler, or {WAY_OUT}",
            )

    def own_loss(self, takes_grad: Sequence[bool]) -> SoughtLoss | None:
        """Return the loss that the model itself returns, if that is its one number.

        Args:
            takes_grad: whether each tensor of the output takes a gradient.
        """
        numbers = [n for n in self.numbers if takes_grad[n]]
        return SoughtLoss(EndResult(self.ended, numbers[0])) if len(numbers) == 1 else None

    @property
    def numbers(self) -> list[int]:
        """The places of numbers among the output's tensors. Ranks are told them at once."""
        return [n for n, form in enumerate(self.ended.forms) if is_number(form)]

    def go_through(self) -> None:
        """Compute the stations for all micro-batches, which go back later."""
        assert self._run.inputs is not None
        with self._later(), self._run.modes.again():
            self._run.compute(self._run.inputs)

    def go_there_and_back(self, loss: SoughtLoss) -> EarlyLoss:
        """Compute the stations for a loss, one forward and one backward."""
        scheduled = ScheduledRun(self._run, self.ended, loss)
        with self._later():
            scheduled.compute()
        return EarlyLoss(self._run, loss.result, scheduled.kept)
