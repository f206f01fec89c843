"""Rows of Spark that ranks have unevenly: each once an epoch, in steps that all ranks make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal_tools.spark.batches import columns_of
from shoal_tools.spark.rows import RankRows
from shoal_tools.spark.uneven_rows import JointBatches, given, moves, rows_of_step

UNEVEN = {
    "one is empty": [9, 2, 0],
    "all rows on the last": [0, 0, 11],
    "alike": [6, 6, 6],
    "a last step smaller than the ranks": [3, 2, 2],
    "fewer than a step": [2, 0, 1],
    "two ranks": [5, 0],
    "one rank": [7],
}


def batches_of(rank: int, num: int) -> Iterator[Any]:
    """Rows of a rank in record batches of 4, an empty one among them."""
    for start in [*range(0, num, 4), num]:
        ids = [100 * rank + row for row in range(start, min(start + 4, num))]
        yield pa.record_batch(
            {
                "id": pa.array(ids, pa.int64()),
                "name": pa.array([f"row {i}" for i in ids], pa.string()),
            }
        )


def epochs(
    sizes: list[int], folder: Path, num_epochs: int, seed: int | None = 0, batch_size: int = 2
) -> list[list[list[list[int]]]]:
    """Ids by epoch, step and rank."""

    def work(comm: ThreadComm) -> list[list[list[int]]]:
        file = folder / f"{comm.rank}" if num_epochs > 1 else None
        rows = RankRows(batches_of(comm.rank, sizes[comm.rank]), file)
        loader = JointBatches(comm, rows, batch_size, seed, columns_of)
        given = []
        for epoch in range(num_epochs):
            loader.set_epoch(epoch)
            given.append([batch["id"].tolist() for batch in loader])
        return given

    by_rank = run(len(sizes), work)
    return [
        [list(step) for step in zip(*ranks, strict=True)] for ranks in zip(*by_rank, strict=True)
    ]


@pytest.mark.parametrize("sizes", UNEVEN.values(), ids=UNEVEN)
def test_every_row_comes_once_an_epoch(sizes: list[int], tmp_path: Path) -> None:
    there = [100 * rank + row for rank, num in enumerate(sizes) for row in range(num)]
    for steps in epochs(sizes, tmp_path, 3):
        ids = [i for step in steps for part in step for i in part]
        assert sorted(ids) == there
        for step in steps:
            parts = [len(part) for part in step]
            assert min(parts) >= 1 and max(parts) - min(parts) <= 1


def test_orders_follow_from_seed_and_epoch(tmp_path: Path) -> None:
    first, second = (epochs([9, 8], tmp_path / name, 3) for name in made(tmp_path, "a", "b"))
    (other,) = (epochs([9, 8], tmp_path / name, 3, seed=1) for name in made(tmp_path, "c"))
    assert first == second != other
    assert len({str(steps) for steps in first}) == 3
    (plain,) = (epochs([9, 8], tmp_path / name, 2, seed=None) for name in made(tmp_path, "d"))
    assert plain[0] == plain[1]
    assert [i for step in plain[0] for i in step[1]][:8] == list(range(100, 108))


def made(folder: Path, *names: str) -> tuple[str, ...]:
    for name in names:
        (folder / name).mkdir()
    return names


def test_a_look_at_one_batch_takes_no_row(tmp_path: Path) -> None:
    def work(comm: ThreadComm) -> tuple[list[int], list[int]]:
        loader = JointBatches(comm, RankRows(batches_of(0, 7), None), 2, 0, columns_of)
        peeked = next(iter(loader))["id"].tolist()
        return peeked, [i for batch in loader for i in batch["id"].tolist()]

    ((peeked, ids),) = run(1, work)
    assert ids[:2] == peeked and sorted(ids) == list(range(7))


def rows_behind(
    sizes: list[int], folder: Path, epoch: int, taken: int, batch_size: int = 2
) -> tuple[list[list[int]], list[list[int]]]:
    """Ids by step on all ranks: those of a pass that is left, and those of one that goes on."""

    def work(comm: ThreadComm) -> tuple[list[list[int]], list[list[int]]]:
        def loader(name: str, batch_size: int) -> JointBatches:
            file = folder / f"{comm.rank}-{name}" if epoch else None
            rows = RankRows(batches_of(comm.rank, sizes[comm.rank]), file)
            made = JointBatches(comm, rows, batch_size, 0, columns_of)
            made.set_epoch(epoch)
            return made

        first, second = loader("first", 2), loader("second", batch_size)
        before = [batch["id"].tolist() for batch in islice(first, taken)]
        next(iter(second), None)  # a look at the start
        second.load_state_dict(first.state_dict())
        looked = next(iter(second), {"id": torch.tensor([])})["id"].tolist()
        second.load_state_dict(first.state_dict())  # as before each pass
        behind = [batch["id"].tolist() for batch in second]
        assert looked == (behind or [[]])[0]
        return before, behind

    ranks = run(len(sizes), work)
    before, behind = (zip(*steps, strict=True) for steps in zip(*ranks, strict=True))
    return list(map(flat, before)), list(map(flat, behind))


def flat(parts: Iterable[list[int]]) -> list[int]:
    """Ids of all ranks in a step, or of all steps."""
    return list(chain.from_iterable(parts))


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("sizes", UNEVEN.values(), ids=UNEVEN)
def test_a_pass_goes_on_behind_the_rows_that_were_taken(
    sizes: list[int], epoch: int, tmp_path: Path
) -> None:
    (whole,) = epochs(sizes, tmp_path, 2)[epoch:][:1]
    steps = list(map(flat, whole))
    for taken in range(len(steps) + 1):
        before, behind = rows_behind(sizes, tmp_path, epoch, taken)
        assert (before, behind) == (steps[:taken], steps[taken:])


def test_batches_of_another_size_go_on_with_the_rows_that_are_left(tmp_path: Path) -> None:
    before, behind = rows_behind([9, 2, 6], tmp_path, 1, 1, batch_size=1)
    there = [*range(9), 100, 101, *range(200, 206)]
    assert sorted(flat(before + behind)) == there
    assert len(before[0]) == 6 and len(behind[0]) == 3


def test_a_place_in_other_rows_is_refused() -> None:
    (state,) = run(1, lambda comm: placed(comm, 9, 0))
    assert state == {"given": 6, "order": [0, 0]}
    for num, seed, words in ((5, 0, "of other rows"), (9, 1, "of another order")):
        with pytest.raises(UsageError, match=words):
            run(1, lambda comm, num=num, seed=seed: placed(comm, num, seed, state))


def placed(comm: ThreadComm, num: int, seed: int, state: Any = None) -> Any:
    """Take some batches of a rank, and return the place behind them."""
    loader = JointBatches(comm, RankRows(batches_of(0, num), None), 2, seed, columns_of)
    if state is not None:
        loader.load_state_dict(state)
    for _ in islice(loader, 3):
        pass
    return loader.state_dict()


def test_rows_that_were_to_be_read_once_are_gone(tmp_path: Path) -> None:
    rows = RankRows(batches_of(0, 5), None)
    assert sum(len(table) for table in rows.in_order(0, None)) == 5
    with pytest.raises(UsageError, match="epochs="):
        rows.in_order(1, None)


def test_a_pass_that_is_left_is_read_to_its_end_for_the_next(tmp_path: Path) -> None:
    rows = RankRows(batches_of(0, 9), tmp_path / "rows")
    assert len(next(rows.in_order(0, None))) == 4
    tables = list(rows.in_order(1, [0]))
    assert sorted(i for table in tables for i in table["id"].to_pylist()) == list(range(9))
    assert all(f"row {i}" == name for table in tables for i, name in pairs(table))


def pairs(table: Any) -> list[tuple[int, str]]:
    return list(zip(table["id"].to_pylist(), table["name"].to_pylist(), strict=True))


def test_fewer_rows_than_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fewer rows than ranks"):
        epochs([1, 0], tmp_path, 1)


@pytest.mark.parametrize("have", [[12, 3, 0], [0, 0, 5], [4, 4, 4], [7]], ids=str)
def test_who_gives_what(have: list[int]) -> None:
    num = rows_of_step(have, 2 * len(have))
    gives = given(have, num)
    assert sum(gives) == num and all(0 <= g <= h for g, h in zip(gives, have, strict=True))
    takes = [num // len(have) + (r < num % len(have)) for r in range(len(have))]
    for source, to, moved in moves(gives, takes):
        gives[source] -= moved
        gives[to] += moved
    assert gives == takes


COLUMNS: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "numbers": ([1.5, 2.5], lambda c: torch.equal(c, torch.tensor([1.5, 2.5]).double())),
    "truth values": ([True, False], lambda c: c.tolist() == [True, False]),
    "arrays": ([[1, 2], [3, 4]], lambda c: c.tolist() == [[1, 2], [3, 4]]),
    "arrays of arrays": ([[[1], [2]], [[3], [4]]], lambda c: c.shape == (2, 2, 1)),
    "unlike lengths": ([[1], [2, 3]], lambda c: [p.tolist() for p in c] == [[1], [2, 3]]),
    "bytes": ([b"a", b""], lambda c: c == [b"a", b""]),
    "text": (["a", None], lambda c: c == ["a", None]),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.quick
def test_a_column_is_a_tensor_or_a_list(name: str) -> None:
    values, fits = COLUMNS[name]
    whole = pa.table({"c": pa.array([values[0], *values])}).slice(1)
    assert fits(columns_of(whole)["c"])
    halves = pa.concat_tables([whole.slice(0, 1), whole.slice(1)])
    assert fits(columns_of(halves)["c"])


def test_a_null_among_numbers_is_refused() -> None:
    with pytest.raises(UsageError, match="'c' has a null"):
        columns_of(pa.table({"c": [1, None]}))
