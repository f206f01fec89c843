"""The loss of a call that goes back early, with a part of its micro-batches under way.

It is one number of one call. Another number with a gradient would need these micro-batches again,
so it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from shoal.core.errors import UsageError
from shoal.pipeline.expressions import EndResult
from shoal.pipeline.kept_gradients import WAY_OUT, KeptGradients, KeptLoss, tell_slopes
from shoal.pipeline.model import BACKWARD
from shoal.pipeline.run import ForwardRun


@final
class EarlyLoss:
    """The loss of one call, with the gradients that are kept for its backward.

    Args:
        run: the call.
        result: the loss, as the end has it.
        kept: the gradients.
    """

    def __init__(self, run: ForwardRun, result: EndResult, kept: KeptGradients) -> None:
        self._run, self._result, self._kept = run, result, kept
        self._is_told = False

    def give(self, result: EndResult, value: Tensor) -> Tensor:
        """Return the number of this rank's rows. Its backward is that of all ranks.

        Raises:
            UsageError: it is another number than the loss.
        """
        is_loss = result.expression is self._result.expression
        if self._is_told or not is_loss or result.number != self._result.number:
            raise UsageError(
                "compute_loss computes a second number with a gradient from the model's output, "
                'and with schedule="1f1b" micro-batches have gone back for the first',
                do=f"make one function of torch give the loss, detach other numbers, or {WAY_OUT}",
            )
        self._is_told = True
        pipeline = self._run.pipeline
        own = self._kept.parameters
        elsewhere = [p for p in pipeline.elsewhere if p.requires_grad]
        with torch._C.DisableTorchFunctionSubclass():
            number: Tensor = KeptLoss.apply(  # type: ignore[no-untyped-call]
                self, value, len(own), *own, *elsewhere, pipeline.anchor
            )
        return number

    def release(self, grad: Tensor) -> Sequence[Tensor | None]:
        """Return the gradients of this rank's parameters, given that of its loss (a collective)."""
        run, comm = self._run, self._run.comm
        self._kept.check()
        comm.journal.begins(BACKWARD)
        comm.reached("backward of a pipeline that has gone back early")
        weight = run.pipeline.weighs(run.weight_of)
        own = float(grad) * (1.0 if weight is None else weight) / comm.size
        return self._kept.take(tell_slopes(comm, own))
