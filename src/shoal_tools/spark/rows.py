"""The rows of one rank: a stream that is read once, and from then on a file on local disk.

    epoch 0      as they come. What is read is written beside, unless one epoch is all
    later ones   from that file, mapped into memory: the system keeps of it what fits

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

_ROWS_AT_ONCE = 1024  # of a shuffled epoch, taken from the file


@final
class RankRows:
    """Rows that one rank was given.

    Args:
        stream: its Arrow record batches, each of them once.
        file: where they are kept for later epochs; None: they are read once only.
    """

    def __init__(self, stream: Iterator[Any], file: Path | None) -> None:
        self._stream, self._file = stream, file
        self._writer: Any = None
        self._kept: list[Any] | None = None  # the file's, once the stream is over
        self._is_begun = False

    def keep(self) -> None:
        """Read the stream to its end, into the file."""
        self._all()

    def in_order(self, epoch: int, seed: list[int] | None) -> Iterator[Any]:
        """The epoch's rows as Arrow tables.

        Args:
            epoch: 0 is read off the stream if nothing has been.
            seed: of the order; None for the order in which rows came.

        Raises:
            UsageError: they were to be read once, and are gone.
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
        """The file's record batches; what is still to come is read first."""
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
    """A stream of which a column marks the first rows: those, and then the others.

    Args:
        stream: record batches.
        column: the name of that column, of truth values. It is taken out.
    """

    def __init__(self, stream: Iterator[Any], column: str) -> None:
        self._stream, self._column = stream, column
        self._begun: list[Any] = []  # in which the others begin

    def marked(self) -> Iterator[Any]:
        """Record batches of marked rows; to be read first, to their end."""
        for batch in self._stream:
            num = batch.column(self._column).true_count
            if num:
                yield self._without(batch.slice(0, num))
            if num < batch.num_rows:
                self._begun.append(self._without(batch.slice(num)))
                return

    def others(self) -> Iterator[Any]:
        """Those of the other rows."""
        yield from self._begun
        self._begun.clear()
        yield from map(self._without, self._stream)

    def _without(self, batch: Any) -> Any:
        return batch.select([name for name in batch.schema.names if name != self._column])


def no_rows() -> UsageError:
    """Say that there is nothing to train on."""
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
        yield _taken(batches, starts, order[begin : begin + _ROWS_AT_ONCE])


def _taken(batches: list[Any], starts: Any, rows: Any) -> Any:
    """These rows, in this order: one batch after the other, and then put in order."""
    which = numpy.searchsorted(starts, rows, side="right") - 1
    parts, places = [], []
    for number in numpy.unique(which):
        here = numpy.flatnonzero(which == number)
        parts.append(batches[number].take(pa.array(rows[here] - starts[number])))
        places.append(here)
    back = numpy.argsort(numpy.concatenate(places))
    return pa.Table.from_batches(parts).take(pa.array(back))
