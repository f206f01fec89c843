"""Functions of outputs, as the end computes them for each rank's rows, and tells numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError
from shoal.pipeline.calls import ModelCall, Shape
from shoal.pipeline.expressions import Expression, with_constants
from shoal.pipeline.route import Coming
from shoal.pipeline.run import ForwardRun


def begin_to_compute(
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
    """Compute functions for each rank's rows. The arguments are as for `begin_to_compute`."""
    compute = begin_to_compute(run, order, call, shapes, loss=loss)
    for rank in run.pipeline.bringing:
        compute(rank)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(
            "a loss of a pipeline's output is one number",
            got=f"{type(loss).__name__} of shape {tuple(getattr(loss, 'shape', ()))}",
            do='take its mean: reduction="mean"',
        )


def with_kind(number: Tensor) -> Tensor:
    """Return a number and its type as a message."""
    told = number.detach().to(torch.float64).reshape(1)
    code = torch.tensor([_DTYPES.index(number.dtype)], dtype=torch.float64, device=told.device)
    return torch.cat([told, code])


def receive_number(comm: Comm, source: int, device: torch.device) -> Tensor:
    """Return the number of a message that a rank sends."""
    kind = torch.zeros(2, dtype=torch.float64, device=device)
    comm.finish([comm.receive(kind, source)])
    return kind[0].to(_DTYPES[int(kind[1])])


_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
