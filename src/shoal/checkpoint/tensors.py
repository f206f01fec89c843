"""A file of whole tensors by name, as safetensors has it, written piece by piece.

    8 bytes: length of the header │ header, JSON │ elements of the first tensor │ of the second │ …

The library's own writer needs all tensors at once, in memory of their own. This writer takes one
after the other, and computes each one's checksum (CRC-32) as it writes. The library reads files.
The cost is a pass over memory, without Python's lock. Format:
https://huggingface.co/docs/safetensors. Guarded by tests/checkpoint/test_tensors.py.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, load_file
from torch import Tensor

from shoal.checkpoint.folder import unreadable
from shoal.core.errors import UsageError
from shoal.core.regular_files import open_regular

HEADER = ""  # name of the header's checksum
CHUNK_BYTES = 4 << 20
_CHANGED = "another checksum than that of what was written"
_MOST_HEADER_BYTES = 1 << 30
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Checksums = dict[str, str]  # checksums of each tensor, and of the header


@dataclass(frozen=True)
class TensorForm:
    """The type and shape of a tensor, as a file states them."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.dtype.itemsize * int(torch.Size(self.shape).numel())


def form_of(name: str, tensor: Tensor) -> TensorForm:
    """Return the form of a tensor.

    Raises:
        UsageError: safetensors cannot store such tensors.
    """
    if tensor.layout is not torch.strided or tensor.dtype not in DTYPES:
        raise UsageError(
            f"the tensor {name} cannot be saved",
            got=f"{tensor.dtype}, {tensor.layout}",
            expected="a dense tensor of " + ", ".join(sorted(DTYPES.values())),
            do="leave it out, or convert it before",
        )
    return TensorForm(tensor.dtype, tuple(tensor.shape))


def write(
    path: Path, forms: Mapping[str, TensorForm], tensor: Callable[[str], Tensor]
) -> Checksums:
    """Write a file, durably.

    Args:
        path: a new file.
        forms: forms of the tensors by name.
        tensor: returns the tensor of a name. It is called once for each, in the order of the file.

    Returns:
        The checksums by name.
    """
    names = ordered(forms)
    begin_of_file = header(forms)
    checksums = {HEADER: checksum(begin_of_file)}
    with open(path, "wb") as file:
        file.write(begin_of_file)
        for name in names:  # save 13
            whole, crc = memory_of(tensor(name)), 0
            for begin in range(0, len(whole), CHUNK_BYTES):
                chunk = whole[begin : begin + CHUNK_BYTES]
                crc = zlib.crc32(chunk, crc)
                file.write(chunk)
            checksums[name] = f"{crc:08x}"
        file.flush()
        os.fsync(file.fileno())
    return checksums


def ordered(forms: Mapping[str, TensorForm]) -> list[str]:
    """Return the names in the order of the file: large types first, so that all are aligned."""
    return sorted(forms, key=lambda name: (-forms[name].dtype.itemsize, name))


def header(forms: Mapping[str, TensorForm]) -> bytes:
    """Return the bytes in front of a file's tensors."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in ordered(forms):
        form = forms[name]
        offsets = [at, at + form.nbytes]
        entries[name] = {"dtype": DTYPES[form.dtype], "shape": form.shape, "data_offsets": offsets}
        at += form.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def memory_of(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor, in row-major order."""
    elements: Any = bytes_of(tensor.cpu().contiguous()).numpy()
    return memoryview(elements)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the elements of a contiguous tensor, as a view of bytes."""
    return tensor.detach().view(-1).view(torch.uint8)


def checksum(memory: bytes | memoryview) -> str:
    """Return the CRC-32 in hexadecimal."""
    return f"{zlib.crc32(memory):08x}"


def read(path: Path, checksums: Checksums, content: bytes | None = None) -> dict[str, Tensor]:
    """Read all tensors of a file to the CPU, and check them.

    Args:
        path: the file.
        checksums: the checksums from the time of writing.
        content: the bytes of the file, if another rank sent them.

    Raises:
        UsageError: the file has changed since it was written, or cannot be read. The error names
            the tensor.
    """
    try:
        first = _read_header(path) if content is None else content[: _header_bytes(content[:8])]
        if checksum(first) != checksums[HEADER]:
            raise _damage_error(path, "its header", _CHANGED)
        tensors = load_file(path) if content is None else load(content)
    except UsageError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # any error: the bytes may be anything
        raise _damage_error(path, "its form", f"{type(error).__name__}: {error}"[:400]) from error
    if tensors.keys() | {HEADER} != checksums.keys():
        raise _damage_error(path, "its tensors", "other names than those that were written")
    for name, tensor in tensors.items():
        if checksum(memory_of(tensor)) != checksums[name]:
            raise _damage_error(path, f"the tensor {name}", _CHANGED)
    return tensors


def _read_header(path: Path) -> bytes:
    with open_regular(path) as file:
        length = file.read(8)
        return length + file.read(min(_header_bytes(length) - 8, _MOST_HEADER_BYTES))


def _header_bytes(length: bytes) -> int:
    return 8 + int.from_bytes(length, "little")


def _damage_error(path: Path, what: str, got: str) -> UsageError:
    return UsageError(
        f"a file of the checkpoint is corrupted: {what}",
        where=str(path),
        got=got,
        do="load another checkpoint, and look at the disk",
    )
