"""Functions of outputs, as the end computes them for each rank's rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from shoal.core.errors import UsageError
from shoal.pipeline.calls import ModelCall, Shape
from shoal.pipeline.expressions import Expression, with_constants
from shoal.pipeline.route import Coming
from shoal.pipeline.run import ForwardRun


def computing(
    run: ForwardRun,
    order: Sequence[Expression],
    call: ModelCall,
    shapes: Sequence[Sequence[Shape]],
    *,
    loss: Expression | None,
) -> Callable[[int], None]:
    """Begin to receive each rank's arguments; return a function that computes for its rows.

    Args:
        run: the forward that has the outputs.
        order: the functions, in order.
        call: this rank's arguments of them.
        shapes: the forms of each rank's arguments.
        loss: the function among them that gives a loss.
    """
    comm, bringing = run.comm, run.pipeline.bringing
    coming = {
        rank: Coming(comm, rank, shapes[rank], run.device)
        for rank in comm.others
        if rank in bringing
    }

    def compute(rank: int) -> None:
        tensors = call.tensors if rank == comm.rank else coming.pop(rank).wait()
        (arguments, constants), _ = call.with_tensors(tensors)
        for each, (args, kwargs) in zip(order, with_constants(arguments, constants), strict=True):
            output = each.compute(rank, args, kwargs)
            if each is loss:
                _check_loss(output)

    return compute


def compute_all(
    run: ForwardRun,
    order: Sequence[Expression],
    call: ModelCall,
    shapes: Sequence[Sequence[Shape]],
    *,
    loss: Expression | None,
) -> None:
    """Compute functions for each rank's rows, with that rank's arguments. See `computing`."""
    compute = computing(run, order, call, shapes, loss=loss)
    for rank in run.pipeline.bringing:
        compute(rank)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            "a loss of a pipeline's output is one number",
            got=f"{type(loss).__name__} of shape {tuple(getattr(loss, 'shape', ()))}",
            do='take its mean: reduction="mean"',
        )
