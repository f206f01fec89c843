"""Files that ranks list in another order: said by `shard`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer
from shoal.front.session_start import using

NAMES = [f"image{number}.png" for number in range(9)]


class Files(Dataset[Any]):
    def __init__(self, files: Any) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return index


FORMS: dict[str, Callable[[list[str]], Dataset[Any]]] = {
    "names": lambda names: Files(names),
    "paths": lambda names: Files([Path("/data") / name for name in names]),
    "array": lambda names: Files(np.array(names)),
    "names and labels": lambda names: Files([(name, int(name[5])) for name in names]),
    "a part of another": lambda names: Subset(Files(names), range(6)),
    "several": lambda names: ConcatDataset([Files(names[:4]), Files(names[4:])]),
}


def sharded(of_rank: Callable[[int], Dataset[Any]]) -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm):
            shoal.shard(DataLoader(of_rank(comm.rank), batch_size=2))

    run(3, work, timeout_s=10)


@pytest.mark.quick
@pytest.mark.parametrize("form", FORMS)
def test_the_same_files_in_another_order_are_refused(form: str) -> None:
    def of_rank(rank: int) -> Dataset[Any]:
        names = list(NAMES)
        if rank == 2:
            names[1], names[3] = names[3], names[1]
        return FORMS[form](names)

    with pytest.raises(RanksDiffer, match="rank 2 and rank 0 list the same names in another"):
        sharded(of_rank)
    sharded(lambda rank: FORMS[form](NAMES))


@pytest.mark.quick
def test_the_folder_may_be_elsewhere_on_each_host() -> None:
    sharded(lambda rank: Files([f"disk{rank}/{name}" for name in NAMES]))


@pytest.mark.quick
def test_other_files_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="list other names"):
        sharded(lambda rank: Files([f"{rank}{name}" for name in NAMES]))


@pytest.mark.quick
def test_what_lists_nothing_is_left_alone() -> None:
    sharded(lambda rank: TensorDataset(torch.arange(9.0), torch.arange(9.0) + rank))
    sharded(lambda rank: Files([f"{rank}"] if rank > 5 else list(range(9))))


CUT: dict[str, Callable[[int], Dataset[Any]]] = {
    "tensors": lambda rank: TensorDataset(torch.arange(48.0)[rank::3]),
    "a subset": lambda rank: Subset(range(48), range(rank, 48, 3)),  # type: ignore[arg-type]
}


@pytest.mark.quick
@pytest.mark.parametrize("kind", CUT)
def test_rows_that_the_script_has_cut_by_rank_already_are_said(kind: str) -> None:
    with pytest.warns(UserWarning, match=r"list other rows(.|\n)*rows of its own already"):
        sharded(CUT[kind])


@pytest.mark.quick
def test_a_random_split_that_is_another_on_each_rank_is_refused() -> None:
    def of_rank(rank: int) -> Dataset[Any]:
        order = torch.randperm(16, generator=torch.Generator().manual_seed(rank))
        return Subset(range(16), order.tolist())  # type: ignore[arg-type]

    with pytest.raises(RanksDiffer, match=r"the same rows in another order(.|\n)*random_split"):
        sharded(of_rank)
