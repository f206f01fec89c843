"""The rows of one rank: a stream that is read once, and from then on a file on local disk.

    epoch 0      rows are read as they come, and written to a file unless this is the only epoch
    later ones   rows are read from the file, which is mapped into memory: the system caches it

An epoch's order follows from the seed, the epoch and the rank. Epoch 0 is shuffled inside each
batch that Spark sends, so that it can begin at once. Later ones are shuffled as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy
import pyarrow as pa

from shoal.core.errors import UsageError

_ROWS_AT_ONCE = 1024  # number of rows of a shuffled epoch that are read from the file at once


@final
class RankRows:
    """Rows of one rank, which can be read in every epoch.

    Args:
        stream: the rank's Arrow record batches. It can be read once.
        file: a file to keep rows in for later epochs; None if they are read once only.
    """

    def __init__(self, stream: Iterator[Any], file: Path | None) -> None:
        self._stream, self._file = stream, file
        self._writer: Any = None
        self._kept: list[Any] | None = None  # batches of the file, once the stream has ended
        self._is_begun = False

    def keep(self) -> None:
        """Read the stream to its end, and write it to the file."""
        self._all()

    def in_order(self, epoch: int, seed: list[int] | None) -> Iterator[Any]:
        """Return an iterator over the epoch's rows, as Arrow tables.

        Args:
            epoch: number of the epoch. Epoch 0 is read from the stream if that is still unread.
            seed: seed of the order; None for the order in which rows came.

        Raises:
            UsageError: the rows were not kept, and have been read already.
        """
        if epoch == 0 and not self._is_begun:
            return self._first(self._read(), seed)
        if self._file is None:
            raise UsageError(
                "the rows are gone: they were read once, and nothing was kept of them",
                got=f"another pass, for epoch {epoch}",
                do="say how many passes there are: epochs=…, 2 or more",
            )
        kept = self._all()
        return self._first(iter(kept), seed) if epoch == 0 else _later(kept, epoch, seed)

    def _first(self, batches: Iterator[Any], seed: list[int] | None) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            table = pa.Table.from_batches([batch])
            if seed is not None:
                order = numpy.random.default_rng([*seed, 0, number]).permutation(len(table))
                table = table.take(pa.array(order))
            yield table

    def _read(self) -> Iterator[Any]:
        self._is_begun = True
        for batch in self._stream:
            if self._file is not None:
                if self._writer is None:
                    self._writer = pa.ipc.new_file(str(self._file), batch.schema)
                self._writer.write_batch(batch)
            if batch.num_rows:
                yield batch

    def _all(self) -> list[Any]:
        """Return the file's record batches, after reading the stream to its end."""
        if self._kept is None:
            for _ in self._read():
                pass
            if self._writer is None:
                self._kept = []
            else:
                self._writer.close()
                reader = pa.ipc.open_file(pa.memory_map(str(self._file)))
                batches = map(reader.get_batch, range(reader.num_record_batches))
                self._kept = [batch for batch in batches if batch.num_rows]
        return self._kept


@final
class Split:
    """Stream split in two: its first rows, which a column marks, and the rows after them.

    Args:
        stream: record batches, in which marked rows come first.
        column: the name of the column of truth values. Both parts leave it out.
    """

    def __init__(self, stream: Iterator[Any], column: str) -> None:
        self._stream, self._column = stream, column
        self._begun: list[Any] = []  # the batch in which unmarked rows begin

    def marked(self) -> Iterator[Any]:
        """Yield record batches of marked rows. Read these to their end before the others."""
        for batch in self._stream:
            num = batch.column(self._column).true_count
            if num:
                yield self._without(batch.slice(0, num))
            if num < batch.num_rows:
                self._begun.append(self._without(batch.slice(num)))
                return

    def others(self) -> Iterator[Any]:
        """Yield record batches of the rows that are not marked."""
        yield from self._begun
        self._begun.clear()
        yield from map(self._without, self._stream)

    def _without(self, batch: Any) -> Any:
        return batch.select([name for name in batch.schema.names if name != self._column])


def no_rows() -> UsageError:
    """Return the error for a DataFrame without rows to train on."""
    return UsageError(
        "there are no rows to train on",
        do="give a DataFrame that has some; rows that are marked to validate with do not count",
    )


def _later(batches: list[Any], epoch: int, seed: list[int] | None) -> Iterator[Any]:
    if seed is None:
        yield from (pa.Table.from_batches([batch]) for batch in batches)
        return
    starts = numpy.cumsum([0, *(batch.num_rows for batch in batches)])
    order = numpy.random.default_rng([*seed, epoch]).permutation(int(starts[-1]))
    for begin in range(0, len(order), _ROWS_AT_ONCE):
        yield _take(batches, starts, order[begin : begin + _ROWS_AT_ONCE])


def _take(batches: list[Any], starts: Any, rows: Any) -> Any:
    """Return these rows in this order: take them batch by batch, then sort them back."""
    which = numpy.searchsorted(starts, rows, side="right") - 1
    parts, places = [], []
    for number in numpy.unique(which):
        here = numpy.flatnonzero(which == number)
        parts.append(batches[number].take(pa.array(rows[here] - starts[number])))
        places.append(here)
    back = numpy.argsort(numpy.concatenate(places))
    return pa.Table.from_batches(parts).take(pa.array(back))
