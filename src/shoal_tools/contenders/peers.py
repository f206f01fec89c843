"""The peers of `shoal bench`: one process, DDP at its best bucket size, and FSDP2.

A speed-up over a baseline without tuning is not believed. So DDP gets `gradient_as_bucket_view`,
`static_graph` and the fastest of several bucket sizes, also with a hook that sends fewer bytes.
FSDP2 gets a group for each block and no second gather in backward. BatchNorm's buffers stay each
rank's own. The caller has made the default process group, and seeded every rank alike.

References: Li et al., "PyTorch Distributed" (VLDB 2020); torch.distributed.fsdp.fully_shard.
"""

from __future__ import annotations

import difflib
import gc
import importlib
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from shoal.contracts.sample import ComputeLoss, called, own_loss
from shoal.core.errors import ShoalError, UsageError
from shoal.session.session import current
from shoal_tools.contenders.ddp_hooks import HOOKS, Hook, hook_by_name

DDP_CANDIDATES_MB = (1, 4, 25, 100)  # 25 is torch's default


@dataclass(frozen=True)
class Workload:
    """The training of every contender: builders, so that all begin alike, and one batch `(x, y)`.

    `x` is a tensor, a tuple of positional or a dict of keyword arguments. If `loss` is None, the
    model returns its loss. With a `compute_loss`, x is its batch, and y is None.
    """

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor] | None
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    batch: tuple[Any, Any]
    compute_loss: ComputeLoss | None = None


class Peer:
    """A model that takes whole training steps."""

    def __init__(self, name: str, model: nn.Module, work: Workload) -> None:
        self.name = name
        self.model = model
        self.loss, self.compute_loss = work.loss, work.compute_loss
        self.optimizer = work.optimizer(model.parameters())

    def forward(self, x: Any, y: Any) -> Tensor:
        """Compute the loss of one batch."""
        if self.compute_loss is not None:
            loss: Tensor = self.compute_loss(self.model, x)
            return loss
        output = called(self.model, x)
        return own_loss(output) if self.loss is None else self.loss(output, y)

    def step(self, x: Any, y: Any) -> None:
        """Run forward, backward and the update on one batch."""
        loss = self.forward(x, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def close(self) -> None:
        """Free the memory: a wrapped model is in reference cycles with its hooks."""
        del self.model, self.optimizer
        gc.collect()


def plain(work: Workload) -> Peer:
    """Make a peer without communication, each rank alone: its step is the cost of compute."""
    return Peer("plain", work.model(), work)


def ddp(work: Workload, bucket_cap_mb: float = 25, hook: Hook | None = None) -> Peer:
    """Make torch's DistributedDataParallel with all its promises, and maybe a hook."""
    _need_group()
    model = work.model()
    model = DistributedDataParallel(
        model,
        bucket_cap_mb=bucket_cap_mb,
        gradient_as_bucket_view=True,
        static_graph=True,
        process_group=_group_for(model),
    )
    model.broadcast_buffers = False  # not as an argument: torch 2.13 renamed that
    name = f"ddp:{hook(model, model.process_group)}" if hook else "ddp"
    return Peer(f"{name}, {bucket_cap_mb:g} MB buckets", model, work)


def tuned_ddp(
    work: Workload,
    candidates_mb: Sequence[float] = DDP_CANDIDATES_MB,
    num_steps: int = 3,
    hook: Hook | None = None,
) -> Peer:
    """Make DDP with the fastest of these bucket sizes on the workload's batch, alike on all ranks.

    Args:
        work: the training.
        candidates_mb: bucket sizes to try, in MB.
        num_steps: timed steps for each, after two that warm up (DDP orders its buckets after the
            first, and torch's PowerSGD begins at the third).
        hook: a hook that sends fewer bytes.
    """
    times = {}
    for bucket_cap_mb in candidates_mb:
        peer = ddp(work, bucket_cap_mb, hook)
        times[bucket_cap_mb] = slowest_rank(
            list(step_times(peer, work.batch, num_steps, num_warm_up=2))
        )
        peer.close()
    return ddp(work, min(times, key=lambda bucket_cap_mb: times[bucket_cap_mb]), hook)


def fsdp2(work: Workload) -> Peer:
    """Make torch's fully_shard: one group for each block, and the root for the rest.

    Parameters stay gathered from forward to backward (`reshard_after_forward=False`). This is the
    faster of FSDP2's two ways, and uses the memory that DDP uses anyway.
    """
    # imported on demand: it takes a second, a third of the command line's imports
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    _need_group()
    model = work.model()
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    return Peer("fsdp2", model, work)


PEERS: dict[str, Callable[[Workload], Peer]] = {"plain": plain, "ddp": tuned_ddp, "fsdp2": fsdp2}
EXACT = "exact"  # Shoal itself, without codecs


def peer_by_name(name: str) -> Callable[[Workload], Peer]:
    """Return the function that makes a peer, such as "plain" or "ddp:fp16".

    Raises:
        UsageError: there is no such peer.
    """
    ddp_name, colon, hook = name.partition(":")
    if colon and ddp_name == "ddp":
        return partial(tuned_ddp, hook=hook_by_name(hook))
    if name in PEERS:
        return PEERS[name]
    names = [*PEERS, EXACT, *(f"ddp:{hook}" for hook in HOOKS)]
    near = difflib.get_close_matches(name, names, n=1)
    raise UsageError(
        f"there is no peer called {name!r}",
        expected=", ".join(names),
        do=f"did you mean {near[0]}?" if near else "name one of these",
    )


def ready(name: str, work: Workload) -> Peer:
    """Make a peer by its name, and run one step.

    Raises:
        UsageError: the peer cannot train this.
    """
    try:
        peer = peer_by_name(name)(work)
        try:
            peer.step(*work.batch)
        # DTensor has no rule for some fused updates (SGD's in torch 2.13)
        except NotImplementedError:
            for group in peer.optimizer.param_groups:
                group["fused"] = False
            peer.name += ", its optimizer not fused"
            peer.step(*work.batch)
    except (ShoalError, dist.DistError):  # the recipe has not caused it
        raise
    except (RuntimeError, ValueError) as error:
        got = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"{name} cannot train this recipe", got=got, do=f"leave {name} out of --against"
        ) from error
    return peer


def step_times(
    peer: Peer, batch: tuple[Any, Any], num_steps: int, num_warm_up: int = 0
) -> Iterator[float]:
    """Yield the seconds of each step on this rank, on a GPU to its end; ranks start together.

    A time goes from the end of one step to the end of the next. So work that a step leaves to the
    next one (parameters that still travel) is counted: the first measured step pays for the last
    one that warmed up.
    """
    dist.barrier()
    for _ in range(num_warm_up):
        _finish_step(peer, batch)
    for _ in range(num_steps):
        start = time.perf_counter()
        _finish_step(peer, batch)
        yield time.perf_counter() - start


def _finish_step(peer: Peer, batch: tuple[Any, Any]) -> None:
    """Run one step, on a GPU to its end."""
    peer.step(*batch)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def slowest_rank(times: Sequence[float]) -> float:
    """Return the largest of all ranks' medians of their times, the same on every rank."""
    worst = torch.tensor(statistics.median(times), dtype=torch.float64, device="cpu")
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the model's blocks: its children, or for a mere container the container's."""
    for child in module.children():
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            yield from _blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def _group_for(model: nn.Module) -> dist.ProcessGroup | None:
    """Return a group of gloo if ranks share a GPU, which NCCL refuses; else None, the default."""
    device = next(model.parameters()).device
    if device.type == "cpu" or current().comm.carries(device):
        return None
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _need_group() -> None:
    if not dist.is_initialized():
        raise UsageError(
            "there is no process group to train in",
            do="call torch.distributed.init_process_group first",
        )
