"""Gradients of layers that a group of ranks holds: the ranks take their mean, as backward ends.

Each rank of a group has the gradients of its own replica's rows. They are weighed by the replica's
part of all ranks, and summed. A gradient that all ranks have in common, such as that of a penalty
or of an earlier backward, stays as it is. The optimizer then makes the same update on each.

Bytes: 2·n·(R−1)/R of each rank of R, for n bytes of gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Round, Transfer
from shoal.core.pieces import local_gradient, set_local_gradient
from shoal.strategies.landing import by_kind

_BUCKET_BYTES = 1 << 24  # bytes that are copied before their gradients are freed


@final
class GroupTransfer(Transfer):
    """The gradients of one rank's layers, which other ranks hold as well.

    Args:
        parameters: the parameters that this rank holds, by name.
        holding: the ranks that hold them; None if this rank holds none.
        share: the part of all ranks whose rows' gradients this rank has.
    """

    label = "gradients of a pipeline's groups"

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], holding: Comm | None, share: float
    ) -> None:
        self._buckets = [*_buckets(parameters)]
        self._holding, self._share = holding, share
        self._packed: list[Tensor] = []

    def pack(self, backward: Round) -> None:
        for parameters in self._buckets:
            first, numel = parameters[0], sum(p.numel() for p in parameters)
            flat = torch.zeros(
                numel + len(parameters), dtype=first.dtype, device=first.device
            )  # the gradients, and of each whether it is there
            views = flat[:numel].split([p.numel() for p in parameters])
            for number, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
                gradient = local_gradient(parameter)
                if gradient is None:
                    continue
                torch.mul(gradient.detach().reshape(-1), self._share, out=view)
                flat[numel + number] = 1
                set_local_gradient(parameter, None)
            self._packed.append(flat)

    def run(self, comm: Comm) -> None:
        for flat in self._packed:
            assert self._holding is not None
            self._holding.all_reduce(flat)

    def publish(self) -> None:
        for parameters, flat in zip(self._buckets, self._packed, strict=True):
            *views, flags = flat.split([*(p.numel() for p in parameters), len(parameters)])
            for parameter, view, num_ranks in zip(parameters, views, flags.tolist(), strict=True):
                if num_ranks:
                    set_local_gradient(parameter, view.view(parameter.shape))
        self._packed = []

    def kept(self) -> Sequence[Tensor]:
        return []

    def release(self) -> None:
        return


def _buckets(parameters: Mapping[str, nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one type and device, of so many bytes together."""
    for kind in by_kind(parameters):
        bucket, nbytes = list[nn.Parameter](), 0
        for parameter in kind.values():
            bucket.append(parameter)
            nbytes += parameter.nbytes
            if nbytes >= _BUCKET_BYTES:
                yield bucket
                bucket, nbytes = [], 0
        if bucket:
            yield bucket
