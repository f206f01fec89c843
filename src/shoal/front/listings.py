"""Lists of a dataset (mostly names of files, or its rows), as digests that ranks compare.

`os.listdir` and `glob` give names in the order of the file system. If ranks list the same files in
another order, row 7 is another file on each, and `shard` deals out wrong rows. Names are compared
without their folders, because each host may keep the files in another folder. Of a Subset the
numbers of rows are compared, of a TensorDataset some rows: a script that already cuts them by rank,
and shards them too, would lose most of them. The cost is a pass over the names, once.
"""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from shoal.core.errors import RanksDiffer
from shoal.data.parts import digest_of

_DEPTH = 4  # datasets within datasets
_MOST = 200_000  # number of names that are compared; of a longer list so many, spread over it


@dataclass(frozen=True)
class Listing:
    """One list of a dataset."""

    name: str  # name of the attribute
    numel: int
    ordered: int  # a digest
    unordered: int  # a digest that is the same in any order
    of: str = "names"


def listings(dataset: Any) -> list[Listing]:
    """Return the lists of names that a dataset has, and the lists of datasets in it."""
    return list(_find(dataset, "dataset", _DEPTH))


def require_same_listings(everyone: Sequence[Sequence[Listing]]) -> None:
    """Compare the listings of all ranks' datasets.

    Raises:
        RanksDiffer: the same names come in another order.
    """
    for rank, theirs in enumerate(everyone):
        for first, other in zip(everyone[0], theirs, strict=False):
            if first == other or first.name != other.name or first.numel != other.numel:
                continue
            if first.unordered == other.unordered:
                raise RanksDiffer(
                    f"rank {rank} and rank 0 list the same {first.of} in another order, so that "
                    "their rows are not the same",
                    where=f"{first.name}, {first.numel} {first.of}",
                    do="sort them on every rank: sorted(os.listdir(folder))"
                    if first.of == "names"
                    else "cut the dataset alike on every rank: random_split(…, generator="
                    "torch.Generator().manual_seed(0))",
                    rank=rank,
                )
            warnings.warn(
                f"rank {rank} and rank 0 shard datasets that list other {first.of} ({first.name}): "
                "shard cuts the rows of one dataset, which is the same on every rank. Where each "
                "rank has rows of its own already, leave it out",
                stacklevel=4,
            )
            return


def _find(dataset: Any, name: str, depth: int) -> Iterator[Listing]:
    if isinstance(dataset, Subset) or _is_dense(dataset):
        yield _rows(dataset, name)
    for key, value in getattr(dataset, "__dict__", {}).items():
        inner = f"{name}.{key}"
        if isinstance(value, Dataset):
            if depth:
                yield from _find(value, inner, depth - 1)
        elif isinstance(value, np.ndarray):
            if value.ndim == 1 and value.dtype.kind in "US" and len(value) > 1:
                yield _listing(inner, value.tolist())
        elif isinstance(value, list | tuple) and len(value) > 1:
            if isinstance(value[0], Dataset):
                for number, each in enumerate(value[:_MOST] if depth else ()):
                    yield from _find(each, f"{inner}[{number}]", depth - 1)
            elif _text(value[0]) is not None and _text(value[-1]) is not None:
                yield _listing(inner, value)


def _listing(name: str, values: Sequence[Any]) -> Listing:
    some = values[:: max(1, -(-len(values) // _MOST))]
    digests = [zlib.crc32((_text(value) or "").encode(errors="replace")) for value in some]
    ordered = zlib.crc32(np.array(digests, dtype=np.uint32).tobytes())
    whole = len(some) == len(values)
    return Listing(name, len(values), ordered, sum(digests) % 2**32 if whole else 0)


def _is_dense(dataset: Any) -> bool:
    return (
        isinstance(dataset, TensorDataset)
        and len(dataset) > 0
        and dataset.tensors[0].layout is torch.strided
    )


def _rows(dataset: Subset[Any] | TensorDataset, name: str) -> Listing:
    if isinstance(dataset, Subset):
        numbers = [int(number) for number in islice(dataset.indices, _MOST)]
        ordered, unordered = (
            zlib.crc32(repr(numbers).encode()),
            zlib.crc32(repr(sorted(numbers)).encode()),
        )
        return Listing(f"{name}.indices", len(dataset), ordered, unordered, "rows")
    at = [0, len(dataset) // 2, len(dataset) - 1]
    digest = digest_of([tensor[at] for tensor in dataset.tensors[:1]])
    return Listing(f"{name}.tensors", len(dataset), digest, digest, "rows")


def _text(value: Any) -> str | None:
    """Return a name without its folder, also one in a tuple; None if it is no name."""
    if isinstance(value, str | os.PathLike):
        text = str(value)
        return text.rpartition("/")[2] or text
    if isinstance(value, list | tuple) and any(isinstance(v, str | os.PathLike) for v in value):
        return "|".join(str(_text(v) or v) for v in value if isinstance(v, str | int | os.PathLike))
    return None
