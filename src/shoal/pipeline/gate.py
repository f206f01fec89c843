"""The gate of a call of the model: a backward comes here behind all losses, before all values.

    loss ─▶ EndLoss ─▶ [BackwardGate] ─▶ SentOn, Arrived …

There the ranks with rows tell hosts without rows that they go back, and from which results. Such a
host keeps no script, so it cannot know by itself. A call goes back once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from shoal.core.errors import UsageError
from shoal.pipeline.crossings import BackwardGate
from shoal.pipeline.model import PipelinedModel


@final
class CallGate:
    """The gate of one call.

    Args:
        run: the call.
        pipeline: the model.
        values: tickets and tokens of the call.
        grad: whether a gradient may come back.
    """

    def __init__(
        self, run: Any, pipeline: PipelinedModel, values: Sequence[Tensor], *, grad: bool
    ) -> None:
        self._guide, self._went_back = pipeline.guide, False
        self._results: list[tuple[int, int]] = []
        self.tensors = [*values]  # tensors that every loss of the call depends on
        if self._guide is None or not grad:
            return
        parts = [p for p in pipeline.elsewhere if p.requires_grad]
        with torch._C.DisableTorchFunctionSubclass():
            gate: Tensor = BackwardGate.apply(  # type: ignore[no-untyped-call]
                run, len(parts), pipeline.anchor, *parts, *values
            )
        self.tensors = [gate]

    def note(self, result: tuple[int, int]) -> None:
        """Note that the running backward comes from a result.

        Raises:
            UsageError: a backward has gone through the call before.
        """
        if self._guide is None:
            return
        if self._went_back:
            raise UsageError(
                "a second backward through a forward whose layers are on hosts without rows",
                do="call the model again, or add the losses before backward",
            )
        self._results.append(result)

    def go_back(self, run: Any) -> None:
        """Tell hosts without rows that a backward goes through the call."""
        assert self._guide is not None
        # batch 6: all slopes are on their way
        results, self._results, self._went_back = self._results, [], True
        self._guide.goes_back(run, results)
