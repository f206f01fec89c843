"""Weights for uneven rows: the weight of each rank's loss in the global mean.

The loss is a mean over local rows and gradients are averaged over ranks. So a rank with K rows of
ΣK weighs K·P/ΣK. With equal counts nothing is multiplied. There are two ways to know ΣK:

    share    usually no rank asks: the model is called once until backward. The sent gradients are
             multiplied by K ÷ (the usual count, from the first forward). They are divided by the
             mean of the ranks' shares, which travels with them (strategies/landing.py). No rank
             waits, and if all have the usual number nothing is multiplied
    weight   if gradients of several calls are sent together, or layers are cut, counts cross the
             network during forward (40 bytes to each peer). Each parameter's gradient is multiplied
             as it comes (border.py), so a term of the loss may come from the model by any way. A
             call that not every rank makes is not weighed (counts.py)

A loss that counts its own terms (`count=`), or is a sum, is multiplied by its weight over the
weight of the rows. So terms that are added to it are weighed by rows alone.

The first forward always asks, with a digest of the batch. Ranks that all feed the same rows are a
mistake that nothing else would show.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, final

from torch import Tensor

from shoal.contracts.batch import same_batch, tensors_of
from shoal.contracts.comm import Comm
from shoal.contracts.transfer import Mark
from shoal.core.errors import UsageError
from shoal.engine.common_state import Common
from shoal.engine.counts import RowCounts
from shoal.engine.lanes import Lane
from shoal.profiling.identity import content

_TERMS, _DIGEST, _ROWS = range(3)  # numbers that a rank sends about a call
# waits for the ranks' numbers, by rank; None if not every rank makes the call
_Asked = Callable[[str], list[Tensor] | None]


@final
class Weigher:
    """Counter of rows, which exchanges the counts over a channel of its own.

    Without a channel every rank weighs the same.
    """

    def __init__(
        self,
        comm: Comm | None,
        inputs_alike: bool = False,
        may_repeat: Callable[[], bool] = bool,
    ) -> None:
        self._alike, self._may_repeat = inputs_alike, may_repeat
        # lanes of all channels that it has ever used
        self._lanes: dict[Comm, tuple[Lane, RowCounts]] = {}
        self.among(comm)
        self._asked = 0
        self._first = True  # no call has counted yet
        self._usual: float | None = None  # rows of the rank with most rows in the first forward
        self._own = [0.0, 0.0]  # this rank's rows and terms so far
        self._first_batch = 0.0  # digest of the first batch

    def among(self, comm: Comm | None) -> None:
        """Weigh this rank among the ranks of a channel from now on; None: all weigh the same.

        Call it between two backwards, on every rank alike.
        """
        if comm is not None and comm not in self._lanes:
            lane = Lane(comm, "row counts")
            self._lanes[comm] = lane, RowCounts(comm, lane)
        self._comm = comm
        self._lane: Lane | None = None
        self._counts: RowCounts | None = None
        if comm is not None:
            self._lane, self._counts = self._lanes[comm]
        self._common: Common | None = None

    def has(self, comm: Comm) -> bool:
        """Return whether it has ever used that channel, and so closes it."""
        return comm in self._lanes

    def begin(self) -> Weight:
        """Return the weight of a call that begins; its rows are counted later."""
        if self._comm is None:
            return Weight(None, 1.0, "")
        where = f"forward {self._asked}"
        self._comm.reached(where)
        self._asked += 1
        return Weight(self._comm, self._usual or 1.0, f"{where}, row counts")

    @property
    def usual(self) -> float | None:
        """Usual number of rows, which affects results by rounding; None before a forward."""
        return self._usual

    def own(self) -> float:
        """Return this rank's count so far: terms, or rows if there are none."""
        rows, terms = self._own
        return terms or rows

    def first_batch(self) -> float:
        """Return a digest of the first batch; 0 without one, or if equal batches are intended."""
        return self._first_batch

    def go_on(self, usual: float) -> None:
        """Take the usual number from a checkpoint of as many ranks, on every rank alike."""
        self._usual = usual

    def counted(self, weight: Weight, count: float, batch: Any = None) -> None:
        """Set the rows of a call. The first call with a batch also checks whether batches differ.

        Raises:
            RanksDiffer: every rank was fed the same batch.
        """
        self._own[0] += count
        self._count(weight, count, count, batch)

    def of_loss(self, count: float, rows: Weight | None, batch: Any = None) -> Weight:
        """Return the weight of a loss over so many terms, given the weight of the rows.

        Raises RanksDiffer as `counted`.
        """
        weight = self.begin()
        weight.base = rows
        if rows is not None and not rows.is_asked:
            weight.carry(rows)
        self._own[1] += count
        self._count(weight, count, count if rows is None else rows.count, batch)
        return weight

    def of_sum(self, rows: Weight | None) -> Weight:
        """Return the weight of a loss that is a sum over rows, given the weight of the rows."""
        return Weight(self._comm, 1.0, "", base=rows, summed=True)

    def _count(self, weight: Weight, count: float, rows: float, batch: Any) -> None:
        first = self._first and batch is not None
        self._first = self._first and not first
        digest = float(_digest(batch)) if first and tensors_of(batch) else 0.0
        differs = first and not self._alike and not self._may_repeat()
        if differs:
            self._first_batch = digest
        if self._comm is None or self._counts is None:
            return
        counts, lane, mark = self._counts, self._lane, None
        call = counts.called()
        if self._common is not None and not (first or self._first):
            mark = self._common.mark(f"forward {self._asked - 1}")
            digest = float(mark.word)

        def ask() -> _Asked:
            return _compare(counts.ask(call, (count, digest, rows)), mark, lane)

        weight.counted(count, ask)
        if first:
            most = max(weight.counts() or ()) or 1.0
            self._usual = weight.usual = most if self._usual is None else self._usual
            if differs and self._comm.size > 1 and weight.same_batch():
                raise same_batch(self._comm.size)

    def compare(self, common: Common) -> None:
        """Let each count carry a mark of the common state, if no transfer does."""
        self._common = common

    def note_opening(self) -> None:
        """Note that a backward that sends has begun: later calls belong to the next one."""
        if self._counts is not None:
            self._counts.note_opening()

    def drain(self) -> None:
        """Wait for the counts that were asked for."""
        for lane, _ in self._lanes.values():
            lane.drain()

    def abandon(self) -> None:
        """Leave the lanes' remaining jobs undone, because this rank ends with an error."""
        for lane, _ in self._lanes.values():
            lane.abandon()

    def close(self) -> None:
        """End the lanes."""
        for lane, _ in self._lanes.values():
            lane.close()


@final
class Weight:
    """Weight of this rank in the global mean.

    The share is known at once, and the weight once every rank's count has come.

    Args:
        comm: the ranks; None if all weigh the same.
        usual: the usual count, the same on every rank.
        where: its name in messages.
        base: for a loss that weighs itself, the weight of other gradients from the model.
        summed: whether the loss is a sum over rows.
    """

    def __init__(
        self,
        comm: Comm | None,
        usual: float,
        where: str,
        base: Weight | None = None,
        summed: bool = False,
    ) -> None:
        self.count, self.usual = 1.0, usual
        # weight of all gradients of a backward that comes in first by this one
        self.base: Weight | None = base if summed else self
        self._comm, self._where, self._summed = comm, where, summed
        self._column = _TERMS  # column of the numbers that ranks send
        self._ask: Callable[[], _Asked] = _nobody
        self._asked: _Asked | None = None
        self._value: float | None = None
        self._is_known = False

    def counted(self, count: float, ask: Callable[[], _Asked]) -> None:
        """Set this rank's number of rows, or of terms of its loss.

        `ask` starts the exchange of counts. Without a call of it nothing is exchanged.
        """
        self.count, self._ask = count, ask

    def carry(self, rows: Weight) -> None:
        """Let one message carry this count and the count of rows."""
        rows._ask, rows._column = self.asked, _ROWS

    @property
    def is_asked(self) -> bool:
        """Whether the exchange of counts has begun."""
        return self._asked is not None

    @property
    def share(self) -> float:
        """Count over the usual count."""
        return self.count / self.usual

    def asked(self) -> _Asked:
        """Start the exchange of counts, unless it has begun. All ranks do this in the same order.

        Returns:
            The function that waits for them.
        """
        if self._asked is None:
            self._asked = self._ask()
        return self._asked

    def value(self) -> float | None:
        """Return K·P/ΣK, or None if every rank counts the same; P for a sum. This waits for the
        counts.

        It is also None if not every rank makes the call.
        """
        if not self._is_known:
            self._value, self._is_known = self._find(), True
        return self._value

    def _find(self) -> float | None:
        if self._comm is None:
            return None
        if self._summed:
            return float(self._comm.size)
        counts = self.counts()
        if counts is None or len(set(counts)) <= 1:
            return None
        return counts[self._comm.rank] * len(counts) / sum(counts)

    def over(self, other: Weight | None) -> float | None:
        """Return this weight over another one that is also applied, or None. This waits for both.

        None means that there is nothing to multiply.

        Raises:
            UsageError: the other weight is 0.
        """
        if other is None:
            return self.value()
        if other is self:
            return None
        other.asked()
        own_weight, other_weight = self.value(), other.value()
        if other_weight == 0 and self.base is other:
            return None  # no rows, so there is nothing to weigh
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
        """Return every rank's count, if every rank makes the call. This waits for them."""
        told = self._wait_for_flight()
        return None if told is None else [float(values[self._column]) for values in told]

    def same_batch(self) -> bool:
        """Return whether every rank's digest is the same. This waits for the counts."""
        digests = [float(values[_DIGEST]) for values in self._wait_for_flight() or ()]
        return len(digests) > 1 and len(set(digests)) == 1 and digests[0] != 0

    def _wait_for_flight(self) -> list[Tensor] | None:
        return self.asked()(self._where)


def _nobody() -> _Asked:
    return lambda where: []


def _compare(asked: _Asked, mark: Mark | None, lane: Lane | None) -> _Asked:
    """Return the same function, but once all counts are there, ranks compare differing marks on a
    lane.
    """
    if mark is None:
        return asked
    compared: list[bool] = []

    def arrived(where: str) -> list[Tensor] | None:
        found = asked(where)
        if found is not None and not compared:
            compared.append(True)
            if any(int(values[_DIGEST]) != mark.word for values in found):
                assert lane is not None
                lane.run(mark.compare, "comparing what ranks have in common").wait(where)
        return found

    return arrived


def inputs_alike(comm: Comm, x: Any, y: Any) -> bool:
    """Return whether the ranks' samples have equal inputs for different targets (a collective)."""
    inputs, targets = zip(
        *comm.gather_objects((_digest(x), _digest(y)), "parallelize: comparing samples"),
        strict=True,
    )
    return len(set(inputs)) == 1 < len(set(targets))


def _digest(batch: Any) -> int:
    """Return a digest with so few bits that a float64 holds it exactly."""
    digest = hashlib.blake2b(digest_size=6)
    for tensor in tensors_of(batch):
        digest.update(content(tensor))
    return int.from_bytes(digest.digest(), "big")
