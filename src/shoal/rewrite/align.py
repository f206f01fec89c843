"""Gives every rank rank 0's parameters and buffers. Equal tensors are not sent.

Digests show which tensors are equal. The others go from host to host in pieces. A rank passes each
piece on while it receives the next one:

    rank 0 ──▶ rank 1 ──▶ rank 2 ──▶ rank 3

So each link carries the bytes once, for any number of ranks. The network library's own broadcast is
a tree, and sends them over rank 0's link once for each branch.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm, Pending
from shoal.core.errors import RanksDiffer
from shoal.profiling.identity import content

_PIECE = 1 << 22  # bytes in one message
_AHEAD = 4  # pieces that a rank has receives open for


def align(model: nn.Module, comm: Comm) -> None:
    """Give every rank rank 0's parameters and buffers (a collective)."""
    take(model, of_first(model, comm))


def of_first(model: nn.Module, comm: Comm) -> dict[str, Tensor]:
    """Return rank 0's values of the tensors that differ between ranks, by name (a collective).

    The model is not changed, so this may run during a search for a plan. On rank 0 the result is
    empty.

    Raises:
        RanksDiffer: a sparse tensor is not the same on every rank.
    """
    differing = _differing(_tensors(model), comm)
    with torch.no_grad():
        own = {name: tensor.detach().contiguous() for name, tensor in differing.items()}
        values = {n: torch.empty_like(t) for n, t in own.items()} if comm.rank else own
        at_host = [value for value in values.values() if value.device.type == "cpu"]
        if at_host:
            comm.beside(partial(_pass_on_pieces, list(_pieces(at_host)), comm))
        for value in values.values():
            if value.device.type != "cpu":
                comm.broadcast(value, root=0)
    return values if comm.rank else {}


@torch.no_grad()
def take(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put these values into the model's parameters and buffers."""
    tensors = _tensors(model)
    for name, value in values.items():
        tensors[name].copy_(value)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def _differing(tensors: Mapping[str, Tensor], comm: Comm) -> dict[str, Tensor]:
    """Return the tensors that are not the same on every rank, by name."""
    own = {
        name: hashlib.sha256(content(tensor)).digest()[:16].hex()
        for name, tensor in tensors.items()
    }
    digests = comm.gather_objects(own, "parallelize: comparing values")
    differing = {
        name: tensor
        for name, tensor in tensors.items()
        if any(other[name] != digests[0][name] for other in digests)
    }
    for name, tensor in differing.items():
        if tensor.layout is not torch.strided:
            raise RanksDiffer(
                f"{name} is sparse and differs between ranks, and is not sent",
                where=name,
                do="build it alike on every rank",
            )
    return differing


def _pieces(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    for tensor in tensors:
        yield from tensor.view(-1).view(torch.uint8).split(_PIECE)


def _pass_on_pieces(pieces: Sequence[Tensor], comm: Comm) -> None:
    """Receive from the rank before, and send to the one after. Ranks of one host are neighbours."""
    line = [rank for ranks in comm.topology.ranks_on.values() for rank in ranks]
    place = line.index(comm.rank)
    coming: deque[Pending] = deque()
    going: list[Pending] = []
    for index, piece in enumerate(pieces):
        if place:
            ready = index + len(coming)
            coming.extend(
                comm.receive(other, line[place - 1]) for other in pieces[ready : index + _AHEAD]
            )
            coming.popleft().wait()
        if place + 1 < len(line):
            going.append(comm.send(piece, line[place + 1]))
    comm.finish(going)
