"""Uneven rows: how much each rank's loss weighs in the global mean.

The loss is a mean over local rows and gradients are averaged over ranks, so a rank with K rows of
ΣK weighs K·P/ΣK. With equal counts nothing is multiplied. Who knows ΣK, and when:

    share    mostly nobody asks: the model is called once until backward. What is sent is multiplied
             by K ÷ (what was usual in the first forward) and divided by the mean of the ranks'
             shares, which goes with it (strategies/landing.py). Nobody waits, and where all have
             the usual number nothing is multiplied
    weight   where several calls meet in what is sent, layers are cut, or `count=` weighs the loss
             but nothing that is added to it, counts cross the network beside forward (40 bytes to
             each peer), and the gradient is multiplied where backward enters the model (border.py).
             Where not every rank makes a call it is not weighed (counts.py)

The first forward always asks, with a digest of the batch: ranks that all feed the same rows are a
mistake that nothing else would show.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, final

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer, UsageError
from shoal.engine.counts import Call, Counts
from shoal.engine.lanes import Lane
from shoal.profiling.identity import content

OPAQUE = (nn.Module, type, ModuleType)  # what inputs and outputs may refer to, but are not made of
DEPTH = 3  # objects within objects
# waits for what the ranks say, by rank; None where not every rank makes the call
_Asked = Callable[[str], list[Tensor] | None]


@final
class Weigher:
    """Counts rows, and exchanges the counts over a channel of its own.

    Without a channel every rank weighs the same.
    """

    def __init__(self, comm: Comm | None, inputs_alike: bool = False) -> None:
        self._comm, self._alike = comm, inputs_alike
        self._lane = None if comm is None else Lane(comm, "row counts")
        self._counts = None if comm is None or self._lane is None else Counts(comm, self._lane)
        self._asked = 0
        self._usual = 1.0  # rows of the rank that has most of them in the first forward

    def weight(self, count: float, batch: Any = None) -> Weight:
        """The weight of this rank's count. The first also looks whether batches differ.

        Raises:
            RanksDiffer: every rank was fed the same batch.
        """
        if self._comm is None or self._counts is None:
            return Weight(1.0, 1.0, _nobody, 0, "")
        where = f"forward {self._asked}"
        self._comm.reached(where)
        first = self._asked == 0
        digest = _digest(batch) if first and _tensors(batch) else (0, 0)
        told = self._counts.called(), (count, *digest)
        self._asked += 1
        weight = Weight(
            count,
            self._usual,
            lambda: self._ask(told),
            self._comm.rank,
            f"{where}, row counts",
        )
        if first:
            self._usual = weight.usual = max(weight.counts() or ()) or 1.0
            if not self._alike and weight.same_batch():
                raise RanksDiffer(
                    f"all {self._comm.size} ranks were fed the same batch, so every rank would "
                    "compute the same "
                    "gradients",
                    where="the first forward",
                    do="wrap the loader on every rank: loader = shoal.shard(loader), or, where "
                    "inputs are the same on "
                    "purpose, give parallelize samples whose targets differ",
                )
        return weight

    def _ask(self, told: tuple[Call, tuple[float, ...]]) -> _Asked:
        assert self._counts is not None
        return self._counts.ask(*told)

    def opened(self) -> None:
        """A backward that sends has begun: calls from here on belong to the next."""
        if self._counts is not None:
            self._counts.opened()

    def drain(self) -> None:
        """Wait for the counts that were asked for."""
        if self._lane is not None:
            self._lane.drain()

    def abandon(self) -> None:
        """Leave what the lane has still to do: this rank ends for an error."""
        if self._lane is not None:
            self._lane.abandon()

    def close(self) -> None:
        """End the lane."""
        if self._lane is not None:
            self._lane.close()


@final
class Weight:
    """This rank's weight in the global mean.

    Its share is known at once, the rest once every rank's count has come.

    Args:
        count: its rows, or terms of its loss.
        usual: what that is mostly; the same on every rank.
        ask: starts the exchange of counts; nothing is exchanged where it is not called.
        rank: this one.
        where: what the messages call it.
    """

    def __init__(
        self, count: float, usual: float, ask: Callable[[], _Asked], rank: int, where: str
    ) -> None:
        self.usual = usual
        self._count, self._ask, self._rank, self._where = count, ask, rank, where
        self._asked: _Asked | None = None

    @property
    def share(self) -> float:
        """The count over the usual one."""
        return self._count / self.usual

    def ask(self) -> None:
        """Start the exchange of counts, unless it was: on every rank in the same order."""
        if self._asked is None:
            self._asked = self._ask()

    def value(self) -> float | None:
        """K·P/ΣK, or None where every rank counts the same. Waits for the counts.

        Also None where not every rank makes the call.
        """
        counts = self.counts()
        if counts is None or len(set(counts)) <= 1:
            return None
        return counts[self._rank] * len(counts) / sum(counts)

    def over(self, other: Weight) -> float | None:
        """This weight, where that of `other` comes on top, or None. Waits for both.

        None says that there is nothing to multiply.

        Raises:
            UsageError: the other is 0.
        """
        other.ask()
        own_weight, other_weight = self.value(), other.value()
        if other_weight == 0:
            raise UsageError(
                "one backward has gradients of two calls of the model, and this rank had no rows "
                "in the later call",
                do="call backward once for each call of the model, or give every rank rows",
            )
        if own_weight == other_weight:
            return None
        over_weight = 1.0 if other_weight is None else other_weight
        return (1.0 if own_weight is None else own_weight) / over_weight

    def counts(self) -> list[float] | None:
        """Every rank's count, if every rank makes the call. Waits for them."""
        told = self._arrived()
        return None if told is None else [float(values[0]) for values in told]

    def same_batch(self) -> bool:
        """Whether every rank's digest is the same. Waits for the counts."""
        digests = {(float(high), float(low)) for _, high, low in self._arrived() or ()}
        return len(digests) == 1 and digests != {(0.0, 0.0)}

    def _arrived(self) -> list[Tensor] | None:
        self.ask()
        assert self._asked is not None
        return self._asked(self._where)


def _nobody() -> _Asked:
    return lambda where: []


def rows(batch: Any) -> int:
    """Rows of a batch: the first dimension of its first tensor that has one, else 1."""
    return next((len(leaf) for leaf in _tensors(batch) if leaf.dim()), 1)


def inputs_alike(comm: Comm, x: Any, y: Any) -> bool:
    """Whether the ranks' samples have the same inputs for targets that differ (a collective)."""
    inputs, targets = zip(
        *comm.gather_objects((_digest(x), _digest(y)), "parallelize: comparing samples"),
        strict=True,
    )
    return len(set(inputs)) == 1 < len(set(targets))


def warn_of_rows(x: Any, y: Any) -> None:
    """Warn where the rows of x seem to be none of the target's.

    The mean is over the target's, and the weight by those of x.
    """
    of_input, of_target = rows(x), rows(y)
    if any(leaf.dim() for leaf in _tensors(y)) and of_input and of_target % of_input:
        warnings.warn(
            f"the first dimension of x is {of_input} and of y {of_target}: a rank's loss is "
            "weighed by x's; where "
            "ranks' batches may be of unlike size, say what the loss is a mean over: count=lambda "
            "output, y: len(y)",
            stacklevel=3,
        )


def _tensors(batch: Any) -> list[Tensor]:
    """The tensors in containers; where there are none, those in the attributes of objects."""
    seen: set[int] = set()
    level = [batch]
    for _ in range(1 + DEPTH):
        leaves = [leaf for value in level for leaf in pytree.tree_leaves(value)]
        if found := [leaf for leaf in leaves if isinstance(leaf, Tensor)]:
            return found
        objects = {
            id(leaf): leaf
            for leaf in leaves
            if hasattr(leaf, "__dict__") and not isinstance(leaf, OPAQUE)
        }
        level = [vars(leaf) for number, leaf in objects.items() if number not in seen]
        seen |= objects.keys()
    return []


def _digest(batch: Any) -> tuple[int, int]:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in _tensors(batch):
        digest.update(content(tensor))
    high, low = digest.digest()[:4], digest.digest()[4:]
    return int.from_bytes(high, "big"), int.from_bytes(low, "big")
