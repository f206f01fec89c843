"""State that training changes differently on each rank: all ranks agree on it as backward ends.

    pack      rank 0's bytes; or every rank's numbers, by its share, and flags of changed ones
    run       bytes from rank 0 to all; or the numbers are summed
    publish   all ranks have rank 0's values; or the mean of all values that any rank has changed

It goes first in every backward that sends, while gradients come, or last if backward itself
changes it. So nothing is left to do at `eval()` or in `state_dict()`, which one rank may call
alone.

Bytes: a mean takes as many as `direct` for 4 bytes a number (8 for wider types). Rank 0 sends small
state whole to each rank. It sends each rank a slice of large state, and the rank passes that on.
Guarded by tests/equivalence/test_moving.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from shoal.contracts.comm import Comm
from shoal.contracts.exchange import Bucket, LiveBucket
from shoal.contracts.state import TensorSlot
from shoal.contracts.transfer import Round, Transfer
from shoal.core.cost import Phase, Traffic, total
from shoal.core.errors import UsageError
from shoal.core.facts import Cluster, MovingState, Topology
from shoal.core.names import first_names
from shoal.core.pieces import cut, cut_sizes
from shoal.exchange.direct import Direct
from shoal.strategies.landing import divide, num_shares, weigh

_WHOLE_BYTES = 1 << 18  # up to this size rank 0 sends all of it to each rank: one message in a row
_DIRECT = Direct()


def of_holders(
    moving: Sequence[MovingState],
    known: Mapping[str, TensorSlot],
    holders: Mapping[str, int | Callable[[], int]],
) -> list[OfState]:
    """Make the transfers that bring each state from the rank that holds it to all ranks.

    Args:
        moving: the state.
        known: its places, by name.
        holders: the rank that holds it, or a function that returns the rank once it is known.
    """
    groups: dict[tuple[int | str, torch.device], list[MovingState]] = {}
    for state in moving:
        tensor = known[state.name].tensor
        assert tensor is not None
        holder = holders[state.name]
        key = holder if isinstance(holder, int) else state.name
        groups.setdefault((key, tensor.device), []).append(state)
    at_once = not any(state.in_backward for state in moving)
    return [
        FirstRanks([known[s.name] for s in group], 0, at_once, root=holders[group[0].name])
        for group in groups.values()
    ]


def transfers_of(
    moving: Sequence[MovingState], known: Mapping[str, TensorSlot], ranks: int
) -> list[OfState]:
    """Make the transfers by which ranks agree on the state, one for each kind of it."""
    groups: dict[tuple[str, int, torch.device], list[MovingState]] = {}
    for state in moving:
        tensor = known[state.name].tensor
        assert tensor is not None
        size = state.itemsize if state.how == "mean" else 0
        groups.setdefault((state.how, size, tensor.device), []).append(state)
    at_once = not any(state.in_backward for state in moving)
    return [
        (MeanOfRanks if how == "mean" else FirstRanks)(
            [known[state.name] for state in group], ranks, at_once
        )
        for (how, _, _), group in groups.items()
    ]


def phase_of(moving: Sequence[MovingState], cluster: Cluster) -> Phase | None:
    """Return the cost of these transfers in a step, or None if there is no state."""
    traffics = []
    for itemsize in (4, 8):
        numels = [s.numel for s in moving if s.how == "mean" and s.itemsize == itemsize]
        if numels:
            num_control = len(numels) + num_shares(itemsize)
            bucket = Bucket(sum(numels) + num_control, itemsize, control=(num_control,))
            traffics.append(_DIRECT.traffic(bucket, cluster.topology))
    nbytes = sum(state.nbytes for state in moving if state.how == "first")
    if nbytes:
        traffics.append(_from_first(nbytes, cluster.topology))
    return Phase(total(traffics), cluster.pace(str(_DIRECT))) if traffics else None


def _from_first(nbytes: int, topology: Topology) -> Traffic:
    ranks = topology.size
    if nbytes <= _WHOLE_BYTES or ranks == 2:
        others = range(1, ranks)
        apart = sum(topology.apart(0, rank) for rank in others)
        return Traffic(
            (nbytes * (ranks - 1), *(0 for _ in others)),
            (0, *(nbytes for _ in others)),
            rounds=1,
            leaving=(nbytes * apart, *(0 for _ in others)),
        )
    sizes = cut_sizes(nbytes, ranks)
    behind = [sum(topology.apart(r, to) for to in range(ranks)) for r in range(ranks)]
    passed_on = [size * (ranks - 1) for size in sizes]
    leaving = [size * apart for size, apart in zip(sizes, behind, strict=True)]
    leaving[0] += sum(size for r, size in enumerate(sizes) if topology.apart(0, r))
    return Traffic(
        (passed_on[0] + nbytes - sizes[0], *passed_on[1:]),
        (nbytes - sizes[0], *(nbytes for _ in sizes[1:])),
        rounds=2,
        leaving=tuple(leaving),
    )


@dataclass
class LocalState:
    """Rows and common values of a transfer of state, if ranks make local steps."""

    rows: Callable[[], float]  # this rank's rows so far
    packed_rows: float  # rows at the last round
    common: Sequence[Tensor] = ()  # values that all ranks had at the last round

    def share(self) -> float:
        """Return this rank's rows since the last round, and begin to count anew."""
        rows = self.rows()
        self.packed_rows, share = rows, rows - self.packed_rows
        return share

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keep copies of the values that all ranks have."""
        self.common = [tensor.detach().clone() for tensor in tensors]


class OfState(Transfer):
    """A transfer of state. It reads values from modules and puts new ones there."""

    def __init__(self, held: Sequence[TensorSlot], at_once: bool) -> None:
        self.held, self.at_once = tuple(held), at_once
        names = first_names([state.name for state in held], most=2)
        self.label = f"buffers that training changes ({names})"
        # a tensor that a module replaces is not changed in place, since other code may need it
        self._tensors = [self.tensor(state) for state in held]
        self._has_it = False  # whether this rank's values are the ones that all ranks get
        self.local: LocalState | None = None  # set if ranks make local steps
        self._forms = [(tensor.shape, tensor.dtype) for tensor in self._tensors]

    def tensor(self, state: TensorSlot) -> Tensor:
        """Return a state's present tensor."""
        tensor = state.tensor
        if tensor is None:
            raise UsageError(
                f"buffer {state.name}, which agrees between ranks, is gone",
                where=self.label,
                do=f'leave it where it was, or give parallelize(buffers={{"{state.name}": '
                '"local"})',
            )
        return tensor

    def now(self) -> list[Tensor]:
        """Return all states' present tensors; raise UsageError if one has another form."""
        tensors = [self.tensor(state) for state in self.held]
        for state, tensor, form in zip(self.held, tensors, self._forms, strict=True):
            if (tensor.shape, tensor.dtype) != form:
                raise UsageError(
                    f"buffer {state.name}, which agrees between ranks, has another form now",
                    where=self.label,
                    got=f"{tensor.dtype} {tuple(tensor.shape)}",
                    expected=f"{form[1]} {tuple(form[0])}, as when the model was parallelised",
                    do=f'give parallelize(buffers={{"{state.name}": "local"}})',
                )
        return tensors

    def begin(self, rows: Callable[[], float]) -> None:
        """Begin local steps, with this rank's values as the values that all ranks have."""
        self.local = LocalState(rows, rows())
        self.local.keep(self.now())

    def common(self) -> dict[str, Tensor]:
        """Return the values that all ranks have in common during local steps, by name."""
        assert self.local is not None
        names = [state.name for state in self.held]
        return dict(zip(names, self.local.common, strict=True))

    def put(self, values: Iterable[Tensor]) -> None:
        """Give each state its value: in place, or as a new tensor if its module replaces it.

        Versions of parameters rise alike on every rank, because ranks compare them.
        """
        for index, (state, value) in enumerate(zip(self.held, values, strict=True)):
            tensor = self.tensor(state)
            if tensor is not self._tensors[index] and not self._has_it:
                tensor = value.to(tensor.dtype, copy=True).view(tensor.shape)
                state.put(tensor)
                self._tensors[index] = tensor
            elif not state.is_buffer or not (self._has_it or torch.equal(tensor, value)):
                tensor.copy_(value)

    def release(self) -> None:
        return


@final
class FirstRanks(OfState):
    """Brings rank 0's state, or another rank's, to every rank, byte for byte."""

    def __init__(
        self,
        held: Sequence[TensorSlot],
        ranks: int,
        at_once: bool,
        root: int | Callable[[], int] = 0,
    ) -> None:
        self._root = root
        held = sorted(held, key=lambda state: -self.tensor(state).element_size())  # aligned
        super().__init__(held, at_once)
        self._sizes = [tensor.nbytes for tensor in self._tensors]
        device = self._tensors[0].device
        self._flat = torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)
        self._parts = self._flat.split(self._sizes)

    def pack(self, backward: Round) -> None:
        for part, tensor in zip(self._parts, self.now(), strict=True):
            part.copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))

    def run(self, comm: Comm) -> None:
        root = self._root if isinstance(self._root, int) else self._root()
        self._has_it = comm.rank == root
        if self._flat.numel() <= _WHOLE_BYTES or comm.size == 2:
            comm.broadcast(self._flat, root=root)
            return
        slices = cut(self._flat, comm.size)
        if self._has_it:
            comm.finish([comm.send(slices[rank], rank) for rank in comm.others])
        else:
            comm.receive(slices[comm.rank], root).wait()
        _DIRECT.gather(self._flat, comm)

    def publish(self) -> None:
        self.put(
            part.view(dtype).view(shape)
            for part, (shape, dtype) in zip(self._parts, self._forms, strict=True)
        )
        self._tensors = self.now()
        if self.local is not None:
            self.local.keep(self._tensors)

    def kept(self) -> Sequence[Tensor]:
        return [self._flat]


@final
class MeanOfRanks(OfState):
    """Brings the mean over ranks to every rank. Values that no rank has changed keep their bits."""

    def __init__(self, held: Sequence[TensorSlot], ranks: int, at_once: bool) -> None:
        super().__init__(held, at_once)
        self._ranks = ranks
        self._dtype = torch.float32
        if any(tensor.dtype is torch.float64 for tensor in self._tensors):
            self._dtype = torch.float64
        self._known = self._together(self._tensors)  # values that all ranks agreed on last
        self._numels = [tensor.numel() for tensor in self._tensors]
        self._sizes = torch.tensor(self._numels, device=self._known.device)
        parts = [len(self._known), len(held), num_shares(self._dtype.itemsize)]
        self._flat = self._known.new_zeros(sum(parts))
        self._values, self._flags, self._shares = self._flat.split(parts)
        by_name = {state.name: numel for state, numel in zip(held, self._numels, strict=True)}
        self._carrier = _DIRECT.carrier(LiveBucket.even(self._flat, by_name, ranks))

    def pack(self, backward: Round) -> None:
        values = self._together(self.now())
        differ = (values != self._known).to(self._dtype).split(self._numels)
        torch.stack(torch._foreach_norm(differ, math.inf), out=self._flags)
        torch.mul(values, 1 / self._ranks, out=self._values)
        share = backward.share if self.local is None else self.local.share()
        weigh([self._values], self._shares, share, self._ranks)

    def run(self, comm: Comm) -> None:
        self._carrier.reduce(comm)
        self._carrier.gather(comm)
        divide([self._values], self._shares, self._ranks)

    def publish(self) -> None:
        tensors = self.now()
        if self._flags.device.type == "cpu" and bool(self._flags.all()):
            self._known.copy_(self._values)
        else:
            is_changed = torch.repeat_interleave(self._flags > 0, self._sizes)
            self._known = torch.where(is_changed, self._values, self._known)
        # no graph that is still to run backward depends on them, so no version has to rise
        values = zip(self._known.split(self._numels), tensors, strict=True)
        shaped = [value.view(tensor.shape) for value, tensor in values]
        torch._foreach_copy_([tensor.data for tensor in tensors], shaped)
        if any(tensor.dtype is not self._dtype for tensor in tensors):
            self._known = self._together(tensors)  # rounded to the tensors' types
        if self.local is not None:
            self.local.keep(tensors)

    def kept(self) -> Sequence[Tensor]:
        return [self._flat, self._known]

    def _together(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(self._dtype)
