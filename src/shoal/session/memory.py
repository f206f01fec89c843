"""Bytes of a parallelised model in one rank's memory, counted from the tensors themselves."""

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
from shoal.session.compiled_models import without_compilation
from shoal.session.session import current
from shoal.tensors.cut import cut_of, is_cut

# the largest block that glibc learns from, less the bytes that it and torch put around a block
_TEACHES = (32 << 20) - (64 << 10)


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds for one model.

    Only the process's peak counts activations, the gradient that autograd has just made, and the
    buffers into which exchanges and `factor` receive.

    Args:
        parameters: bytes of the model's parameters.
        gradients: `.grad`s, and the buckets and slices that hold them between backwards.
        optimizer_state: state of this rank's own pieces, and of all parameters without owners.
        buckets_peak: the largest bytes since `parallelize` of buckets for owners (`sliced`).
        process_peak: the process's largest memory so far: on the model's CUDA device, or resident
            memory. None if it is not known.

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
    """Return the bytes that this rank holds for a parallelised model. Not a collective.

    The call waits for parameters on their way.

    Args:
        model: a model that `parallelize` was given.

    Returns:
        Bytes by kind. Print it for one line in MB.

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
    session, model = current(), without_compilation(model)
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
    """Return the bytes that one process holds to train the model, without activations."""
    return Memory(
        profile.nbytes,
        profile.nbytes,
        round(profile.state_bytes),
        buckets_peak=0,
        process_peak=None,
    )


def keep_free_memory() -> None:
    """Let glibc keep memory that a step frees for the next one, up to 64 MB.

    Otherwise the memory goes to the system and comes back zeroed.

    glibc does so once a block of so many bytes has been freed, even a block that nothing was
    written to: man page mallopt(3), M_MMAP_THRESHOLD. M_TRIM_THRESHOLD follows its dynamic value.
    Without glibc this does nothing.
    """
    torch.empty(_TEACHES, dtype=torch.uint8, device="cpu")


def _nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages under some tensors, each storage once."""
    with torch._C.DisableTorchFunctionSubclass():  # take the part of a cut parameter
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
