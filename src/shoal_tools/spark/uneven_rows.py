"""Make steps of the ranks' uneven rows: each row comes once, and in every step all ranks have as
many rows.

    rows left   rank 0: 9   rank 1: 2   rank 2: 0       batches of 2 rows
    step 0      2 of its own, gives 2   2 of its own    2 of rank 0's
    step 1      2 of its own, gives 3   2 of rank 0's   1 of rank 0's

Before each step every rank tells how many rows it has ahead, up to two steps of all ranks. That
takes 80 bytes to every other rank. From these numbers all ranks compute the same moves of rows.
Rows cross the network only to ranks that have no rows left. A last step with fewer rows than ranks
is joined with the one before.

A position is the number of its own rows that each rank has given. So training can resume in the
middle of an epoch on the same number of ranks, also with another batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

import pyarrow as pa
import torch

from shoal.contracts.comm import Comm
from shoal.core.errors import UsageError
from shoal.core.pieces import cut_sizes
from shoal_tools.spark.rows import RankRows, no_rows

TO_TRAIN = "rows"  # the rows to train on, in words
_PURPOSE = "Spark: how many rows has every rank?"


@final
class JointBatches:
    """Batches of this rank, pass after pass, for `shoal.shard(…, shards_itself=True)`.

    Args:
        comm: a channel of its own among the ranks.
        rows: the rows of this rank.
        batch_size: rows of each rank in a step.
        seed: seed of the order; None for the order in which rows came.
        convert: makes a batch of a table.
        what: a name for these rows in messages.
    """

    def __init__(
        self,
        comm: Comm,
        rows: RankRows,
        batch_size: int,
        seed: int | None,
        convert: Callable[[Any], Any],
        what: str = TO_TRAIN,
    ) -> None:
        self._comm, self._rows, self._convert, self._what = comm, rows, convert, what
        self._total = batch_size * comm.size
        self._seed = None if seed is None else [seed, comm.rank]
        self._epoch = 0
        self._start: int | None = None  # own rows to skip next; None: the epoch begins
        self._given = 0  # own rows given up to the last batch
        self._peeked: tuple[int, Ahead] | None = None  # a pass of which only one batch was read

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next passes."""
        if epoch != self._epoch:
            self._peeked = None
        self._epoch, self._start = epoch, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch: how many rows this rank has given."""
        return {"given": self._given, "order": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass of this epoch begin at a saved position.

        Raises:
            UsageError: rows are in another order now.
        """
        if state["order"] != self._seed:
            raise UsageError(
                "the checkpoint was saved in the middle of an epoch of another order",
                got=f"seed and rank {self._seed}",
                expected=f"{state['order']}, as when it was saved",
                do="give the same seed and shuffle, or another checkpoint folder",
            )
        self._start = int(state["given"])

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, None
        return self._batches(start)

    def _batches(self, start: int | None) -> Iterator[Any]:
        behind, step = start or 0, 0
        ahead = self._ahead(behind)
        self._peeked = behind, ahead
        while (given := self._step(ahead, step, is_start=start is None)) is not None:
            own, batch = given
            if step == 0:
                ahead.put_back(own)
            converted = self._convert(batch)
            behind += len(own)
            self._given = behind
            yield converted
            if step == 0:
                self._peeked = None
                ahead.take(len(own))
            step += 1

    def _ahead(self, behind: int) -> Ahead:
        """Return the own rows of the coming pass, after skipping the rows already given."""
        (there, ahead), self._peeked = self._peeked or (0, None), None
        if ahead is None or there > behind:
            there, ahead = 0, Ahead(self._rows.in_order(self._epoch, self._seed))
        if (skipped := ahead.skip(behind - there)) < behind - there:
            raise UsageError(
                "the checkpoint was saved in the middle of an epoch of other rows",
                where=f"rank {self._comm.rank}, epoch {self._epoch}",
                got=f"{there + skipped} rows",
                expected=f"more than {behind}, which had been taken",
                do="give the same DataFrame, or another checkpoint folder",
            )
        return ahead

    def _step(self, ahead: Ahead, step: int, *, is_start: bool) -> tuple[Any, Any] | None:
        """Return the own rows that this rank gives, and its batch; None after the last step."""
        comm = self._comm
        have = comm.numbers([ahead.look(2 * self._total)] * comm.size, _PURPOSE)
        num = rows_of_step(have, self._total)
        if not num:
            if step == 0 and is_start and self._what == TO_TRAIN:
                raise no_rows()
            return None
        if num < comm.size:
            raise UsageError(
                f"there are fewer {self._what} than ranks",
                where=f"rank {comm.rank}, epoch {self._epoch}, step {step}",
                got=f"{num} rows on {comm.size} ranks",
                do="give a DataFrame with more rows, or num_ranks=1",
            )
        gives = given(have, num)
        own = ahead.take(gives[comm.rank])
        moved = moves(gives, cut_sizes(num, comm.size))
        return own, self._exchange(own, moved) if moved else own

    def _exchange(self, own: Any, moved: Sequence[tuple[int, int, int]]) -> Any:
        """Send rows to other ranks; return the own rows that stay, then the rows that arrive."""
        comm = self._comm
        out = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(comm.size)]
        keep = len(own) - sum(num for source, _, num in moved if source == comm.rank)
        start = keep
        for source, to, num in moved:
            if source == comm.rank:
                out[to] = packed(own.slice(start, num))
                start += num
        sizes = comm.numbers([len(each) for each in out], "Spark: bytes of rows that move")
        coming = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        coming[comm.rank] = out[comm.rank]
        comm.journal.begins("Spark: rows that move")
        comm.all_to_all(coming, out)
        parts = [own.slice(0, keep)] if keep else []
        return pa.concat_tables(parts + [unpacked(each) for each in coming if len(each)])


class Ahead:
    """Queue of coming rows, which can count the next ones before they are taken."""

    def __init__(self, tables: Iterator[Any]) -> None:
        self._tables, self._parts, self._num = tables, list[Any](), 0

    def look(self, most: int) -> int:
        """Return how many rows are left, counted up to `most`."""
        while self._num < most and (table := next(self._tables, None)) is not None:
            self._parts.append(table)
            self._num += len(table)
        return min(self._num, most)

    def take(self, num: int) -> Any:
        """Take the next rows as a table; return an empty list for 0 rows."""
        taken, left = [], num
        while left:
            first = self._parts[0]
            taken.append(first.slice(0, left))
            self._parts[:1] = [first.slice(left)] if len(first) > left else []
            left -= len(taken[-1])
        self._num -= num
        return pa.concat_tables(taken) if taken else []

    def skip(self, num: int) -> int:
        """Skip the next rows, and return how many there were."""
        skipped = 0
        while skipped < num and (part := self.look(1)):
            part = min(num - skipped, self._num)
            self.take(part)
            skipped += part
        return skipped

    def put_back(self, table: Any) -> None:
        """Put rows back at the front."""
        if len(table):
            self._parts.insert(0, table)
            self._num += len(table)


def rows_of_step(have: Sequence[int], total: int) -> int:
    """Return how many rows the coming step has on all ranks together.

    Args:
        have: number of rows that each rank has ahead; twice the total means that or more.
        total: rows of a full step.

    >>> rows_of_step([9, 2, 0], 6), rows_of_step([5, 0, 0], 6), rows_of_step([4, 2, 2], 6)
    (6, 5, 4)
    """
    ahead, ranks = sum(have), len(have)
    if ahead <= total or ahead >= total + ranks:
        return min(ahead, total)
    return ahead - ahead // 2 if ahead >= 2 * ranks else ahead


def given(have: Sequence[int], num: int) -> list[int]:
    """Return how many of `num` rows each rank gives: its share, then more from the richest ranks.

    >>> given([9, 2, 0], 6)
    [4, 2, 0]
    """
    gives = [min(own, part) for own, part in zip(have, cut_sizes(num, len(have)), strict=True)]
    while missing := num - sum(gives):
        left = [own - gave for own, gave in zip(have, gives, strict=True)]
        richest = max(range(len(have)), key=lambda rank: left[rank])
        second = sorted(left)[-2] if len(left) > 1 else 0
        gives[richest] += min(missing, max(1, left[richest] - second))
    return gives


def moves(gives: Sequence[int], takes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the moves of rows, as (source, destination, number of rows).

    >>> moves([4, 2, 0], [2, 2, 2])
    [(0, 2, 2)]
    """
    over = [[rank, gave - took] for rank, (gave, took) in enumerate(zip(gives, takes, strict=True))]
    sources, found = [each for each in over if each[1] > 0], []
    for to, lacks in ((rank, -more) for rank, more in over if more < 0):
        while lacks:
            num = min(lacks, sources[0][1])
            found.append((sources[0][0], to, num))
            lacks -= num
            sources[0][1] -= num
            if not sources[0][1]:
                sources.pop(0)
    return found


def packed(table: Any) -> torch.Tensor:
    """Serialize a table to bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return torch.frombuffer(bytearray(sink.getvalue()), dtype=torch.uint8)


def unpacked(data: torch.Tensor) -> Any:
    """Read a table from the bytes that `packed` made."""
    return pa.ipc.open_stream(pa.py_buffer(data.numpy())).read_all()
