"""`shoal.shard` as a script calls it: ranks agree on a seed, and on what they shard."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from every_kind import KINDS, Batches, Numbers
from one_process import built
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer, UsageError
from shoal.front.session_start import using

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("batch", ["rank", "global"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_out_any_loader(kind: str, batch: Any) -> None:
    make, num = KINDS[kind]

    alone = threading.Lock()  # orders are drawn by torch's generator, which threads share

    def work(comm: ThreadComm) -> list[list[int]]:
        with using(comm):
            loader = shoal.shard(make(), batch=batch)
            with alone:
                return [each.flatten().tolist() for each in loader]

    ranks = run(3, work)
    assert len(set(map(len, ranks))) == 1
    assert sorted(row for rank in ranks for rows in rank for row in rows) == list(range(num))


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (lambda rank: DataLoader(range(20), 2 + rank), {}, "10 batches of 2|5 batches of 2"),
        (lambda rank: DataLoader(Numbers(20), 2 + rank), {}, "a stream, 4 rows"),
        (lambda rank: DataLoader(Batches() if rank else Numbers(9), None if rank else 2), {}, "a"),
        (lambda rank: [torch.ones(2)] * 3 if rank else DataLoader(range(6), 2), {}, "a stream"),
        (lambda rank: DataLoader(range(20), 2), {"shares": ([1, 2], [2, 1])}, r"shares=\[1, 2\]"),
        (lambda rank: DataLoader(range(20), 2), {"batch": ("rank", "global")}, "batch='rank'"),
    ],
)
def test_ranks_that_shard_other_loaders_hear_it(make: Any, options: Any, says: str) -> None:
    def work(comm: ThreadComm) -> None:
        given = {name: values[comm.rank] for name, values in options.items()}
        with using(comm), pytest.raises(RanksDiffer, match="shard different loaders") as caught:
            shoal.shard(make(comm.rank), **given)
        assert "do this" in str(caught.value)
        assert caught.match(says)

    run(2, work)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": "all"}, '"rank" or "global"'),
        ({"shares": [1, 2, 3]}, "one positive number a rank"),
        ({"shards_itself": True}, "leave shards_itself out"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, says: str) -> None:
    def work(comm: ThreadComm) -> None:
        with using(comm), pytest.raises(UsageError, match=says):
            shoal.shard(DataLoader(range(20), 2), **options)

    run(2, work)


def test_ranks_read_unlike_streams_as_one() -> None:
    """A stream that gives each rank its own rows, which nobody has said: found as it trains."""

    def work(comm: ThreadComm) -> None:
        rows = [torch.randn(3) + comm.rank for _ in range(12)]
        with using(comm):
            loader = shoal.shard(DataLoader(_stream(rows), 2))
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            sample = torch.randn(2, 3), torch.randn(2, 2)
            _, loss_fn, _ = shoal.parallelize(model, nn.MSELoss(), optimizer, sample=sample)
            for x in loader:
                loss_fn(model(x), torch.ones(len(x), 2)).backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(RanksDiffer, match="order of its rows") as caught:
        run(2, work)
    assert "shards_itself=True" in str(caught.value)


def _stream(rows: list[torch.Tensor]) -> Any:
    class Rows(Numbers):
        def __iter__(self) -> Any:
            return iter(rows)

    return Rows(len(rows))


@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_uneven_shares_are_those_of_one_process(size: int) -> None:
    """Five steps in float64, rows in shares of 1 to 4."""
    x = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))

    def work(comm: ThreadComm) -> tuple[torch.Tensor, list[int]]:
        model = built(lambda: nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with using(comm):
            loader = shoal.shard(
                DataLoader(data, 10, shuffle=True), batch="global", shares=[1, 4][: comm.size]
            )
            _, loss_fn, _ = shoal.parallelize(
                model, nn.MSELoss(), optimizer, sample=data[: 3 + comm.rank]
            )
            rows = []
            for inputs, target in loader:
                loss_fn(model(inputs), target).backward()
                optimizer.step()
                optimizer.zero_grad()
                rows.append(len(inputs))
            return model.weight.detach().clone(), rows

    (alone, _), *_ = run(1, work)
    for rank, (weight, rows) in enumerate(run(size, work)):
        assert torch.allclose(weight, alone, rtol=0, atol=1e-10)
        assert rows == [[10], [2, 8]][size - 1][rank : rank + 1] * 5


def test_alone_a_pass_that_is_trained_on_is_an_epoch_and_a_look_is_none() -> None:
    def work(comm: ThreadComm) -> list[list[int]]:
        with using(comm):
            loader = shoal.shard(DataLoader(torch.arange(12.0), 2, shuffle=True))
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            shoal.parallelize(
                model, nn.MSELoss(), optimizer, sample=(torch.ones(2, 1), torch.ones(2, 1))
            )
            epochs = []
            for _ in range(2):
                next(iter(loader))
                rows = []
                for batch in loader:
                    rows += batch.int().tolist()
                    model(batch.unsqueeze(1)).sum().backward()
                    optimizer.step()
                    if len(rows) == 8:
                        break
                epochs.append(rows)
                assert loader.state_dict()["position"] == [8]
            shoal.unparallelize(model)
            assert not optimizer._optimizer_step_post_hooks  # type: ignore[attr-defined]
            return epochs

    first, second = run(1, work)[0]
    assert len(set(first)) == 8
    assert first != second
