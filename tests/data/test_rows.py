"""Sharding a loader: each rank its own rows, the same number of batches, the rows that one process
would take.
"""

import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from shoal.core.errors import UsageError
from shoal.data.deal import Deal
from shoal.data.order import propose_seed
from shoal.data.sharded import shard_loader

pytestmark = pytest.mark.quick


def shard(loader, rank, size, seed):
    return shard_loader(loader, Deal(rank, size), seed)


def rows_of(loader):
    return [batch.tolist() for batch in loader]


def steps_of(loader, size, seed=0):
    """What all ranks take in each step, in rank order: `steps[i][rank]`."""
    return list(
        zip(*(rows_of(shard(loader, rank, size, seed)) for rank in range(size)), strict=True)
    )


def flat(lists):
    return [row for each in lists for row in each]


@pytest.mark.parametrize("size", [2, 3, 7])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_rows_are_shared_out_evenly(size, batch_size, drop_last):
    for num_rows in range(size * batch_size if drop_last else size, 4 * size * batch_size):
        loader = DataLoader(range(num_rows), batch_size=batch_size, drop_last=drop_last)
        steps = steps_of(loader, size)  # zip(strict): every rank gives the same number of batches
        kept = num_rows // (size * batch_size) * size * batch_size if drop_last else num_rows
        assert flat(flat(steps)) == list(range(kept)), (
            "none twice, none lost, in the order of one process"
        )
        assert all(len(rows) >= 1 for step in steps for rows in step)
        per_rank = [sum(map(len, mine)) for mine in zip(*steps, strict=True)]
        assert max(per_rank) - min(per_rank) <= 1
        assert len(shard(loader, 0, size, 0)) == len(steps)
        if batch_size > 1:
            assert max(len(rows) for step in steps for rows in step) <= batch_size


def test_steps_are_the_batches_of_one_process():
    steps = steps_of(DataLoader(range(13), batch_size=2), size=2)
    assert [flat(step) for step in steps] == [
        *rows_of(DataLoader(range(8), batch_size=4)),
        [8, 9, 10],
        [11, 12],
    ]
    steps = steps_of(DataLoader(range(14), batch_size=2), size=2)
    assert [flat(step) for step in steps] == rows_of(DataLoader(range(14), batch_size=4))


class PythonShuffle(Sampler):
    """Draws from random and numpy, as samplers found in the wild do."""

    def __iter__(self):
        rows = list(range(20))
        random.shuffle(rows)
        np.random.shuffle(rows)
        return iter(rows)

    def __len__(self):
        return 20


def seeded_differently_by_rank():
    return torch.Generator().manual_seed(torch.initial_seed())


SAMPLERS = {
    "shuffle": lambda: RandomSampler(range(20)),
    "generator": lambda: RandomSampler(range(20), generator=seeded_differently_by_rank()),
    "subset": lambda: SubsetRandomSampler(range(20), generator=seeded_differently_by_rank()),
    "weighted": lambda: WeightedRandomSampler([1.0] * 20, 20, replacement=False),
    "python": PythonShuffle,
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_rank_shuffles_alike_and_anew_each_epoch(sampler):
    shards = []
    for rank in range(3):
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)
        shards.append(
            shard(DataLoader(range(20), batch_size=3, sampler=SAMPLERS[sampler]()), rank, 3, seed=5)
        )
    epochs = [flat(flat(zip(*map(rows_of, shards), strict=True))) for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(20))
    assert all(a != b for a, b in pairwise(epochs))
    shards[0].sampler.set_epoch(1)
    assert flat(rows_of(shards[0]))[:3] == epochs[1][:3]
    assert flat(rows_of(shards[0]))[:3] == epochs[2][:3], "passes go on from the epoch that was set"


def test_another_seed_is_another_order():
    loader = DataLoader(range(20), batch_size=3, shuffle=True)
    assert rows_of(shard(loader, 0, 2, seed=1)) != rows_of(shard(loader, 0, 2, seed=2))


def test_the_random_state_of_the_script_is_left_alone():
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(
        range(20), batch_size=3, sampler=RandomSampler(range(20), generator=generator)
    )
    before = (
        torch.get_rng_state(),
        generator.get_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )
    list(shard(loader, 0, 2, seed=9).batch_sampler)
    after = (
        torch.get_rng_state(),
        generator.get_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    )
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert before[2:] == after[2:]


def test_the_seed_to_propose_is_that_of_the_sampler_or_of_torch():
    torch.manual_seed(11)
    generator = torch.Generator().manual_seed(3)
    assert propose_seed(DataLoader(range(4), shuffle=True, generator=generator)) == 3
    assert propose_seed(DataLoader(range(4), shuffle=True)) == 11


@pytest.mark.processes
def test_options_are_kept_and_workers_persist():
    def collate(rows):
        return torch.tensor(rows) * 10

    loader = DataLoader(
        range(12),
        batch_size=2,
        collate_fn=collate,
        num_workers=1,
        persistent_workers=True,
        prefetch_factor=3,
        timeout=30,
    )
    iter(loader)  # the original's worker is its own
    mine = shard(loader, 1, 2, seed=0)
    assert (mine.batch_size, mine.num_workers, mine.prefetch_factor, mine.timeout) == (2, 1, 3, 30)
    assert rows_of(mine) == [[20, 30], [60, 70], [100, 110]]
    assert rows_of(mine) == [[20, 30], [60, 70], [100, 110]]
    assert rows_of(loader)[0] == [0, 10], "the loader itself is not changed"


def test_a_plain_batch_sampler_is_cut_too():
    loader = DataLoader(
        range(8), batch_sampler=BatchSampler(SequentialSampler(range(8)), 2, drop_last=False)
    )
    assert rows_of(shard(loader, 1, 2, seed=0)) == [[2, 3], [6, 7]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_process_takes_the_order_of_ranks(size):
    def taken(size):
        loader = DataLoader(range(20), batch_size=2, shuffle=True)
        return flat(flat(steps_of(loader, size, seed=4)))

    assert taken(size) == taken(1) != list(range(20))


def test_a_loader_of_ones_own_class_stays_one():
    class Loader(DataLoader):
        def name(self):
            return "own"

    mine = shard(Loader(range(4), batch_size=2), 1, 2, seed=0)
    assert isinstance(mine, Loader) and mine.name() == "own"


@pytest.mark.parametrize(
    ("loader", "says"),
    [
        (7, "takes a DataLoader"),
        (iter([1, 2, 3]), "once only"),
        (shard(DataLoader(range(9)), 0, 2, 0), "sharded already"),
        (DataLoader(range(3)), "3 rows, 4 ranks"),
        (DataLoader(range(9), batch_size=3, drop_last=True), r"at least 12(?s:.)*drop_last=False"),
    ],
)
def test_what_cannot_be_cut_is_refused(loader, says):
    with pytest.raises(UsageError, match=says):
        shard(loader, 0, 4, seed=0)


def test_a_pass_that_goes_on_draws_no_number_as_the_one_before_has() -> None:
    """A DataLoader draws one as a pass begins, which dropout would miss."""

    def loader() -> Any:
        return shard_loader(DataLoader(range(8), 2, shuffle=True), Deal(0, 1), seed=0)

    def drawn(passed: Any) -> bool:
        before = torch.get_rng_state()
        iter(passed)
        return not torch.equal(before, torch.get_rng_state())

    first = loader()
    batches = iter(first)
    next(batches)
    later = loader()
    assert drawn(later), "at the start of an epoch as in torch"
    later = loader()
    later.load_state_dict(first.state_dict())
    assert not drawn(later)
    list(later)
    later.set_epoch(1)
    assert drawn(later)
