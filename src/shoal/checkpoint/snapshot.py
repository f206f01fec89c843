"""A snapshot: the values to write, as they were at one moment, and the values that were read.

It has plain data as JSON, and tensors by file and name. For `shoal.Checkpoints` it copies tensors
into memory that is used again, because training goes on meanwhile. For `shoal.save` it takes the
tensors themselves, because nothing changes until the call returns.
Guarded by tests/checkpoint/test_parts.py and tests/front/test_save_and_load.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, final

import torch
from torch import Tensor

from shoal.checkpoint import tensors
from shoal.checkpoint.extents import Owned
from shoal.checkpoint.folder import replacing
from shoal.checkpoint.parts import Bringing, Spread
from shoal.checkpoint.state import State, corrupted
from shoal.checkpoint.tree import decoded, encoded
from shoal.contracts.plain import Path as Keys
from shoal.core.errors import UsageError

SUFFIX = ".safetensors"


@final
class Copies:
    """Copies of tensors, in memory that is used again for each snapshot."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Tensor] = {}

    def copied(self, file: str, name: str, tensor: Tensor) -> Tensor:
        """Return a copy on the CPU, which lasts until the same name comes again."""
        kept = self._kept.get((file, name))
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            self._kept[file, name] = kept
        return kept.copy_(tensor.detach())


@dataclass
class Snapshot:
    """The values to write.

    Args:
        copies: memory for copies; None takes the tensors themselves, which then must not change.
        keeps: whether this process writes. If not, tensors are dropped.
    """

    copies: Copies | None = None
    keeps: bool = True
    files: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    spreads: dict[tuple[str, str], Spread] = field(default_factory=dict)  # tensors by file and name
    # values of optimizers' states that this rank owns, with the keys that lead to them
    owned: list[tuple[Keys, Owned]] = field(default_factory=list)
    forms: dict[str, dict[str, tensors.TensorForm]] = field(default_factory=dict)

    def encode(self, file: str, value: Any, strip: str = "") -> Any:
        """Return a value as JSON. Its tensors go into that file, under names without `strip`.

        Raises:
            UsageError: something in it is not plain data.
        """
        value = self._without_owned(value, (file,))
        return encoded(value, partial(self._take, file, strip), (file,))  # save 7

    def _without_owned(self, value: Any, path: Keys) -> Any:
        """Take out the values that this rank owns, because other ranks know nothing of them."""
        if type(value) is list:
            return [self._without_owned(v, (*path, str(i))) for i, v in enumerate(value)]
        if type(value) is not dict:
            return value
        kept = {}
        for key, part in value.items():
            here = (*path, str(key))
            if isinstance(part, Owned):
                self.owned.append((here, part))
                continue
            left = self._without_owned(part, here)
            if type(left) is not dict or left or not part:
                kept[key] = left
        return kept

    def _take(self, file: str, strip: str, path: Keys, tensor: Tensor | Spread) -> str:
        wanted = "/".join(path[1:]).removeprefix(strip) or file
        there, name, number = self.forms.setdefault(file + SUFFIX, {}), wanted, 2
        while name in there:
            name, number = f"{wanted}#{number}", number + 1
        if isinstance(tensor, Spread):
            part = tensors.form_of(name, tensor.part)
            there[name] = tensors.TensorForm(part.dtype, tuple(tensor.shape))
            kept = tensor.part
            if self.copies is not None:
                kept = self.copies.copied(file, name, tensor.part)
            self.spreads[file + SUFFIX, name] = Spread(kept, tensor.cut)
            return name
        there[name] = tensors.form_of(name, tensor)
        if self.keeps:  # save 8
            kept = tensor if self.copies is None else self.copies.copied(file, name, tensor)
            self.files.setdefault(file + SUFFIX, {})[name] = kept
        return name

    def write(self, path: Path, state: State, bringing: Bringing | None = None) -> None:
        """Write everything into a folder of that name, whole or not at all, if this process writes.

        Args:
            path: path of the folder.
            state: the state without tensors.
            bringing: brings the tensors of `in_order()`, if there are any. Then the call is a
                collective.

        Raises:
            UsageError: another file or folder has that name.
            OSError: the file system refuses.
        """
        try:
            if self.keeps:
                self._write(path, state, bringing)
        finally:
            if bringing is not None:
                bringing.rest()

    def in_order(self) -> list[Spread]:
        """List the tensors with a part on each rank, in the order of writing."""
        return [
            self.spreads[file, name]
            for file, forms in self.forms.items()
            for name in tensors.ordered(forms)
            if (file, name) in self.spreads
        ]

    def _write(self, path: Path, state: State, bringing: Bringing | None) -> None:
        def tensor(file: str, name: str) -> Tensor:
            if (file, name) not in self.spreads:
                return self.files[file][name]
            assert bringing is not None
            whole = bringing.next()
            assert whole is not None
            return whole

        with replacing(path) as folder:  # save 12
            files = {
                file: tensors.write(folder / file, forms, partial(tensor, file))
                for file, forms in self.forms.items()
            }
            replace(state, files=files).write(folder)


class Pieced(Protocol):
    """Pieces of tensors and states, which are put together."""

    def of_file(self, file: str) -> dict[str, Tensor]:
        """Return the tensors of a file that ranks had in pieces."""

    def put_into(self, keyword: str, value: Any) -> Any:
        """Put the states that owners had into the value of an object, and return that."""


@final
class Saved:
    """A checkpoint that is read: each file once, at the first use of its contents.

    Args:
        folder: its folder, on this host or on the rank that sent it.
        state: the contents of its state.json.
        sent: the bytes of files that this rank has received.
        pieces: joined tensors and states, if ranks had pieces of any.
    """

    def __init__(
        self,
        folder: Path,
        state: State,
        sent: Mapping[str, bytes | None] | None = None,
        pieces: Pieced | None = None,
    ) -> None:
        self.folder, self.state = folder, state
        self._sent, self._pieces = sent or {}, pieces
        self._read: dict[str, dict[str, Tensor]] = {}

    def value(self, keyword: str) -> Any:
        """Return the value that was saved under a keyword.

        Raises:
            UsageError: a file is corrupted.
        """
        value = self.decode(keyword, self.state.objects[keyword])
        return value if self._pieces is None else self._pieces.put_into(keyword, value)

    def decode(self, file: str, form: Any) -> Any:
        """Return the value of a form with tensors in that file.

        Raises:
            UsageError: the file or the form is corrupted.
        """
        try:
            return decoded(form, lambda name: self._tensors(file + SUFFIX)[name])
        except UsageError:
            raise
        except ValueError as error:
            raise self.corrupted_error(f"{file}: {error}") from error

    def corrupted_error(self, got: str) -> UsageError:
        """Return the error about a faulty state.json."""
        return corrupted(str(self.folder), got)

    def _tensors(self, name: str) -> dict[str, Tensor]:
        if name not in self._read:
            if name not in self.state.files:
                raise ValueError(f"there are no checksums of {name}")
            content = self._sent.get(name)
            checksums = self.state.files[name]
            read = tensors.read(self.folder / name, checksums, content)
            self._read[name] = read if self._pieces is None else read | self._pieces.of_file(name)
        return self._read[name]
