"""Samplers that were made for several ranks: taken over, taken as they are, or refused by name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from one_process import built
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer, UsageError
from shoal.core.facts import Cluster, Link, Topology
from shoal.front.session_start import using

pytestmark = pytest.mark.quick
Batches = list[list[int]]
NUM = 26


def on_ranks(work: Callable[[int, int], Any], size: int = 2) -> list[Any]:
    def on_rank(comm: ThreadComm) -> Any:
        hosts = tuple(f"h{rank}" for rank in range(size))
        with using(comm, Cluster(Topology(hosts), Link(1e-4, 1e8), 1.0)):
            return work(comm.rank, comm.size)

    return run(size, on_rank, timeout_s=20)


def lists(loader: Any, most: int | None = None) -> Batches:
    batches = iter(loader)
    return [rows.tolist() for rows, _ in zip(batches, range(most or 1000), strict=False)]


def flat(each: Any) -> list[Any]:
    return [row for rows in each for row in rows]


def steps(of_ranks: list[Batches]) -> Batches:
    """Each step's rows of all ranks."""
    return [sorted(flat(step)) for step in zip(*of_ranks, strict=True)]


def ddp(rank: int, size: int, **options: Any) -> DistributedSampler[int]:
    return DistributedSampler(range(NUM), size, rank, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{}, {"seed": 5}, {"shuffle": False}, {"drop_last": True}])
@pytest.mark.parametrize("size", [2, 3])
def test_a_distributed_sampler_is_taken_over(size: int, options: dict[str, Any]) -> None:
    """The same rows in each step as DistributedSampler would give, but for its padding."""

    def work(rank: int, size: int) -> tuple[list[Batches], list[Batches]]:
        sampler, plain = ddp(rank, size, **options), ddp(rank, size, **options)
        loader = shoal.shard(DataLoader(range(NUM), 4, sampler=sampler))
        epochs, expected = [], []
        for epoch in (0, 1, 5):
            sampler.set_epoch(epoch)
            plain.set_epoch(epoch)
            epochs.append(lists(loader))
            expected.append(lists(DataLoader(range(NUM), 4, sampler=plain)))
        assert sampler.epoch == 5 and loader.epoch == 6
        return epochs, expected

    ranks = on_ranks(work, size)
    own_epochs, their_epochs = ([*zip(*each, strict=True)] for each in zip(*ranks, strict=True))
    for own, theirs in zip(own_epochs, their_epochs, strict=True):
        rows = steps(list(own))
        assert rows[0] == steps(list(theirs))[0]
        kept = NUM // size * size if "drop_last" in options else NUM
        assert len(flat(rows)) == len(set(flat(rows))) == kept


def test_taking_over_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def work(rank: int, size: int) -> None:
        for _ in range(2):
            shoal.shard(DataLoader(range(NUM), 4, sampler=ddp(rank, size)))

    with caplog.at_level(logging.INFO, "shoal"):
        on_ranks(work)
    assert caplog.text.count("takes its dataset, seed, shuffle, drop_last and set_epoch") == 1


def test_set_epoch_of_a_sampler_keeps_a_position_that_was_loaded() -> None:
    def work(rank: int, size: int) -> None:
        def made() -> tuple[Any, Any]:
            sampler = ddp(rank, size)
            return sampler, shoal.shard(DataLoader(range(NUM), 4, sampler=sampler))

        (sampler, loader), (again, after) = made(), made()
        lists(loader)
        sampler.set_epoch(3)
        batches = iter(loader)
        next(batches)
        after.load_state_dict(loader.state_dict())
        for epoch in range(after.epoch, 5):  # as a script with DistributedSampler goes on
            again.set_epoch(epoch)
            rest = lists(after)
            assert rest == [rows.tolist() for rows in batches], f"epoch {epoch}"
            sampler.set_epoch(epoch + 1)
            batches = iter(loader)

    on_ranks(work)


def test_an_epoch_that_the_sampler_had_already() -> None:
    def work(rank: int, size: int) -> Batches:
        sampler = ddp(rank, size)
        sampler.set_epoch(4)
        return lists(shoal.shard(DataLoader(range(NUM), 4, sampler=sampler)))

    order = torch.randperm(NUM, generator=torch.Generator().manual_seed(4)).tolist()
    assert steps(on_ranks(work))[0] == sorted(order[:8])


class Bucketed(Sampler[list[int]]):
    """Batches of one length each, as of speech libraries: every rank takes its own of them."""

    def __init__(self, rank: int, world_size: int, unlike: bool = False) -> None:
        self.rank, self.world_size, self.epoch, self.unlike = rank, world_size, 0, unlike

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        rows = torch.randperm(24, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        batches = [rows[start : start + 2] for start in range(0, 24, 2)]
        mine = batches[self.rank :: self.world_size]
        return iter([b[: 1 + self.rank] for b in mine] if self.unlike else mine)

    def __len__(self) -> int:
        return 12 // self.world_size


def repeated(rank: int, size: int) -> Sampler[int]:
    """Repeated augmentation, whose code alone has the numbers: ranks get the same rows."""

    class Repeated(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
            return iter(order.repeat_interleave(2)[rank::size].tolist())

    return Repeated()


class World(Sampler[int]):
    """Asks for the world as it is iterated over."""

    def __iter__(self) -> Iterator[int]:
        world = shoal.world()
        return iter(range(24)[world.rank :: world.size])


class Nested(Sampler[list[int]]):
    """A batch sampler of one's own over a DistributedSampler."""

    def __init__(self, sampler: DistributedSampler[int]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return iter(BatchSampler(self.sampler, 3, drop_last=False))


SPLITS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "buckets": lambda rank, size: {"batch_sampler": Bucketed(rank, size)},
    "repeated": lambda rank, size: {"batch_size": 3, "sampler": repeated(rank, size)},
    "world": lambda rank, size: {"batch_size": 3, "sampler": World()},
    "nested": lambda rank, size: {"batch_sampler": Nested(ddp(rank, size, shuffle=False))},
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", SPLITS)
def test_a_sampler_that_splits_by_rank_is_taken_as_it_is(
    kind: str, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    def work(rank: int, size: int) -> list[Any]:
        plain = DataLoader(range(NUM), **SPLITS[kind](rank, size))
        loader = shoal.shard(DataLoader(range(NUM), **SPLITS[kind](rank, size)))
        expected, epoch = lists(plain), lists(loader)
        batches = iter(loader)
        taken = [next(batches).tolist() for _ in range(2)]
        again = shoal.shard(DataLoader(range(NUM), **SPLITS[kind](rank, size)))
        again.load_state_dict(loader.state_dict())
        rest = [rows.tolist() for rows in batches]
        assert lists(again) == rest, "a position goes on exactly"
        return [epoch == expected, len(epoch), len(taken + rest)]

    with caplog.at_level(logging.INFO, "shoal"):
        assert len({str(each) for each in on_ranks(work, size)}) == 1
    assert on_ranks(work, size)[0][0]
    assert "splits its rows by rank" in caplog.text


def test_batches_of_ranks_own_are_trained_on_as_one_process_would() -> None:
    """Rows of unlike numbers on each rank, in float64."""
    x = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))

    def work(rank: int, size: int) -> torch.Tensor:
        model = built(lambda: nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sample = data[: 3 + rank]
        _, loss_fn, _ = shoal.parallelize(model, nn.MSELoss(), optimizer, sample=sample)
        loader = shoal.shard(DataLoader(data, batch_sampler=Bucketed(rank, size, unlike=True)))
        for _ in range(2):
            for inputs, target in loader:
                loss_fn(model(inputs), target).backward()
                optimizer.step()
                optimizer.zero_grad()
        return model.weight.detach().clone()

    model = built(lambda: nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        both = [Bucketed(rank, 2, unlike=True) for rank in range(2)]
        for sampler in both:
            sampler.set_epoch(epoch)
        for step in zip(*both, strict=True):
            inputs, target = data[flat(step)]
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), target).backward()
            optimizer.step()
    for weight in on_ranks(work):
        assert torch.allclose(weight, model.weight, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (lambda rank, size: Bucketed(0, size), {}, r"Bucketed seems(?s:.)*rank=0, world_size=2"),
        (lambda rank, size: Bucketed(rank, 4), {}, r"Bucketed(?s:.)*shards_itself=True"),
        (Bucketed, {"batch": "global"}, r"nothing to cut(?s:.)*batch_size of one rank"),
        (Bucketed, {"shares": [1, 2]}, r"nothing to cut"),
    ],
)
def test_a_sampler_of_other_ranks_is_refused_by_name(make: Any, options: Any, says: str) -> None:
    def work(rank: int, size: int) -> None:
        with pytest.raises(UsageError, match=says):
            shoal.shard(DataLoader(range(NUM), batch_sampler=make(rank, size)), **options)

    on_ranks(work)


class Speaks(Sampler[int]):
    """Gives one order on every rank: its rank is for words only, or it is one of one."""

    def __init__(self, rank: int) -> None:
        self.rank, self.num_replicas, self.sampler = 0, 1, RandomSampler(range(24))
        self.speaks = rank == 0

    def __iter__(self) -> Iterator[int]:
        if self.speaks:
            print(f"a pass of {self.num_replicas} begins on rank {self.rank}")
        return iter(self.sampler)

    def __len__(self) -> int:
        return 24


def test_a_sampler_that_only_knows_of_ranks_is_dealt_out() -> None:
    def work(rank: int, size: int) -> Batches:
        return lists(shoal.shard(DataLoader(range(24), 3, sampler=Speaks(rank))))

    rows = flat(steps(on_ranks(work)))
    assert sorted(rows) == list(range(24))


def test_the_loop_may_say_what_a_sampler_does() -> None:
    def work(rank: int, size: int) -> list[Batches]:
        dealt = DataLoader(range(NUM), batch_sampler=Bucketed(0, 2))
        own = DataLoader(range(NUM), batch_sampler=Bucketed(rank, 2))
        return [
            lists(shoal.shard(dealt, shards_itself=False)),
            lists(shoal.shard(own, shards_itself=True)),
        ]

    dealt, own = zip(*on_ranks(work), strict=True)
    assert flat(steps(list(dealt))) != flat(steps(list(own)))
    assert len(flat(steps(list(dealt)))) == 12 and len(flat(steps(list(own)))) == 24


class Balanced(Sampler[int]):
    """A sampler of somebody's own, which may draw a row again."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter([0] * self.size)

    def __len__(self) -> int:
        return self.size


REPEATING: dict[str, tuple[Callable[[], Any], bool]] = {
    "with replacement": (lambda: RandomSampler(range(1), replacement=True, num_samples=8), True),
    "weighted": (lambda: WeightedRandomSampler([1.0], 8), True),
    "of its own": (lambda: Balanced(8), True),
    "in order": (lambda: None, False),
}


@pytest.mark.parametrize("kind", REPEATING)
def test_ranks_may_draw_the_same_rows_with_replacement(kind: str) -> None:
    make, may_repeat = REPEATING[kind]
    model = built(lambda: nn.Linear(1, 1))
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(rank: int, size: int) -> None:
        rows = TensorDataset(torch.ones(8, 1, dtype=torch.float64), torch.zeros(8, 1).double())
        loader = shoal.shard(DataLoader(rows, 2, sampler=make()))
        optimizer = torch.optim.SGD(models[rank].parameters(), 0.1)
        unlike = torch.full((2, 1), float(rank), dtype=torch.float64)
        own, loss_fn, _ = shoal.parallelize(
            models[rank], nn.MSELoss(), optimizer, sample=(unlike, unlike)
        )
        for x, y in loader:
            loss_fn(own(x), y).backward()

    if may_repeat:
        on_ranks(work)
    else:
        with pytest.raises(RanksDiffer, match="fed the same batch"):
            on_ranks(work)
