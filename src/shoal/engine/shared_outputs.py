"""Outputs that ranks have in parts, for a rank that reads one alone.

A rank gives an output as long as its own script has it. It holds each output that the model has
returned until the next call of the layer. So a rank that has gone on, or is at its end, can still
give it.

Memory: a rank's part of an output that the model has returned stays until the next forward. In a
loop in which `out` is a variable of the script, it stays that long anyway.
"""

from __future__ import annotations

from collections import Counter
from typing import final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from shoal.contracts.attendance import OutputKey, SharedOutput
from shoal.contracts.comm import Comm
from shoal.core.errors import RanksDiffer


@final
class SharedOutputs:
    """Outputs of which this rank has a part."""

    def __init__(self) -> None:
        self._known = WeakValueDictionary[tuple[int, int], SharedOutput]()
        self._held: dict[str, SharedOutput] = {}  # held outputs by layer
        self._made = Counter[str]()  # outputs of each layer, alike on every rank

    def key(self, layer: str) -> OutputKey:
        """Return the key of the next output of a layer."""
        self._made[layer] += 1
        return OutputKey(layer, self._made[layer])

    def share(self, output: SharedOutput) -> None:
        """Give an output to readers, as long as this rank has it."""
        self._known[output.key.words] = output

    def hold(self, output: SharedOutput) -> None:
        """Hold an output until its layer is called again."""
        self.drop(output.key.layer)
        self._held[output.key.layer] = output

    def drop(self, layer: str) -> None:
        """Stop holding an output of a layer."""
        if (output := self._held.pop(layer, None)) is not None:
            output.dropped()

    def close(self) -> None:
        """Stop holding all outputs."""
        for layer in list(self._held):
            self.drop(layer)

    def give(self, comm: Comm, reader: int, words: tuple[int, int]) -> None:
        """Send a reader the values of its rows that are here."""
        output = self._known.get(words)
        sends = [comm.send(_flag(output is not None), reader)]
        if output is not None:
            own = [tensor.contiguous() for tensor in output.given(reader) if tensor.numel()]
            sends += [comm.send(tensor, reader) for tensor in own]
        comm.finish(sends)

    def take(self, comm: Comm, output: SharedOutput) -> tuple[list[Tensor], int]:
        """Receive the parts of this rank's rows from other ranks. Return the values and the bytes.

        Raises:
            RanksDiffer: a rank no longer has the output.
        """
        headers = {rank: _flag(False) for rank in comm.others}
        comm.finish([comm.receive(words, rank) for rank, words in headers.items()])
        coming = output.coming()
        comm.finish(
            [
                comm.receive(tensor, rank)
                for rank, tensors in coming.items()
                if headers[rank]
                for tensor in tensors
                if tensor.numel()
            ]
        )
        for rank, words in headers.items():
            if not words:
                raise _dropped_error(output.key, comm.rank, rank)
        nbytes = sum(tensor.nbytes for tensors in coming.values() for tensor in tensors)
        return output.joined(coming), nbytes


def _flag(value: bool) -> Tensor:
    return torch.tensor([value], dtype=torch.int64, device="cpu")


def _dropped_error(key: OutputKey, reader: int, rank: int) -> RanksDiffer:
    return RanksDiffer(
        f"rank {reader} alone reads an output that rank {rank} has no more: {key}",
        do="read it before the model is called again, or on every rank; what the model's forward "
        "does not return, read in a forward hook",
        rank=rank,
    )
