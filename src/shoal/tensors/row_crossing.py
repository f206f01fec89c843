"""Rows of a cut layer cross between ranks as they are, or as a codec's code.

    sent   a rank's rows for another one ── codec ──▶ code, in one message ── codec ──▶ rows there

The error of a code is never sent later, because there is no next round of the same values. So only
codecs that code each value by itself and are near in one step take part. A rank's own rows stay
exact. Activations and their gradients cross between workers and tail hosts in the same way.
Costs two passes over the rows, on the main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor

from shoal.contracts.codec import Codec
from shoal.contracts.comm import Comm

_EVERY = 50  # messages, until one is checked again


@final
class RowCrossing:
    """The crossing of one layer's rows, forward and backward.

    Args:
        codec: the codec, or None to send rows as they are.
    """

    def __init__(self, codec: Codec | None = None) -> None:
        self._codec = codec
        self._messages = 0
        self.error: float | None = None  # relative error of the message that was checked last

    def start_all_to_all(
        self, comm: Comm, incoming: Sequence[Tensor], outgoing: Sequence[Tensor]
    ) -> Callable[[], None]:
        """Start sending contiguous tensors of one type to and from every rank, as a `Comm` does."""
        codec, rows = self._codec, outgoing[comm.rank]
        # a codec of the same size may have another type, and saves nothing
        if codec is None or not _is_narrower(codec, rows):
            return comm.start_all_to_all(incoming, outgoing)
        codes: dict[int, Tensor] = {}  # keyed by the tensor's id: the same rows may go to all
        for rank in comm.others:
            if id(outgoing[rank]) not in codes:
                codes[id(outgoing[rank])] = self._code(codec, outgoing[rank])
        landing = [
            part.new_empty(codec.nbytes(part.numel(), part.itemsize), dtype=torch.uint8)
            for part in incoming
        ]
        sent = [codes.get(id(part), part) for part in outgoing]
        # own rows are bytes too, because NCCL takes messages of one type
        own = incoming[comm.rank], outgoing[comm.rank]
        landing[comm.rank], sent[comm.rank] = (part.view(-1).view(torch.uint8) for part in own)
        finish = comm.start_all_to_all(landing, sent)

        def come() -> None:
            finish()
            for rank in comm.others:
                if len(landing[rank]):
                    codec.decode(landing[rank], incoming[rank].view(-1))

        return come

    def narrow(self, rows: Tensor) -> Tensor | None:
        """Return the code of rows, in their shape with a last dimension of bytes.

        Return None if they travel uncoded.
        """
        codec = self._codec
        if codec is None or not self.narrows(rows):
            return None
        return self._code(codec, rows).view(*rows.shape, codec.nbytes(1, rows.itemsize))

    def narrows(self, rows: Tensor) -> bool:
        """Return whether such rows travel as codes."""
        return self._codec is not None and _is_narrower(self._codec, rows)

    def landing(self, rows: Tensor, device: torch.device | str = "cpu") -> Tensor:
        """Return memory in which the code of such rows may land, by default on the host."""
        assert self._codec is not None
        shape = *rows.shape, self._codec.nbytes(1, rows.itemsize)
        return torch.empty(shape, dtype=torch.uint8, device=device)

    def from_code(self, code: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of a code from `narrowed`, in this type."""
        assert self._codec is not None
        rows = torch.empty(code.shape[:-1], dtype=dtype, device=code.device)
        if rows.numel():
            self._codec.decode(code.reshape(-1), rows.view(-1))
        return rows

    def _code(self, codec: Codec, rows: Tensor) -> Tensor:
        values = rows.detach().reshape(-1)
        if not len(values):
            return values.new_empty(0, dtype=torch.uint8)
        code = codec.encode(values, {})
        if self._messages % _EVERY == 0:
            back = torch.empty_like(values)
            codec.decode(code, back)
            size = float(torch.linalg.vector_norm(values))
            self.error = float(torch.linalg.vector_norm(back - values)) / size if size else 0.0
        self._messages += 1
        return code


def _is_narrower(codec: Codec, rows: Tensor) -> bool:
    of_codecs = rows.dtype in (torch.float32, torch.float64)
    return of_codecs and codec.nbytes(1, rows.itemsize) < rows.itemsize


EXACT = RowCrossing()
