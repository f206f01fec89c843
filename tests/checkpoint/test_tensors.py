"""A file of tensors: what is written is what safetensors reads, and what was changed is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.checkpoint.tensors import DTYPES, HEADER, Checksums, form_of, memory_of, read, write
from shoal.core.errors import UsageError


def tensors() -> dict[str, Tensor]:
    """One of each type, and forms that files have seldom."""
    made = {str(dtype): torch.tensor([0, 1, 3]).to(dtype) for dtype in DTYPES}
    return made | {
        "number": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "turned": torch.arange(6.0).reshape(2, 3).T,
        "last": torch.ones(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "large": torch.arange(3 << 20),
        "name with / and ä": torch.ones(1),
    }


def written(path: Path, some: dict[str, Tensor]) -> Checksums:
    forms = {name: form_of(name, tensor) for name, tensor in some.items()}
    return write(path, forms, some.__getitem__)


def test_safetensors_reads_what_was_written(tmp_path: Path) -> None:
    some = tensors()
    checksums = written(tmp_path / "some", some)
    for got in (load_file(tmp_path / "some"), read(tmp_path / "some", checksums)):
        assert got.keys() == some.keys()
        for name, tensor in some.items():
            assert got[name].dtype == tensor.dtype
            assert got[name].shape == tensor.shape
            assert memory_of(got[name]) == memory_of(tensor)


def test_a_changed_byte_is_named(tmp_path: Path) -> None:
    path = tmp_path / "some"
    some = {"first": torch.ones(5), "second": torch.zeros(7, dtype=torch.int8)}
    checksums = written(path, some)
    content = path.read_bytes()
    for place, name in ((-1, "second"), (-8, "first"), (20, "header"), (0, "header")):
        changed = bytearray(content)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(UsageError, match=f"corrupted.*{name}"):
            read(path, checksums)
        with pytest.raises(UsageError, match=f"corrupted.*{name}"):
            read(path, checksums, bytes(changed))


@pytest.mark.parametrize("length", [0, 5, 30, 300])
def test_a_file_that_is_cut_short_is_corrupted(tmp_path: Path, length: int) -> None:
    path = tmp_path / "some"
    checksums = written(path, {"first": torch.ones(500)})
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UsageError, match="corrupted"):
        read(path, checksums)


def test_what_the_file_system_does_not_give_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read(.|\n)*No such file"):
        read(tmp_path / "none", {HEADER: ""})
    with pytest.raises(UsageError, match=r"cannot be read(.|\n)*IsADirectoryError"):
        read(tmp_path, {HEADER: ""})


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex128)],
    ids=["sparse", "complex128"],
)
def test_a_tensor_that_safetensors_does_not_know_is_refused(tensor: Tensor) -> None:
    with pytest.raises(UsageError, match="the tensor odd cannot be saved"):
        form_of("odd", tensor)
