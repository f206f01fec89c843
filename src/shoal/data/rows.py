"""Rows of a sampler, or lists of rows of a batch_sampler of one's own: the order is known.

The loader's own sampler is asked for the epoch's order, the same on all ranks, and global batches
are cut out of it. Costs the list of the epoch's row numbers on every rank, and no communication.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar, final

from torch.utils.data import Sampler

from shoal.core.passes import Passes
from shoal.data.deal import Deal, global_batches, shared_by
from shoal.data.order import digest, drawn
from shoal.data.parts import num_rows, one_of, part
from shoal.data.source import Fetch, LoaderStep, Source, other_order

T = TypeVar("T")


@dataclass(frozen=True)
class GlobalBatch:
    """The rows that all ranks take in one step."""

    rows: Sequence[Any]
    num: int  # what the position advances by
    own: Sequence[Any] | None = None  # this rank's rows; by default cut out of all


class Known(Source[T]):
    """A source whose order is known as an epoch begins."""

    def __init__(self, sampler: Iterable[Any], deal: Deal, seed: int, passes: Passes) -> None:
        super().__init__(deal, seed, passes)
        self.sampler = sampler
        self._drawn: tuple[tuple[int, int], list[Any], int] | None = None
        self._turns: tuple[tuple[int, int, int], list[GlobalBatch]] | None = None

    def drawn(self) -> list[Any]:
        """What the sampler gives in the coming epoch."""
        key = (self.seed, self.epoch)
        if self._drawn is None or self._drawn[0] != key:
            found = drawn(self.sampler, *key)
            self._drawn = key, found, digest(found)
        return self._drawn[1]

    def order(self) -> int:
        """A digest of the epoch's order."""
        self.drawn()
        assert self._drawn is not None
        return self._drawn[2]

    @property
    def taken(self) -> int:
        """How many rows of the epoch's order were taken before the coming pass."""
        return self.start[0] if self.start else 0

    def turns(self) -> list[GlobalBatch]:
        """Global batches of the coming pass."""
        key = (self.seed, self.epoch, self.taken)
        if self._turns is None or self._turns[0] != key:
            self._turns = key, self.cut(self.drawn(), self.taken)
        return self._turns[1]

    @abstractmethod
    def cut(self, found: list[Any], taken: int) -> list[GlobalBatch]:
        """Global batches of what the sampler gave, behind those that were taken."""

    def numel(self, found: list[Any]) -> int:
        """What positions of an epoch go up to."""
        return len(found)

    def steps(self, fetch: Fetch) -> Iterator[LoaderStep[T]]:
        """A pass over what is left of the epoch."""
        turns = self.turns()
        return self._given(fetch(), turns, self.taken, self.epoch)

    def _given(
        self, batches: Iterator[Any], turns: list[GlobalBatch], taken: int, epoch: int
    ) -> Iterator[LoaderStep[T]]:
        for number, (batch, turn) in enumerate(zip(batches, turns, strict=True)):
            taken += turn.num
            own = self.given(batch, turn, (epoch, number))
            yield LoaderStep(own, [taken], number == len(turns) - 1)

    def given(self, batch: Any, turn: GlobalBatch, at: tuple[int, int]) -> T:
        """What the loop gets where the loader gave `batch`, in an epoch's turn."""
        own: T = batch
        return own

    def num_steps(self) -> int:
        """Of the coming pass."""
        return len(self.turns())

    def check(self, order: int) -> None:
        """Look whether the sampler's order is that of the position."""
        numel = self.numel(self.drawn())
        if order and self.order() and order != self.order():
            raise other_order(f"an order with digest {order:08x}", f"{self.order():08x}")
        if not 0 <= self.taken <= numel or len(self.start) > 1:
            raise other_order(f"{self.start} taken", f"at most {numel}, as many as there are")
        self.turns()  # too few rows for the ranks are refused here


@final
class SamplerRows(Known[T]):
    """Single rows, of which a loader makes batches."""

    kind = "rows of a sampler"

    def __init__(
        self,
        sampler: Iterable[Any],
        batch_size: int,
        drop_last: bool,
        deal: Deal,
        seed: int,
        passes: Passes,
    ) -> None:
        super().__init__(sampler, deal, seed, passes)
        self._batch_size, self._drop_last = batch_size, drop_last
        self._whole = deal.rows(batch_size)

    def cut(self, found: list[Any], taken: int) -> list[GlobalBatch]:
        """Global batches of what is left."""
        left = len(found) - taken
        if taken and (not left or (self._drop_last and left < self._whole)):
            return []
        sizes = global_batches(left, self.deal.size, self._whole, self._drop_last)
        ends = accumulate(sizes, initial=taken)
        return [GlobalBatch(found[start:end], end - start) for start, end in pairwise(ends)]

    def num_steps(self) -> int:
        """Of the coming pass: from the sampler's length, whose order is not drawn for it."""
        if self.taken or not isinstance(self.sampler, Sized):
            return super().num_steps()
        numel = len(self.sampler)
        return len(global_batches(numel, self.deal.size, self._whole, self._drop_last))

    def facts(self) -> str:
        """Rows and batches."""
        rows = len(self.sampler) if isinstance(self.sampler, Sized) else len(self.drawn())
        return f"{self.num_steps()} batches of {self._batch_size} rows, {rows} rows"


@final
class Lists(Known[T]):
    """Lists of rows, each of which a loader makes a batch of: those of a batch_sampler.

    They are ranks' batches, dealt in turn. Of a last turn that has too few of them, the rows are
    cut. With `together`, or shares, the rows of each global batch are cut.
    """

    kind = "lists of a batch_sampler"

    def cut(self, found: list[Any], taken: int) -> list[GlobalBatch]:
        """Turns of lists, of what is left."""
        lists, size = _behind(list(map(list, found)), taken), self.deal.size
        num = 1 if self.deal.together else size  # lists of a turn
        groups = [lists[start : start + num] for start in range(0, len(lists), num)]
        turns = [
            self._turn(group, whole=len(group) == num and self._as_they_are(group))
            for group in groups
        ]
        if not turns and not taken:
            global_batches(0, size, size, drop_last=False)
        return self._joined(turns)

    def _as_they_are(self, group: list[list[Any]]) -> bool:
        return not self.deal.together and self.deal.shares.even and all(group)

    def _turn(self, group: list[list[Any]], whole: bool) -> GlobalBatch:
        rows = list(chain.from_iterable(group))
        return GlobalBatch(rows, len(rows), group[self.deal.rank] if whole else None)

    def _joined(self, turns: list[GlobalBatch]) -> list[GlobalBatch]:
        """The same, where each has a row for every rank: smaller ones take some of their rows."""
        joined: list[GlobalBatch] = []
        for turn in turns:
            if joined and (turn.num < self.deal.size or joined[-1].num < self.deal.size):
                rows = [*joined.pop().rows, *turn.rows]
                sizes = [len(rows)]
                if len(rows) >= 2 * self.deal.size:
                    least = min(turn.num, len(rows) - self.deal.size)
                    last = max(self.deal.size, least)
                    sizes = [len(rows) - last, last]
                ends = accumulate(sizes, initial=0)
                joined += [GlobalBatch(rows[a:b], b - a) for a, b in pairwise(ends)]
            else:
                joined.append(turn)
        if joined and joined[0].num < self.deal.size:
            global_batches(joined[0].num, self.deal.size, self.deal.size, drop_last=False)
        return joined

    def numel(self, found: list[Any]) -> int:
        """All rows."""
        return sum(map(len, found))

    def facts(self) -> str:
        """Rows and batches."""
        return f"{self.num_steps()} batches, {self.numel(self.drawn())} rows"


@final
class Items(Known[T]):
    """Batches that the dataset has made already, one an item (batch_size=None).

    They are dealt in turn, and those of a last turn that has too few of them are cut. With
    `together` each is cut.
    """

    kind = "items of a sampler"

    def cut(self, found: list[Any], taken: int) -> list[GlobalBatch]:
        """Turns of items, of what is left."""
        size, left = self.deal.size, found[taken:]
        num = 1 if self.deal.together else size  # items of a turn
        if not left and not taken:
            global_batches(0, size, size, drop_last=False)
        groups = [left[start : start + num] for start in range(0, len(left), num)]
        return [
            GlobalBatch(group, len(group), [group[self._which(len(group))]]) for group in groups
        ]

    def _which(self, num_items: int) -> int:
        return shared_by(num_items, self.deal)[0]

    def given(self, batch: Any, turn: GlobalBatch, at: tuple[int, int]) -> T:
        """The item, or this rank's part of it."""
        own: T = own_part(batch, turn.num, self.deal, *at)
        return own

    def facts(self) -> str:
        """Items."""
        return f"{self.num_steps()} steps, {len(self.drawn())} batches"


def own_part(batch: Any, num_items: int, deal: Deal, epoch: int, turn: int) -> Any:
    """This rank's part of a batch that is made already, which may be all of it.

    Args:
        batch: this rank's, of so many in the turn.
        num_items: batches of the turn.
        deal: which part.
        epoch: and turn: for shares.
        turn: its number.
    """
    if deal.size == 1:
        return batch
    if deal.together:
        rows = num_rows(batch)
        if rows < deal.size:
            return one_of(batch, deal.rank, deal.size)  # which says so
        return part(batch, *deal.span(rows, epoch, turn))
    _, number, parts = shared_by(num_items, deal)
    return batch if parts == 1 else one_of(batch, number, parts)


@final
class OwnRows(Sampler[list[Any]]):
    """What torch's loader asks for rows: this rank's, batch by batch."""

    def __init__(self, source: Known[Any], batch_size: int | None, drop_last: bool) -> None:
        self.source = source
        self.batch_size, self.drop_last = batch_size, drop_last

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of this epoch."""
        self.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        return self._rows(self.source.turns(), self.source.epoch, self.source.deal)

    def _rows(self, turns: list[GlobalBatch], epoch: int, deal: Deal) -> Iterator[list[Any]]:
        for number, turn in enumerate(turns):
            yield deal.mine(turn.rows, epoch, number) if turn.own is None else list(turn.own)

    def __len__(self) -> int:
        return self.source.num_steps()


@final
class OwnItems(Sampler[Any]):
    """What torch's loader asks for items that are batches: this rank's."""

    def __init__(self, source: Items[Any]) -> None:
        self._rows = OwnRows(source, None, drop_last=False)
        self.set_epoch = source.set_epoch

    def __iter__(self) -> Iterator[Any]:
        return (row for (row,) in self._rows)

    def __len__(self) -> int:
        return len(self._rows)


@final
class GlobalOrder(Sampler[Any]):
    """The rows of all ranks, in the order of the coming epoch."""

    def __init__(self, source: Known[Any]) -> None:
        self.source = source
        self.sampler = source.sampler

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass that of this epoch; the passes after it go on from there."""
        self.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source.drawn())

    def __len__(self) -> int:
        return len(self.source.sampler)  # type: ignore[arg-type]  # where it has a length


def _behind(lists: list[list[Any]], taken: int) -> list[list[Any]]:
    """What is left of lists of rows, of which so many were taken."""
    left = []
    for rows in lists:
        if taken < len(rows):
            left.append(rows[taken:])
        taken = max(0, taken - len(rows))
    return left
