"""Rows of a sampler, or lists of rows of a batch_sampler that the user has made.

The loader's own sampler gives its order, the same on all ranks, and global batches are cut out of
it as it comes. Costs the row numbers of a piece on every rank, and no communication. A sampler that
splits by rank itself gives each rank its own rows: samplers.py finds that out.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Any, NamedTuple, TypeVar, final

from torch.utils.data import Sampler

from shoal.core.passes import Passes
from shoal.core.random_state import mix_seeds
from shoal.data.deal import Deal, global_batches, last_batches, num_batches, shared_by
from shoal.data.epoch_ends import OwnEnds
from shoal.data.order import Order, OrderReader, digest
from shoal.data.parts import num_rows, one_of, part
from shoal.data.source import Fetch, LoaderStep, OwnPlace, Source, other_order

T = TypeVar("T")
_LISTED = 1 << 20  # longest order that is read whole, to count lists or for an old digest


class GlobalBatch(NamedTuple):
    """The rows that all ranks take in one step."""

    rows: list[Any]
    num: int  # rows or items by which the position advances
    own: Sequence[Any] | None = None  # this rank's rows; by default they are cut out of all rows


class Known(Source[T]):
    """Rows with numbers or names, which a sampler gives.

    Args:
        sampler: gives rows, or lists of rows.
        deal: the division among ranks; for one rank if each rank's sampler gives its own rows.
        seed: the same on every rank.
        passes: the session's passes.
        ends: the ranks' ends, if each has a sampler for its own rows; None if all have one order.
    """

    piece = 64  # rows or lists that are drawn from the sampler at once

    def __init__(
        self,
        sampler: Iterable[Any],
        deal: Deal,
        seed: int,
        passes: Passes,
        ends: OwnEnds | None = None,
    ) -> None:
        super().__init__(deal, seed, passes, ends and OwnPlace(ends.rank, ends.size))
        self.sampler, self._ends = sampler, ends
        self._ordered: tuple[tuple[int, int], Order] | None = None
        self._digest: tuple[tuple[int, int], int] | None = None

    @property
    def rank(self) -> int:
        """This rank's number among all ranks."""
        return self.deal.rank if self._ends is None else self._ends.rank

    def ordered(self) -> Order:
        """Return the order of the coming epoch, which its passes share."""
        key = (self.seed, self.epoch)
        if self._ordered is None or self._ordered[0] != key or self._ordered[1].is_gone:
            self._ordered = key, Order(self.sampler, *key, self.piece)
        return self._ordered[1]

    def follow_epoch(self, epoch: int) -> None:
        """Make this epoch the next pass's, unless the sampler itself calls this while it draws."""
        if self._ordered is None or not self._ordered[1].is_drawing:
            super().follow_epoch(epoch)

    def digest(self) -> int:
        """Return a digest of the coming epoch's order."""
        key = (self.seed, self.epoch)
        if self._digest is None or self._digest[0] != key:
            self._digest = key, self.ordered().digest()
        return self._digest[1]

    def order(self) -> int:
        """Return the digest that is the same on all ranks; 0 if each has an order of its own."""
        return self.digest() if self._ends is None else 0

    def state(self) -> dict[str, Any]:
        """Return the position of the pass that training is in, as plain data."""
        state = super().state()
        if self._ends is not None and state["position"]:
            state["order"] = self.digest() if state["epoch"] == self.epoch else 0
        return state

    @property
    def taken(self) -> int:
        """Number of rows of the epoch's order that were taken before the coming pass."""
        return self.start[0] if self.start else 0

    def turns(self) -> Iterator[GlobalBatch]:
        """Yield the global batches of the coming pass."""
        return self.cut(self.ordered().units(), self.taken)

    @abstractmethod
    def cut(self, units: OrderReader, taken: int) -> Iterator[GlobalBatch]:
        """Make global batches of the rows or lists after the ones that were taken."""

    def steps(self, fetch: Fetch) -> Iterator[LoaderStep[T]]:
        """Begin a pass over the rest of the epoch."""
        turns, is_start = self.turns(), not self.start
        steps = self._give_steps(fetch(), turns, self.taken, self.epoch)
        if self._ends is None:
            return steps
        return self._ends.together(steps, self.epoch, is_start=is_start)

    def _give_steps(
        self, batches: Iterator[Any], turns: Iterator[GlobalBatch], taken: int, epoch: int
    ) -> Iterator[LoaderStep[T]]:
        pairs = zip(batches, _mark_last(turns), strict=True)
        for number, (batch, (turn, is_last)) in enumerate(pairs):
            taken += turn.num
            own = self.given(batch, turn, (epoch, number))
            end, first = taken if is_last else 0, digest(turn.rows[:1])
            yield LoaderStep(own, [taken], is_last, end=end, digest=first)

    def given(self, batch: Any, turn: GlobalBatch, at: tuple[int, int]) -> T:
        """Make the loop's batch of the loader's batch, in an epoch's turn."""
        own: T = batch
        return own

    def look(self) -> None:
        """Check that there are enough rows for a step.

        Raises:
            UsageError: there are too few rows for the ranks.
        """
        next(self.turns(), None)

    def num_steps(self) -> int:
        """Count the steps of the coming pass.

        Raises:
            TypeError: the sampler has no `__len__`.
        """
        num = length_of(self.sampler)
        if num is None:
            raise TypeError(
                "the length of this loader is not known: its sampler has no __len__. Count steps "
                "as you go, or give the sampler a __len__"
            )
        return self.count(num)

    def count(self, num: int) -> int:
        """Count the steps of the coming pass, if the epoch has so many rows, lists or items."""
        return sum(1 for _ in self.turns())

    def check(self, order: int) -> None:
        """Check that the sampler's order is the position's. A later end shows while it is read."""
        num = self.numel()
        own = self.digest()
        if order and own and order != own and order != self._earlier_digest():
            raise other_order(f"an order with digest {order:08x}", f"{own:08x}")
        if not 0 <= self.taken <= (self.taken if num is None else num) or len(self.start) > 1:
            raise other_order(f"{self.start} taken", f"at most {num}, as many as there are")

    def numel(self) -> int | None:
        """Return the length that an epoch's positions go up to; None if it is not known."""
        return length_of(self.sampler)

    def _earlier_digest(self) -> int:
        """Return the digest of earlier releases, which drew whole orders: their positions hold."""
        units = self.ordered().units().take(_LISTED + 1)
        return digest(units[:: max(1, len(units) // 256)]) if len(units) <= _LISTED else 0


def length_of(sampler: Any) -> int | None:
    """Return the length that a sampler states; None if it states none.

    >>> length_of(range(3)), length_of(iter([]))
    (3, None)
    """
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):  # a wrapper around no length raises either
        return None


def _mark_last(turns: Iterator[GlobalBatch]) -> Iterator[tuple[GlobalBatch, bool]]:
    """Yield each turn, and whether it is the last."""
    turn = next(turns, None)
    while turn is not None:
        following = next(turns, None)
        yield turn, following is None
        turn = following


def _behind(units: OrderReader, taken: int) -> OrderReader:
    """Skip so many rows or items.

    Raises:
        UsageError: there are fewer.
    """
    skipped = units.skip(taken)
    if skipped < taken:
        raise other_order(f"{taken} taken", f"at most {skipped}, as many as there are")
    return units


@final
class SamplerRows(Known[T]):
    """Single rows, from which a loader makes batches.

    Args:
        sampler: gives rows.
        batch_size: the loader's batch_size.
        drop_last: the loader's drop_last.
        deal: this and further arguments are as for `Known`.
    """

    kind = "rows of a sampler"
    piece = 1024

    def __init__(
        self, sampler: Iterable[Any], batch_size: int, drop_last: bool, deal: Deal, *source: Any
    ) -> None:
        super().__init__(sampler, deal, *source)
        self._batch_size, self._drop_last = batch_size, drop_last
        self._whole = deal.rows(batch_size)

    def cut(self, units: OrderReader, taken: int) -> Iterator[GlobalBatch]:
        """Cut global batches out of rows, as long as each rank has a row in the next one."""
        whole, size = self._whole, self.deal.size
        left, rows, is_start = _behind(units, taken), list[Any](), not taken
        while True:
            rows += left.take(whole + size - len(rows))
            if len(rows) < whole + size:
                break
            yield GlobalBatch(rows[:whole], whole)
            rows, is_start = rows[whole:], False
        sizes = last_batches(len(rows), size, whole, self._drop_last, is_start=is_start)
        for start, end in pairwise(accumulate(sizes, initial=0)):
            yield GlobalBatch(rows[start:end], end - start)

    def count(self, num: int) -> int:
        """Count the steps of the coming pass, if the epoch has so many rows."""
        left, size, whole = num - self.taken, self.deal.size, self._whole
        if self.taken and (left <= 0 or (self._drop_last and left < whole)):
            return 0
        return num_batches(left, size, whole, self._drop_last)

    def look(self) -> None:
        """Check that there are enough rows for a step, by the sampler's length if it states one."""
        if self.numel() is None:
            super().look()
        else:
            self.num_steps()

    def facts(self) -> str:
        """Return the numbers of batches and rows, in words."""
        num = self.numel()
        if num is None:
            return f"batches of {self._batch_size} rows, of a sampler without __len__"
        return f"{self.num_steps()} batches of {self._batch_size} rows, {num} rows"


@final
class Lists(Known[T]):
    """Lists of rows that a batch_sampler gives. A loader makes a batch of each.

    They are ranks' batches, dealt in turn. If the last turn has too few lists, their rows are cut.
    With `together`, or shares, the rows of each global batch are cut.
    """

    kind = "lists of a batch_sampler"

    def cut(self, units: OrderReader, taken: int) -> Iterator[GlobalBatch]:
        """Make turns of lists. A turn with too few rows for the ranks joins its neighbour."""
        size, lists = self.deal.size, _lists_behind(map(list, units), taken)
        num = 1 if self.deal.together else size  # number of lists in a turn
        held: list[GlobalBatch] = []  # the last turn, which may give rows to the next one
        is_start = not taken
        while group := list(islice(lists, num)):
            turn = self._turn(group, whole=len(group) == num and self._as_they_are(group))
            held = self._join_turns(held, turn)
            if len(held) > 1 and held[0].num >= size:
                yield held.pop(0)
                is_start = False
        if (not held and is_start) or (held and held[0].num < size):
            global_batches(held[0].num if held else 0, size, size, drop_last=False)
        yield from held

    def _as_they_are(self, group: list[list[Any]]) -> bool:
        return not self.deal.together and self.deal.shares.even and all(group)

    def _turn(self, group: list[list[Any]], whole: bool) -> GlobalBatch:
        rows = list(chain.from_iterable(group))
        return GlobalBatch(rows, len(rows), group[self.deal.rank] if whole else None)

    def _join_turns(self, before: list[GlobalBatch], turn: GlobalBatch) -> list[GlobalBatch]:
        """Return both turns. If one has no row for some rank, it takes some of the other's rows."""
        size = self.deal.size
        if not before or (turn.num >= size and before[-1].num >= size):
            return [*before, turn]
        rows = [*before[-1].rows, *turn.rows]
        sizes = [len(rows)]
        if len(rows) >= 2 * size:
            least = min(turn.num, len(rows) - size)
            last = max(size, least)
            sizes = [len(rows) - last, last]
        ends = accumulate(sizes, initial=0)
        return [*before[:-1], *(GlobalBatch(rows[a:b], b - a) for a, b in pairwise(ends))]

    def numel(self) -> int | None:
        """Return None, because the number of rows in lists to come is not known."""
        return None

    def count(self, num: int) -> int:
        """Count the steps of the coming pass: from the number of lists if they are many."""
        if num <= _LISTED:
            return super().count(num)
        return -(-num // (1 if self.deal.together else self.deal.size))

    def facts(self) -> str:
        """Return the number of lists in words, if the batch_sampler states it."""
        num = length_of(self.sampler)
        return "lists of rows" if num is None else f"{num} lists of rows"


@final
class Items(Known[T]):
    """Batches that the dataset has already made, one for each item (batch_size=None).

    They are dealt in turn. If the last turn has too few items, they are cut. With `together` each
    item is cut.
    """

    kind = "items of a sampler"

    def cut(self, units: OrderReader, taken: int) -> Iterator[GlobalBatch]:
        """Group items into turns."""
        size, left, is_start = self.deal.size, _behind(units, taken), not taken
        while group := left.take(self._each):
            is_start = False
            yield GlobalBatch(group, len(group), [group[self._which(len(group))]])
        if is_start:
            global_batches(0, size, size, drop_last=False)

    def _which(self, num_items: int) -> int:
        return shared_by(num_items, self.deal)[0]

    def given(self, batch: Any, turn: GlobalBatch, at: tuple[int, int]) -> T:
        """Return the item, or this rank's part of it."""
        own: T = own_part(batch, turn.num, self.deal, *at)
        return own

    def count(self, num: int) -> int:
        """Count the steps of the coming pass, if the epoch has so many items."""
        return -(-(num - self.taken) // self._each)

    @property
    def _each(self) -> int:
        return 1 if self.deal.together else self.deal.size

    def facts(self) -> str:
        """Return the number of items in words, if the sampler states it."""
        num = self.numel()
        return "batches" if num is None else f"{num} batches"


def _rows_of(
    turns: Iterator[GlobalBatch], taken: int, epoch: int, deal: Deal
) -> Iterator[tuple[int, list[Any]]]:
    for number, turn in enumerate(turns):
        own = turn.own
        yield taken, deal.mine(turn.rows, epoch, number) if own is None else list(own)
        taken += turn.num


def own_part(batch: Any, num_items: int, deal: Deal, epoch: int, turn: int) -> Any:
    """Return this rank's part of a batch that is already made, which may be all of it.

    Args:
        batch: the batch that this rank has fetched.
        num_items: number of batches in the turn.
        deal: the division among ranks.
        epoch: number of the epoch; shares may depend on it.
        turn: number of the turn.
    """
    if deal.size == 1:
        return batch
    if deal.together:
        rows = num_rows(batch)
        if rows < deal.size:
            return one_of(batch, deal.rank, deal.size)  # raises an error that says so
        return part(batch, *deal.span(rows, epoch, turn))
    _, number, parts = shared_by(num_items, deal)
    return batch if parts == 1 else one_of(batch, number, parts)


@final
class OwnRows(Sampler[list[Any]]):
    """The sampler that torch's loader asks for rows. It gives this rank's rows, batch by batch."""

    def __init__(self, source: Known[Any], batch_size: int | None, drop_last: bool) -> None:
        self.source = source
        self.batch_size, self.drop_last = batch_size, drop_last

    def set_epoch(self, epoch: int) -> None:
        """Make this epoch the next pass's."""
        self.source.follow_epoch(epoch)

    def __iter__(self) -> Iterator[list[Any]]:
        return (rows for _, rows in self._number())

    def seeded(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield this rank's rows, batch by batch, each with a seed for the code that reads them."""
        key = self.source.seed, self.source.epoch, self.source.rank
        return ((mix_seeds(*key, taken), rows) for taken, rows in self._number())

    def _number(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield this rank's rows of each turn of the coming pass, with the position before it."""
        source = self.source
        return _rows_of(source.turns(), source.taken, source.epoch, source.deal)

    def __len__(self) -> int:
        return self.source.num_steps()


@final
class OwnItems(Sampler[Any]):
    """The sampler that torch's loader asks for items that are batches. It gives this rank's."""

    def __init__(self, source: Items[Any]) -> None:
        self._rows = OwnRows(source, None, drop_last=False)
        self.set_epoch = source.follow_epoch

    def __iter__(self) -> Iterator[Any]:
        return (row for (row,) in self._rows)

    def seeded(self) -> Iterator[tuple[int, Any]]:
        """Yield seeds and items, as `OwnRows` yields seeds and rows."""
        return ((seed, row) for seed, (row,) in self._rows.seeded())

    def __len__(self) -> int:
        return len(self._rows)


@final
class GlobalOrder(Sampler[Any]):
    """The rows of all ranks, in the order of the coming epoch."""

    def __init__(self, source: Known[Any]) -> None:
        self.source = source
        self.sampler = source.sampler

    def set_epoch(self, epoch: int) -> None:
        """Make this epoch the next pass's. The passes after it continue from there."""
        self.source.follow_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        return self.source.ordered().units()

    def __len__(self) -> int:
        sampler: Any = self.source.sampler
        return len(sampler)


def _lists_behind(lists: Iterator[list[Any]], taken: int) -> Iterator[list[Any]]:
    """Yield the rest of lists, after so many of their rows.

    Raises:
        UsageError: there are fewer rows.
    """
    left = taken
    for rows in lists:
        if left < len(rows):
            yield rows[left:]
        left = max(0, left - len(rows))
    if left:
        raise other_order(f"{taken} taken", f"at most {taken - left}, as many as there are")
