"""Local steps at servers (geo-SGD): a worker pushes its weights' changes, and pulls global weights.

    1  H steps     a worker steps by its own gradients; nothing is sent
    2  pack        as a step ends: lr·(θ − θ_old) / N, where θ_old are the global weights as this
                   worker saw them last
    3  on a lane   a slice of this goes to each server, which adds it (servers/geo.py) and answers
                   with the global weights of its slice
    4  publish     parameters become the global weights; with a lag they also keep their changes
                   since 2

No worker waits for another, but as the staleness says. Bytes a worker: all weights up and down,
every H steps, and 64 bytes a server. Memory: one copy of the parameters, a second one while they
are under way, with a lag a third.

With one worker this is the plain step. Paddle's workers differ in 4: they keep the part of their
own steps that dividing by N has not pushed, and push it later.

Guarded by tests/equivalence/test_geo.py. Source: Paddle's GeoCommunicator
(paddle/fluid/distributed/ps/service/communicator/communicator.cc, SendDense and RecvDense).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from shoal.contracts.comm import Comm
from shoal.contracts.strategy import Place
from shoal.contracts.transfer import Round, Transfer
from shoal.core.outer_step import Outer
from shoal.core.pieces import Piece, cut
from shoal.remote.channel import send
from shoal.remote.verbs import Aspect, End, PartOrder, Push, Read, Verb, Write
from shoal.remote.wire import Data, Written, written


@dataclass(frozen=True, eq=False)
class _PackedPush:
    """A push that travels, from `pack` to `publish`."""

    flat: Tensor  # on the way there the change, on the way back the global weights
    left: Sequence[Tensor]  # pieces as they were packed, if steps go on meanwhile


@final
class GeoTransfer(Transfer):
    """Parameters of one dtype and device, flat, with the global weights that servers have of them.

    Args:
        parameters: by dotted name.
        place: the site, and this worker among all ranks.
        label: the transfer's name in messages.
        outer: its `lr` multiplies each change; its rule is "average".
    """

    served = True
    number: int  # number on the servers, in the order in which they were told of transfers

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], place: Place, label: str, outer: Outer
    ) -> None:
        assert outer.lr is not None
        self.label = label
        # a large parameter is cut among several
        self.pieces = {
            name: Piece(p, *place.spans.get(name, (0, p.numel()))) for name, p in parameters.items()
        }
        self._factor = outer.lr / place.ranks
        self._servers = range(place.ranks, place.ranks + place.servers)
        self._flat = self._parameters()  # θ_old
        self._packed: _PackedPush | None = None  # set between `pack` and `publish`
        self._seen = self._flat  # the global weights of the last `look`

    def _parameters(self) -> Tensor:
        return torch.cat([piece.of(piece.parameter) for piece in self.pieces.values()])

    def _of_pieces(self, flat: Tensor) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = flat.split([piece.numel for piece in self.pieces.values()])
        return parts

    def slice_of(self, server: int) -> Tensor:
        """Copy a server's slice of the present parameters."""
        return cut(self._parameters(), len(self._servers))[server - self._servers.start].clone()

    @torch.no_grad()
    def pack(self, backward: Round) -> None:
        own = self._parameters()
        left = [part.clone() for part in self._of_pieces(own)] if self.cadence.lag else []
        self._packed = _PackedPush(own.sub_(self._flat).mul_(self._factor), left)

    def run(self, comm: Comm) -> None:
        assert self._packed is not None
        self._ask(lambda part: Push(None, part), self._packed.flat, comm)

    def _ask(self, verb_of: Callable[[Tensor], Verb], flat: Tensor, comm: Comm) -> None:
        """Say a verb of its slice to each server, and have the answers in `flat`."""
        slices = dict(zip(self._servers, cut(flat, len(self._servers)), strict=True))
        asked = {server: part for server, part in slices.items() if part.numel()}
        orders = {
            server: written(PartOrder(self.number, None, verb_of(part)))
            for server, part in asked.items()
        }
        _send(orders, comm)
        comm.finish([comm.receive(part, server) for server, part in asked.items()])

    @torch.no_grad()
    def publish(self) -> None:
        packed, self._packed = self._packed, None
        assert packed is not None
        own = [piece.of(piece.parameter) for piece in self.pieces.values()]
        if packed.left:
            torch._foreach_add_(own, list(self._of_pieces(packed.flat)))
            torch._foreach_sub_(own, list(packed.left))
        else:
            torch._foreach_copy_(own, list(self._of_pieces(packed.flat)))
        self._flat = self._seen = packed.flat

    def global_into(self, into: Mapping[str, Tensor], *, latest: bool = False) -> None:
        """Write the global weights into tensors by name.

        These are the weights that this worker took over last, or with `latest` of the last `look`.
        """
        flat = self._seen if latest else self._flat
        for (name, piece), part in zip(self.pieces.items(), self._of_pieces(flat), strict=True):
            piece.of(into[name]).copy_(part)

    def look(self, comm: Comm) -> None:
        """Read the global weights from the servers. This worker does not take them over."""
        self._seen = torch.empty_like(self._flat)
        self._ask(lambda part: Read(Aspect.VALUES), self._seen, comm)

    def forget(self) -> None:
        """Forget the weights that `look` has read."""
        self._seen = self._flat

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a round with the present parameters, which servers have too."""
        self._flat = self._seen = self._parameters()
        self._packed = None

    def put(self, comm: Comm) -> None:
        """Make servers take the round's first weights. Worker 0 sends them for all workers."""
        if comm.rank == 0:
            self._ask(lambda part: Write(Aspect.VALUES, Data(part)), self._flat.clone(), comm)

    def farewell(self, comm: Comm) -> None:
        """Tell servers that nothing more comes over this lane."""
        _send(dict.fromkeys(self._servers, written(End())), comm)

    def kept(self) -> Sequence[Tensor]:
        packed = self._packed
        return [self._flat, *([] if packed is None else [packed.flat, *packed.left])]

    def release(self) -> None:
        return


def _send(orders: Mapping[int, Written], comm: Comm) -> None:
    """Send each server its message, to all at once."""
    under_way = [sent for server, order in orders.items() for sent in send(order, server, comm)]
    comm.finish([pending for pending, _ in under_way])
