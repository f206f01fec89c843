"""Letters: anything that pickle knows, tensors in it as they are, in one direction between two
ranks.

40 bytes              four numbers that say what it is about, and the length of
the text              the content, pickled, with the forms of its tensors in their places
each tensor           as it lies in memory
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.contracts.comm import Comm, Pending

_NUMBERS = 4
HEADER_BYTES = 8 * (_NUMBERS + 1)


class _Pickler(pickle.Pickler):
    """Pickles all but tensors, which it keeps."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj.detach().contiguous())
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: Any) -> Tensor:
        tensor: Tensor = self._tensors[number]
        return tensor


def _written(content: Any) -> tuple[bytes, list[Tensor]]:
    """The text, and the tensors."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(content)
    forms = [(tensor.dtype, tuple(tensor.shape)) for tensor in pickler.tensors]
    return pickle.dumps((forms, file.getvalue()), protocol=5), pickler.tensors


def letter_bytes(content: Any) -> int:
    """Bytes that a letter takes on the wire."""
    text, tensors = _written(content)
    return HEADER_BYTES + len(text) + sum(tensor.nbytes for tensor in tensors)


def post(comm: Comm, to: int, about: Sequence[int], content: Any) -> list[tuple[Pending, Tensor]]:
    """Start sending a letter: what is under way, each with the tensor that must not change until
    its wait returns.
    """
    text, tensors = _written(content)
    words = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    about = [*about, *[0] * (_NUMBERS - len(about))]
    parts = [
        torch.tensor([*about, len(words)]),
        words,
        *(tensor for tensor in tensors if tensor.numel()),
    ]
    return [(comm.send(part, to), part) for part in parts]


def fetch(comm: Comm, source: int) -> tuple[list[int], Any]:
    """Wait for a letter from a rank of the same job: what it is about, and its content."""
    header = torch.empty(_NUMBERS + 1, dtype=torch.int64)
    comm.receive(header, source).wait()
    *about, length = header.tolist()
    words = torch.empty(length, dtype=torch.uint8)
    comm.receive(words, source).wait()
    forms, body = pickle.loads(words.numpy().tobytes())
    tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in forms]
    for each in [comm.receive(tensor, source) for tensor in tensors if tensor.numel()]:
        each.wait()
    return about, _Unpickler(io.BytesIO(body), tensors).load()
