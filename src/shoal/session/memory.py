"""What a parallelised model takes of one rank's memory, counted from the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.core.errors import UsageError
from shoal.core.facts import ModelProfile
from shoal.core.pieces import local_gradient
from shoal.core.rows import strided_in
from shoal.optim.far_state import here
from shoal.session.compiled import uncompiled
from shoal.session.session import current
from shoal.tensors.cut import cut_of, is_cut

# the most of which glibc learns, less what it and torch put around
_TEACHES = (32 << 20) - (64 << 10)


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds for one model.

    In the process's peak alone: activations, the gradient that autograd has just made, and what
    exchanges and `factor` receive into.

    Args:
        parameters: of the model.
        gradients: `.grad`s, buckets and slices that they are kept in between backwards.
        optimizer_state: of this rank's own pieces, and of all that nobody owns.
        buckets_peak: the most at any moment since `parallelize` of buckets for owners (`sliced`).
        process_peak: the process so far: of the model's CUDA device, else resident. None where that
            is not known.

    Examples:
        >>> import shoal
        >>> print(shoal.Memory(4_000_000, 4_000_000, 8_000_000, 0, None))
        parameters 4.0 MB, gradients 4.0 MB, optimizer state 8.0 MB
    """

    parameters: int
    gradients: int
    optimizer_state: int
    buckets_peak: int
    process_peak: int | None

    def __str__(self) -> str:
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer state": self.optimizer_state,
            "buckets at most": self.buckets_peak or None,
            "process at most": self.process_peak,
        }
        return ", ".join(
            f"{name} {nbytes / 1e6:.1f} MB" for name, nbytes in parts.items() if nbytes is not None
        )


def memory(model: nn.Module) -> Memory:
    """What this rank holds for a parallelised model. Not a collective.

    Waits for parameters on their way.

    Args:
        model: one that `parallelize` was given.

    Returns:
        Bytes by kind; print it for one line in MB.

    Raises:
        UsageError: the model was not parallelised, or before `init`.
        WorldError: a rank was lost.

    Examples:
        >>> import torch, shoal
        >>> _ = shoal.init()
        >>> model = torch.nn.Linear(1000, 250)
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> _ = shoal.parallelize(model, None, optimizer)
        >>> shoal.memory(model).parameters
        1001000
    """
    session, model = current(), uncompiled(model)
    if model not in session.optimizers:
        raise UsageError(
            "the model is not parallelised",
            got=type(model).__name__,
            do="call shoal.parallelize first",
        )
    attached = session.attached.get(model)
    parts = attached.parts if attached else ()
    elsewhere_bytes = sum(part.state_bytes() for part in parts)  # waits
    parameters = list(model.parameters())
    states = (
        here(optimizer.state.get(p)) for optimizer in session.optimizers[model] for p in parameters
    )
    kept = (
        [tensor for transfer in attached.engine.transfers for tensor in transfer.kept()]
        if attached
        else []
    )
    buffers = [cut_of(parameter).buffer for parameter in parameters if is_cut(parameter)]
    gradients = [
        tensor for tensor in (*map(local_gradient, parameters), *buffers) if tensor is not None
    ]
    return Memory(
        parameters=_nbytes(parameters),
        gradients=_nbytes([*kept, *gradients]),
        optimizer_state=elsewhere_bytes
        + _nbytes(v for state in states for v in state.values() if isinstance(v, Tensor)),
        buckets_peak=attached.engine.buckets.peak_bytes if attached else 0,
        process_peak=_process_peak(parameters[0].device),
    )


def of_one_process(profile: ModelProfile) -> Memory:
    """What a process by itself holds to train the model, all of it but activations."""
    return Memory(
        profile.nbytes,
        profile.nbytes,
        round(profile.state_bytes),
        buckets_peak=0,
        process_peak=None,
    )


def keep_freed() -> None:
    """Have glibc keep what a step frees for the next one, up to 64 MB.

    Else it goes to the system and comes back zeroed.

    It does from the moment on at which a block of so many bytes is freed, which need not have been
    written to: man page mallopt(3), M_MMAP_THRESHOLD, whose dynamic value M_TRIM_THRESHOLD follows.
    Elsewhere this does nothing.
    """
    torch.empty(_TEACHES, dtype=torch.uint8, device="cpu")


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of what lies under some tensors, each storage once."""
    with torch._C.DisableTorchFunctionSubclass():  # of a parameter that is cut, the part's
        strided = [part for tensor in tensors for part in strided_in(tensor.detach())]
        storages = [tensor.untyped_storage() for tensor in strided]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _process_peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), None)
