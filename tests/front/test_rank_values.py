"""`mean` and `gather`: right over uneven rows, alone, beside servers and tail hosts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer, UsageError
from shoal.front.session_start import hold, using
from shoal.servers.servers import serve

ROWS = [torch.arange(12.0).reshape(6, 2)[start:stop] for start, stop in ((0, 3), (3, 4), (4, 6))]


def on_ranks(ranks: int, work: Any, **beside: int) -> list[Any]:
    def each(comm: ThreadComm) -> Any:
        if comm.rank >= comm.workers and comm.topology.servers:
            return serve(comm)
        with using(comm) as session:
            if comm.rank >= comm.workers:
                return hold(session)
            return work(comm.rank)

    return run(ranks + sum(beside.values()), each, timeout_s=10, **beside)[:ranks]


BESIDE: list[dict[str, int]] = [{}, {"servers": 1}, {"tail": 1}]


@pytest.mark.parametrize("beside", BESIDE, ids=["", "servers", "tail"])
def test_a_mean_over_uneven_rows_is_that_of_all_rows(beside: dict[str, int]) -> None:
    def work(rank: int) -> tuple[Any, ...]:
        rows = ROWS[rank]
        own = rows.double().mean()
        return (
            shoal.mean(float(own), weight=len(rows)),
            shoal.mean(own, weight=len(rows)),
            shoal.mean(rows.mean(0), weight=torch.tensor(len(rows))),
            shoal.gather(rows),
        )

    for number, scalar, vector, rows in on_ranks(3, work, **beside):
        assert number == pytest.approx(5.5, rel=1e-15)
        assert isinstance(number, float)
        assert scalar.dtype == torch.float64
        assert scalar.shape == ()
        assert torch.equal(vector, torch.tensor([5.0, 6.0]))
        assert vector.dtype == torch.float32
        assert torch.equal(rows, torch.cat(ROWS))


def test_without_weights_every_rank_counts_the_same() -> None:
    assert on_ranks(3, lambda rank: shoal.mean([1, 2, 6][rank])) == [3.0] * 3


def test_a_rank_without_rows_gives_nothing_though_its_mean_is_nan() -> None:
    def work(rank: int) -> Any:
        rows = torch.ones(2, 3) if rank == 0 else torch.ones(0)
        return shoal.mean(rows.mean(), weight=len(rows)), shoal.gather(rows)

    for mean, rows in on_ranks(2, work):
        assert mean == 1
        assert rows.shape == (2, 3)


def test_a_mean_of_no_rows_is_nan_and_a_warning() -> None:
    with pytest.warns(UserWarning, match="no rank had a row"):
        means = on_ranks(2, lambda rank: shoal.mean(1.0, weight=0))
    assert all(math.isnan(value) for value in means)


def test_what_was_gathered_has_the_bits_it_had() -> None:
    tensors = {
        "half": torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16),
        "numbers": torch.tensor([2**60 + 1]),
        "truths": torch.tensor([True, False]),
        "number": torch.tensor(4),
        "turned": torch.arange(6.0).reshape(2, 3).t(),
    }

    def work(rank: int) -> Any:
        return {name: shoal.gather(tensor) for name, tensor in tensors.items()}

    for found in on_ranks(2, work):
        for name, tensor in tensors.items():
            own = tensor.reshape(1) if tensor.dim() == 0 else tensor
            assert torch.equal(found[name], torch.cat([own, own]))
            assert found[name].dtype == tensor.dtype


def test_means_have_no_history_and_take_whole_numbers() -> None:
    def work(rank: int) -> Any:
        loss = torch.ones((), requires_grad=True) * (rank + 1)
        return shoal.mean(loss), shoal.mean(torch.tensor([rank, 1])), shoal.gather(loss.detach())

    for loss, whole, losses in on_ranks(2, work):
        assert not loss.requires_grad
        assert not losses.requires_grad
        assert loss == 1.5
        assert torch.equal(whole, torch.tensor([0.5, 1.0]))
        assert torch.equal(losses, torch.tensor([1.0, 2.0]))


def test_gradients_of_gathered_rows_are_summed_over_the_ranks() -> None:
    """Uneven rows, a rank without any, and one whose rows need no gradient."""
    counts = (2, 0, 1)

    def work(rank: int) -> Any:
        rows = torch.ones(counts[rank], 3, requires_grad=rank < 2)
        gathered = shoal.gather(rows)
        (gathered * torch.arange(3.0).unsqueeze(1) * (rank + 1)).sum().backward()  # type: ignore
        return gathered, rows.grad

    found = on_ranks(3, work)
    for gathered, _ in found:
        assert gathered.shape == (3, 3)
        assert gathered.requires_grad
    assert torch.equal(found[0][1], torch.tensor([[0.0] * 3, [6.0] * 3]))
    assert found[1][1].shape == (0, 3)
    assert found[2][1] is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex64])
def test_gradients_come_back_in_the_type_of_the_rows(dtype: torch.dtype) -> None:
    def work(rank: int) -> Any:
        rows = torch.full((2, 2), rank + 1, dtype=dtype, requires_grad=True)
        shoal.gather(rows).abs().sum().backward()  # type: ignore[no-untyped-call]
        return rows.grad

    assert all(torch.equal(grad, torch.full((2, 2), 2, dtype=dtype)) for grad in on_ranks(2, work))


def test_gathered_rows_have_no_history_where_a_rank_has_gradients_off() -> None:
    def work(rank: int) -> bool:
        with torch.set_grad_enabled(rank == 0):
            return shoal.gather(torch.ones(2, requires_grad=True)).requires_grad

    assert on_ranks(2, work) == [False, False]


def test_a_lone_process_gathers_its_own_rows_with_their_history() -> None:
    rows = torch.ones(2, requires_grad=True)
    shoal.gather(rows).sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None and torch.equal(rows.grad, torch.ones(2))


def test_alone_and_before_init_they_send_nothing() -> None:
    assert shoal.mean(0.25, weight=7) == 0.25
    with pytest.warns(UserWarning, match="no rank had a row"):
        assert math.isnan(shoal.mean(0.25, weight=0))
    assert torch.equal(shoal.gather(torch.tensor([[1, 2]])), torch.tensor([[1, 2]]))
    with pytest.raises(UsageError, match="number of rows"):
        shoal.mean(0.25, weight=-1)
    with pytest.raises(UsageError, match="takes a tensor"):
        shoal.gather([1, 2])  # type: ignore[arg-type]


@pytest.mark.parametrize("call", ["mean", "gather"])
@pytest.mark.parametrize("unlike", [1, 2])
def test_ranks_that_give_other_forms_are_named(call: str, unlike: int) -> None:
    def work(rank: int) -> None:
        value = torch.ones(2, 3 if rank == unlike else 2)
        with pytest.raises(RanksDiffer, match=f"rank {unlike} and rank 0 give shoal.{call}"):
            getattr(shoal, call)(value)

    on_ranks(3, work)


def test_a_mistake_on_one_rank_is_an_error_on_all() -> None:
    def work(rank: int) -> None:
        with pytest.raises(UsageError, match="no number") as error:
            shoal.mean("much" if rank else 1.0)  # type: ignore[call-overload]
        assert isinstance(error.value, RanksDiffer) == (rank == 0)

    on_ranks(2, work)


def test_a_rank_that_asks_for_something_else_is_told() -> None:
    def work(rank: int) -> None:
        with pytest.raises(RanksDiffer, match=r"shoal\.mean\(\)"):
            if rank:
                shoal.mean(1.0)
            else:
                shoal.gather(torch.ones(1))

    on_ranks(2, work)


def test_rank_0_is_main() -> None:
    assert on_ranks(3, lambda rank: shoal.world().is_main) == [True, False, False]
