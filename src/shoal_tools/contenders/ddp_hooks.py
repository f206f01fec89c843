"""DDP with fewer bytes, as its users have it: torch's hooks, or another PowerSGD if torch's fails.

    fp16        torch's fp16_compress_hook
    bf16        torch's bf16_compress_hook
    powersgdN   torch's powerSGD_hook of rank N

On gloo torch refuses the second, although gloo adds bfloat16. There torch's own function runs
anyway. The third ends the process on gloo if there are several buckets, because its callbacks start
collectives in another order on every rank. There the PowerSGD below is used. Each of these two
is named "(own)".

PowerSGD, for a gradient M (n × m) and a basis Q (m × N) that is kept from step to step:

    1  M += lost                        error feedback
    2  P = M · Q, added over ranks      in one message with gradients too small for a code
    3  P = orthonormal(P)
    4  Q = Mᵀ · P, a mean over ranks
    5  lost = M − P · Qᵀ,  M = P · Qᵀ

Reference: Vogels et al., "PowerSGD", NeurIPS 2019, algorithms 1 and 2.
"""

# Annotations here are no text, because DDP compares a hook's with its own classes.

import difflib
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from shoal.core.errors import UsageError

# gives DDP its hook, in this group; returns the hook's name
Hook = Callable[[DistributedDataParallel, dist.ProcessGroup], str]

HOOKS = "fp16", "bf16", "powersgd4"
_LEAST_RATIO = 2  # torch's min_compression_rate: a smaller ratio is not worth a code
_POWER_SGD = re.compile(r"powersgd([1-9]\d{0,3})", re.ASCII)


def hook_by_name(name: str) -> Hook:
    """Return a hook by its name, such as "fp16" or "powersgd4".

    Raises:
        UsageError: there is no such hook.
    """
    if name == "fp16":
        return _fp16
    if name == "bf16":
        return _bf16
    if rank := _POWER_SGD.fullmatch(name):
        return partial(_power_sgd, int(rank[1]))
    near = difflib.get_close_matches(name, HOOKS, n=1)
    raise UsageError(
        f"there is no hook of DDP called {name!r}",
        got=f"ddp:{name}",
        expected="one of ddp:fp16, ddp:bf16, or ddp:powersgdN, where N is a rank from 1",
        do=f"did you mean ddp:{near[0]}?" if near else "write for instance --against ddp:fp16",
    )


def _fp16(model: DistributedDataParallel, group: dist.ProcessGroup) -> str:
    model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    return "fp16"


def _bf16(model: DistributedDataParallel, group: dist.ProcessGroup) -> str:
    if dist.get_backend(group) != "gloo":
        model.register_comm_hook(group, default_hooks.bf16_compress_hook)
        return "bf16"
    model.register_comm_hook(group, _bf16_on_gloo)
    return "bf16 (own)"


def _bf16_on_gloo(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """Call torch's hook under a name that DDP does not refuse on gloo."""
    averaged: Future[Tensor] = default_hooks.bf16_compress_hook(group, bucket)
    return averaged


def _power_sgd(rank: int, model: DistributedDataParallel, group: dist.ProcessGroup) -> str:
    if dist.get_backend(group) != "gloo":
        # torch begins at its third step at the earliest, when DDP's buckets no longer change
        state = PowerSGDState(group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook)
        return f"powersgd{rank}"
    own = PowerSGD(rank, partial(dist.all_reduce, group=group), dist.get_world_size(group))
    model.register_comm_hook(None, own.hook)
    return f"powersgd{rank} (own)"


@dataclass
class _HookGradient:
    """A parameter's gradient of this step, and the error and basis for the next one."""

    values: Tensor  # rows × columns, in the gradient's memory
    lost: Tensor
    basis: Tensor  # columns × rank


@final
class PowerSGD:
    """Means over ranks of low rank, which replace gradients.

    Args:
        rank: rank of the matrices that are sent.
        add: replaces a tensor by its sum over ranks, with the same bits on each.
        num_ranks: number of ranks that it adds over.
    """

    def __init__(self, rank: int, add: Callable[[Tensor], object], num_ranks: int) -> None:
        self._rank, self._add, self._num_ranks = rank, add, num_ranks
        self._matrices: dict[Tensor, _HookGradient] = {}  # keyed by parameter: DDP's buckets change
        self._random = torch.Generator().manual_seed(0)  # the same on all ranks
        # one thread: backward goes on meanwhile, and all ranks add in the same order
        self._thread = ThreadPoolExecutor(1)

    def hook(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:
        """Return the bucket once its gradients are means, as DDP asks of a hook."""
        whole = bucket.buffer()
        gradients = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        done: Future[Any] = Future(devices=[whole.device] if whole.is_cuda else None)

        def work() -> None:
            try:
                self.average(gradients)
                done.set_result(whole)
            except Exception as error:  # DDP waits for it, and its error names it
                done.set_exception(error)

        self._thread.submit(work)
        return done

    @torch.no_grad()
    def average(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Replace the gradients of some parameters by approximate means over ranks."""
        matrices, rest = [], []
        for parameter, gradient in gradients:
            if self._is_worth(gradient):
                matrices.append(self._matrix(parameter, gradient))
            else:
                rest.append(gradient)
        for matrix in matrices:  # 1
            matrix.values += matrix.lost
        lefts = [matrix.values @ matrix.basis for matrix in matrices]  # 2
        self._sum([*lefts, *rest])
        for gradient in rest:
            gradient.div_(self._num_ranks)
        lefts = [torch.linalg.qr(left).Q for left in lefts]  # 3
        rights = [m.values.T @ left for m, left in zip(matrices, lefts, strict=True)]  # 4
        self._sum(rights)
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):  # 5
            matrix.basis = right.div_(self._num_ranks)
            matrix.lost.copy_(matrix.values)
            torch.mm(left, right.T, out=matrix.values)  # the same bits on all ranks
            matrix.lost -= matrix.values

    def lost(self, parameter: Tensor) -> Tensor:
        """Return the part of a parameter's gradients that is not sent yet, as a matrix."""
        return self._matrices[parameter].lost

    def _is_worth(self, gradient: Tensor) -> bool:
        """Return whether factors are much smaller than the gradient."""
        if gradient.dim() < 2:
            return False
        rows, columns = len(gradient), gradient[0].numel()
        sent = (rows + columns) * min(self._rank, rows, columns)
        return sent * _LEAST_RATIO < gradient.numel()

    def _matrix(self, parameter: Tensor, gradient: Tensor) -> _HookGradient:
        values = gradient.view(len(gradient), -1)
        if parameter not in self._matrices:
            shape = values.shape[1], min(self._rank, *values.shape)
            basis = torch.randn(shape, generator=self._random, dtype=values.dtype, device="cpu")
            lost = torch.zeros_like(values)
            self._matrices[parameter] = _HookGradient(values, lost, basis.to(values.device))
        matrix = self._matrices[parameter]
        matrix.values = values
        return matrix

    def _sum(self, tensors: Sequence[Tensor]) -> None:
        """Add tensors over ranks, in one message."""
        if not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self._add(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
