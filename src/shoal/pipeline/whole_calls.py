"""Calls of a pipelined model that each rank computes by itself, with whole weights.

Such a call is one whose inputs take a gradient (a gradient penalty, adversarial examples), or one
with a backward hook on a module whose layers several ranks hold. For it autograd must have all of
forward on one rank.

    forward    each weight comes from the rank that holds it, as the forward uses it
    backward   its gradient goes to that rank, as the mean over ranks

So such a call is exact, and may be differentiated twice. It costs what it costs without a pipeline:
the bytes of all weights, there and back. It is said once. Guarded by tests/served/.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from shoal.pipeline.calls import ModelCall
from shoal.pipeline.model import FORWARD, PipelinedModel
from shoal.pipeline.moving_buffers import MovingBuffers
from shoal.pipeline.parts import rows_of
from shoal.tensors.cut import cut_of, is_cut

_LOGGER = logging.getLogger("shoal")


@final
class WholeCalls:
    """The calls of a model that go with whole weights.

    Args:
        pipeline: the model.
    """

    def __init__(self, pipeline: PipelinedModel) -> None:
        self._pipeline = pipeline
        self._said = False
        modules = [(module, _holders(pipeline, module)) for module in pipeline.model.modules()]
        # hooks that come later, too: torch changes these dicts in place
        self._hooks = [
            hooks
            for module, holders in modules
            if len(holders) > 1
            for hooks in (module._backward_hooks, module._backward_pre_hooks)
        ]

    def reason(self, call: ModelCall) -> str:
        """Why a call must go with whole weights; "" if it need not."""
        if call.takes_gradients:
            return "inputs take a gradient"
        if any(self._hooks) and torch.is_grad_enabled():
            return "a backward hook is on a module whose layers several ranks hold"
        return ""

    def called(self, forward: Callable[..., Any], call: ModelCall, reason: str) -> Any:
        """Return the results of the model's own forward, for this rank's rows (a collective)."""
        pipeline = self._pipeline
        shapes, _ = pipeline.tell(call, FORWARD)
        self._say(reason)
        buffers = pipeline.homes.moving
        if pipeline.guide is None:
            with torch.no_grad():
                for name, buffer in buffers.items():
                    pipeline.comm.broadcast(buffer.value, pipeline.homes.of(name))
        comm = pipeline.comm if pipeline.guide is None else pipeline.guide.trainers
        moving = MovingBuffers(list(buffers.values()))
        args, kwargs = call.with_tensors(call.tensors)
        with moving.micro_batch(0):
            output = forward(*args, **kwargs)
        moving.join_ranks(comm, [rows_of(of_rank) for of_rank in shapes])
        return output

    def _say(self, reason: str) -> None:
        if self._said or self._pipeline.comm.rank:
            return
        self._said = True
        nbytes = sum(cut_of(p).like.nbytes for p in self._pipeline.model.parameters() if is_cut(p))
        _LOGGER.warning(
            "%s in a call of the model, which is in a pipeline: each rank computes such calls "
            "with whole weights, %.1f MB in forward and in backward",
            reason,
            nbytes / 1e6,
        )


def _holders(pipeline: PipelinedModel, module: nn.Module) -> set[int]:
    """Return the ranks that hold parameters of a module."""
    names = {id(parameter): name for name, parameter in pipeline.model.named_parameters()}
    trained = [names[id(parameter)] for parameter in module.parameters()]
    return {pipeline.holders[pipeline.layers[name]] for name in trained if name in pipeline.layers}
