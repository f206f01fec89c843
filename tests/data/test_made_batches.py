"""Batches that a loader has made already: a last one with fewer rows than ranks is shared, too."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from every_kind import Ranks
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shoal.core.errors import UsageError
from shoal.data.deal import Deal
from shoal.data.parts import joined, part
from shoal.data.sharded import shard_loader

pytestmark = pytest.mark.quick


class Pair(NamedTuple):
    """Features and labels."""

    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Labelled:
    """A batch with a number that is no row."""

    x: Tensor
    words: list[str]
    classes: int = 10


class Encoding(UserDict[str, Any]):
    """A dict with an attribute, as transformers' BatchEncoding."""

    def __init__(self, data: Any = None, n_sequences: int = 1) -> None:
        super().__init__(data)
        self.n_sequences = n_sequences


def words(rows: Tensor) -> list[str]:
    return [f"row {row}" for row in rows.tolist()]


def grouped(rows: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = defaultdict(list)
    found |= {"x": rows, "words": words(rows)}
    return found


# how a batch of rows is made, and how its rows are found again
FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "tensor": (lambda rows: rows, lambda batch: batch),
    "array": (lambda rows: rows.numpy(), lambda batch: torch.from_numpy(batch)),
    "list": (lambda rows: [rows, rows.float()], lambda batch: batch[1]),
    "dict": (lambda rows: {"x": rows, "y": {"z": rows}, "n": 7}, lambda batch: batch["y"]["z"]),
    "ordered dict": (lambda rows: OrderedDict(x=rows, y=None), lambda batch: batch["x"]),
    "dict with a default": (grouped, lambda batch: batch["x"]),
    "nested tuples": (lambda rows: ((rows, (rows, words(rows))),), lambda batch: batch[0][1][0]),
    "named tuple": (lambda rows: Pair(rows, rows), lambda batch: batch.y),
    "dataclass": (lambda rows: Labelled(rows, words(rows)), lambda batch: batch.x),
    "encoding": (lambda rows: Encoding({"x": rows}, 3), lambda batch: batch["x"]),
    "words alone": (
        lambda rows: {"text": words(rows)},
        lambda batch: torch.tensor([int(text[4:]) for text in batch["text"]]),
    ),
    "a list of dicts": (
        lambda rows: [{"row": row} for row in rows.tolist()],
        lambda batch: torch.tensor([each["row"] for each in batch]),
    ),
}
# batches, ranks, and the rows of each rank in each step
SHARED: dict[str, tuple[list[int], int, dict[str, Any], list[list[int]]]] = {
    "one left": ([4, 4, 4, 4, 1], 2, {}, [[4, 4], [5, 4]]),
    "two left": ([4, 4, 4, 1, 1], 3, {}, [[5, 5, 4]]),
    "enough left": ([4, 4, 4, 2, 1], 3, {}, [[4, 4, 4], [1, 1, 1]]),
    "small ones of all": ([3, 5, 1], 2, {"together": True}, [[2, 1], [3, 3]]),
    "small batches": ([1, 1, 2, 1, 1], 2, {}, [[1, 1], [2, 2]]),
}


def made(sizes: list[int], form: Callable[[Tensor], Any]) -> list[Any]:
    return [form(rows) for rows in torch.arange(sum(sizes)).split(sizes)]


@pytest.mark.parametrize("sizes", SHARED)
@pytest.mark.parametrize("form", FORMS)
def test_a_last_batch_with_few_rows_is_joined_with_the_ones_before(form: str, sizes: str) -> None:
    make, rows_of = FORMS[form]
    given, size, options, expected = SHARED[sizes]
    loaders = [shard_loader(made(given, make), Deal(r, size, **options), 3) for r in range(size)]
    steps = list(zip(*(list(loader) for loader in loaders), strict=True))
    assert [[len(rows_of(batch)) for batch in step] for step in steps] == expected
    assert [len(loader) for loader in loaders] == [len(expected)] * size
    rows = torch.cat([rows_of(batch) for step in steps for batch in step])
    assert rows.tolist() == list(range(sum(given)))
    kinds = {type(batch) for step in steps for batch in step}
    assert kinds == {type(make(torch.arange(1)))}


def test_what_is_beside_the_rows_stays() -> None:
    whole = joined([Encoding({"x": torch.arange(2)}, 3), Encoding({"x": torch.arange(1)}, 3)])
    assert whole.n_sequences == 3 and part(whole, 1, 3).n_sequences == 3
    labelled = joined(made([2, 1], FORMS["dataclass"][0]))
    assert labelled == Labelled(labelled.x, ["row 0", "row 1", "row 2"])
    assert part(labelled, 2, 3).words == ["row 2"]


class Short(IterableDataset[Tensor]):
    """A stream of batches, the last of which has one row."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from made([4] * 6 + [1], lambda rows: rows)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.processes
def test_a_stream_of_batches_ends_likewise_and_goes_on(workers: int) -> None:
    ranks = Ranks(lambda: DataLoader(Short(), None, num_workers=workers), 2)
    whole = ranks.steps()
    assert [[len(rows) for rows in step] for step in whole] == [[4, 4], [4, 4], [5, 4]]
    for taken in range(1, 3):
        some = Ranks(lambda: DataLoader(Short(), None, num_workers=workers), 2)
        assert some.steps(taken) == whole[:taken]
        state = some.loaders[0].state_dict()
        again = Ranks(lambda: DataLoader(Short(), None, num_workers=workers), 2)
        for loader in again.loaders:
            loader.load_state_dict(state)
        assert again.steps() == whole[taken:]


UNLIKE: dict[str, tuple[list[Any], str]] = {
    "nothing before": ([torch.ones(1)], "fewer rows than"),
    "widths": ([torch.ones(4, 3), torch.ones(4, 3), torch.ones(1, 2)], "cannot be joined"),
    "types": ([torch.ones(4), torch.ones(4), torch.ones(1).int()], "cannot be joined"),
    "arrays": ([np.ones(4), np.ones(4), np.ones(1, np.int64)], "cannot be joined"),
    "names": ([{"x": torch.ones(4)}] * 2 + [{"y": torch.ones(1)}], "cannot be joined"),
    "numbers": ([(torch.ones(4), 2)] * 2 + [(torch.ones(1), 3)], "cannot be joined"),
    "an object": (
        [(torch.ones(4), SimpleNamespace(y=torch.ones(4)))] * 3,
        "an object in it has tensors of its own",
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_batches_that_are_not_alike_are_refused_at_once(name: str) -> None:
    batches, words = UNLIKE[name]
    with pytest.raises(UsageError, match=words) as caught:
        shard_loader(batches, Deal(0, 2), seed=0)
    assert caught.value.do
