"""The rows of each rank: global batches, cut into one part for each rank.

    global order   0 1 2 3 4 5 6 7 | 8 9 10 11 12       2 ranks of 4 rows
    rank 0         0 1 2 3         | 8 9 10
    rank 1                 4 5 6 7 |        11 12

If ranks counted different batches, they would wait for one another for ever. Padding with repeated
rows (as DistributedSampler does) is not the mathematics of one process. So every global batch has
at least one row for each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar, final

from shoal.core.errors import UsageError
from shoal.core.pieces import cut_sizes
from shoal.data.shares import Shares

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Deal:
    """The division of global batches among ranks, and this rank's place in it."""

    rank: int
    size: int
    together: bool = False  # whether a loader's batch is shared by all ranks
    shares: Shares = field(default_factory=Shares)

    def check_batches(self) -> None:
        """Check that batches which the loader has made can be dealt so.

        Raises:
            UsageError: whole batches would have to be dealt in shares.
        """
        if not (self.together or self.shares.even):
            raise UsageError(
                "batches that the loader has made already are dealt whole, not in shares",
                do='shard(loader, batch="global", shares=…), which cuts each of them',
            )

    def rows(self, batch_size: int) -> int:
        """Return the number of rows of all ranks in a step.

        Raises:
            UsageError: a batch of all ranks is smaller than their number.
        """
        if not self.together:
            return batch_size * self.size
        if batch_size < self.size:
            raise UsageError(
                "a batch of all ranks has fewer rows than there are ranks",
                got=f"batch_size {batch_size}, {self.size} ranks",
                expected=f"at least {self.size}",
                do='give the loader a larger batch_size, or shard(loader, batch="rank")',
            )
        return batch_size

    def span(self, num: int, epoch: int, turn: int) -> tuple[int, int]:
        """Return the start and the end of this rank's rows in a global batch of `num` rows."""
        sizes = cut_by(num, self.size, self.shares.at(epoch, turn))
        start = sum(sizes[: self.rank])
        return start, start + sizes[self.rank]

    def mine(self, rows: Sequence[T], epoch: int, turn: int) -> list[T]:
        """Return this rank's rows of a global batch."""
        start, stop = self.span(len(rows), epoch, turn)
        return list(rows[start:stop])


def global_batches(num_rows: int, size: int, whole: int, drop_last: bool) -> list[int]:
    """List how many rows all ranks take in each step: as one process does, but one a rank at least.

    Args:
        num_rows: number of rows that there are.
        size: number of ranks.
        whole: rows of a whole global batch.
        drop_last: whether to leave out the last batch if it is not whole.

    Raises:
        UsageError: there are not enough rows for a single step.
    """
    full, rest = divmod(num_rows, whole)
    batches = [whole] * full
    if rest and not drop_last:
        batches.append(rest)
    if not batches or num_rows < size:
        needed = f"{whole} for one whole batch (drop_last)" if drop_last else f"{size}, one a rank"
        raise UsageError(
            "the loader has too few rows for its ranks",
            got=f"{num_rows} rows, {size} ranks, {whole} rows in a batch of all ranks",
            expected=f"at least {needed}",
            do="train on fewer ranks"
            + (", with a smaller batch_size or drop_last=False" if drop_last else ""),
        )
    # some ranks would have no row in the last step, so it takes some from the step before
    if batches[-1] < size:
        both = batches.pop() + batches.pop()
        batches += [both - size, size] if both >= 2 * size else [both]
    return batches


def num_batches(num_rows: int, size: int, whole: int, drop_last: bool) -> int:
    """Count the batches of `global_batches`, even if there are too many to list."""
    before = max(0, num_rows // whole - 2)
    return before + len(global_batches(num_rows - before * whole, size, whole, drop_last))


def last_batches(
    num_rows: int, size: int, whole: int, drop_last: bool, *, is_start: bool
) -> list[int]:
    """List how many rows all ranks take in the last steps, after whole batches were cut off.

    Args:
        num_rows: number of rows that are left.
        size: number of ranks.
        whole: rows of a whole global batch.
        drop_last: whether to leave out the last batch if it is not whole.
        is_start: whether no row of this epoch was taken before.
    """
    if not is_start and (not num_rows or (drop_last and num_rows < whole)):
        return []
    return global_batches(num_rows, size, whole, drop_last)


def cut_by(num: int, size: int, shares: Sequence[float] | None) -> list[int]:
    """Divide rows by these shares, or evenly without shares; each rank gets one at least."""
    if shares is None or num <= size:
        return cut_sizes(num, size)
    ideal = [num * share / sum(shares) for share in shares]
    sizes = [max(1, int(rows)) for rows in ideal]
    while sum(sizes) < num:
        sizes[max(range(size), key=lambda r: (ideal[r] - sizes[r], -r))] += 1
    while sum(sizes) > num:
        larger = [r for r in range(size) if sizes[r] > 1]
        sizes[max(larger, key=lambda r: (sizes[r] - ideal[r], r))] -= 1
    return sizes


def shared_by(num_items: int, deal: Deal) -> tuple[int, int, int]:
    """Return this rank's item, its part of it, and the number of parts, if items are too few."""
    ranks = 0
    for item, sharing in enumerate(cut_sizes(deal.size, num_items)):
        if deal.rank < ranks + sharing:
            return item, deal.rank - ranks, sharing
        ranks += sharing
    raise AssertionError(num_items)
