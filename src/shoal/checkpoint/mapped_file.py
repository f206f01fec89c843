"""A safetensors file in the memory of a host, with tensors that are written in place.

    first time     room is reserved, so that a full /dev/shm is an error and no signal; header
    each time      copies go straight into the tensors of the file

So a snapshot costs one copy, and no memory apart from the file. Guarded by
tests/checkpoint/test_mapped_file.py.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from shoal.checkpoint import tensors
from shoal.checkpoint.tensors import Checksums, TensorForm


@final
class MappedFile:
    """A file that this process has mapped into its memory.

    Args:
        path: path of the file. It need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # all bytes of the file
        self._forms: dict[str, TensorForm] | None = None
        self._views: dict[str, Tensor] = {}

    def lay_out_tensors(self, forms: Mapping[str, TensorForm]) -> dict[str, Tensor]:
        """Return the tensors of the file, by name. Their numbers may be anything.

        Raises:
            OSError: there is no room.
        """
        if self._forms == forms and self._is_there():
            return self._views
        header = tensors.header(forms)
        self.reserve(len(header) + sum(form.nbytes for form in forms.values()))
        self.memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        at = len(header)
        for name in tensors.ordered(forms):
            form = forms[name]
            flat = self.memory[at : at + form.nbytes].view(form.dtype)
            self._views[name] = flat.view(form.shape)
            at += form.nbytes
        self._forms = dict(forms)
        return self._views

    def reserve(self, size: int) -> None:
        """Map `memory` of that many bytes, in a file of that size.

        Raises:
            OSError: there is no room.
        """
        if len(self.memory) == size and self._is_there():
            return
        self._forms, self._views = None, {}
        self.memory = self.memory[:0]
        number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(number, size)
            os.posix_fallocate(number, 0, size)
            self.memory = torch.frombuffer(mmap.mmap(number, size), dtype=torch.uint8)
        except BaseException:
            os.ftruncate(number, 0)
            raise
        finally:
            os.close(number)

    def checksums(self) -> Checksums:
        """Return the checksums of the header and of each tensor."""
        length = 8 + int.from_bytes(self.memory[:8].numpy().tobytes(), "little")
        found = {tensors.HEADER: tensors.checksum(tensors.memory_of(self.memory[:length]))}
        for name, view in self._views.items():
            found[name] = tensors.checksum(tensors.memory_of(view))
        return found

    def bytes_of(self, name: str) -> Tensor:
        """Return the elements of a tensor, as bytes of the file."""
        return tensors.bytes_of(self._views[name])

    def has(self, checksums: Checksums) -> bool:
        """Return whether the file, which came from another rank, has these checksums."""
        content = tensors.memory_of(self.memory)
        try:
            end = 8 + int.from_bytes(content[:8], "little")
            header = json.loads(bytes(content[8:end]))
            found = {tensors.HEADER: tensors.checksum(content[:end])}
            for name in checksums.keys() - {tensors.HEADER}:
                begin, stop = header[name]["data_offsets"]
                found[name] = tensors.checksum(content[end + begin : end + stop])
        except (ValueError, KeyError, TypeError, RecursionError):
            return False
        return found == checksums

    def _is_there(self) -> bool:
        """Return whether the file still has its name: another process may have removed it."""
        try:
            return os.stat(self.path).st_size == len(self.memory)
        except OSError:
            return False
