"""Calls of a model in a pipeline: all ranks make them together, or one without gradients alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch

from shoal.pipeline.calls import ModelCall
from shoal.pipeline.computed_forward import EndedForward
from shoal.pipeline.guide import ToldCall
from shoal.pipeline.kept_numbers import KeptNumbers, check_objects
from shoal.pipeline.model import EVALUATION, PipelinedModel
from shoal.pipeline.output import EndOutput
from shoal.pipeline.run import ForwardRun, model_call
from shoal.pipeline.trees import mapped
from shoal.pipeline.whole_calls import WholeCalls
from shoal.tensors.whole_module_calls import holding_wholes


@final
class PipelineCalls:
    """Runs the calls of a model in a pipeline.

    Args:
        pipeline: the model.
    """

    def __init__(self, pipeline: PipelinedModel) -> None:
        self.pipeline, self._kept = pipeline, KeptNumbers(pipeline.model)
        self._whole = WholeCalls(pipeline)
        self.runs = False

    def called(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model, together with all ranks."""
        if self.runs:
            return forward(*args, **kwargs)
        # an output of before, which this rank looks at
        args, kwargs = mapped(
            lambda leaf: leaf.look() if isinstance(leaf, EndOutput) else leaf, (args, kwargs)
        )
        check_objects((args, kwargs))
        self.pipeline.comm.reached("a call of the model, which is in a pipeline")
        if self._is_alone():
            return self._alone(forward, args, kwargs)
        self.pipeline.outbox.finish()
        call = model_call(self.pipeline, args, kwargs)
        if reason := self._whole.reason(call):
            return self._whole.called(forward, call, reason)
        return self.run(forward, call, self._output)

    def run(
        self,
        forward: Callable[..., Any],
        call: ModelCall,
        end: Callable[[EndedForward], Any],
        told: ToldCall | None = None,
    ) -> Any:
        """Run a call in the pipeline, and return the result of `end`."""
        self.runs = True
        try:
            self._kept.begin()
            return end(
                EndedForward(ForwardRun(self.pipeline, self._kept.around(forward), call, told))
            )
        finally:
            self.runs = False

    def _output(self, ended: EndedForward) -> Any:
        output, kept = ended.output()
        self._kept.ended(kept)
        return output

    def _is_alone(self) -> bool:
        """Return whether this rank alone calls the model, without gradients."""
        comm = self.pipeline.comm
        if comm.attendance is None or torch.is_grad_enabled():
            return False
        return comm.attendance.numbers((), EVALUATION) is None

    def _alone(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's own forward here, on all of the parameters."""
        modules = self.pipeline.model.modules()
        self.runs = True
        try:
            with holding_wholes(modules, self.pipeline.comm):
                return forward(*args, **kwargs)
        finally:
            self.runs = False
