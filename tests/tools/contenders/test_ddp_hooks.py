"""DDP's hooks by name, and the PowerSGD that stands for torch's on gloo: ranks are threads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from one_process import assert_same_bits, numbers
from torch import Tensor

from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import UsageError
from shoal_tools.contenders.ddp_hooks import HOOKS, PowerSGD, hook_by_name

RANKS = 3


def averaged(gradients: Sequence[Tensor], rank: int, steps: int = 1) -> list[list[Tensor]]:
    """By rank: what PowerSGD makes of one parameter's gradient in each step, and what is lost."""

    def work(comm: ThreadComm) -> list[Tensor]:
        low_rank = PowerSGD(rank, comm.all_reduce, comm.size)
        parameter, sent = torch.empty_like(gradients[comm.rank]), []
        for _ in range(steps):
            sent.append(gradients[comm.rank].clone())
            low_rank.average([(parameter, sent[-1])])
        return [*sent, low_rank.lost(parameter).clone()]

    return run(RANKS, work, timeout_s=60)


def test_a_mean_of_no_more_than_its_rank_is_found_whole() -> None:
    gradients = [numbers(12, 1, seed=r) @ numbers(1, 20, seed=9 + r) for r in range(RANKS)]
    expected = sum(gradients) / RANKS
    for made, lost in averaged(gradients, rank=RANKS):
        torch.testing.assert_close(made, expected, rtol=1e-10, atol=1e-12)
        assert lost.norm() > 0.1, "what a rank has beside the mean is fed back"


def test_what_is_too_small_for_factors_is_averaged() -> None:
    gradients = [[numbers(7, seed=r), numbers(4, 4, seed=9 + r)] for r in range(RANKS)]

    def work(comm: ThreadComm) -> list[Tensor]:
        own = [gradient.clone() for gradient in gradients[comm.rank]]
        low_rank = PowerSGD(4, comm.all_reduce, comm.size)
        low_rank.average([(torch.empty_like(gradient), gradient) for gradient in own])
        return own

    for made in run(RANKS, work, timeout_s=60):
        for number, values in enumerate(made):
            expected = sum(own[number] for own in gradients) / RANKS
            torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


def test_a_constant_gradient_telescopes() -> None:
    """All that is sent, and the mean of what is lost, are all that was given."""
    steps = 60
    gradients = [numbers(16, 3, 8, seed=rank) for rank in range(RANKS)]
    mean = sum(gradients) / RANKS
    ranks = averaged(gradients, rank=2, steps=steps)
    total, lost = sum(ranks[0][:-1]), sum(sent[-1] for sent in ranks) / RANKS
    torch.testing.assert_close(total + lost.view_as(mean), steps * mean, rtol=1e-9, atol=1e-9)
    assert (ranks[0][0] - mean).norm() > 0.3 * mean.norm(), "one step is far off"
    assert (total / steps - mean).norm() < 0.15 * mean.norm(), "their mean is not"
    assert_same_bits([{str(n): t for n, t in enumerate(sent[:-1])} for sent in ranks])


def test_it_sends_factors_and_what_is_small_in_two_messages() -> None:
    rows, columns, rank, small = 24, 30, 3, 5

    def work(comm: ThreadComm) -> list[int]:
        added: list[int] = []

        def add(tensor: Tensor) -> None:
            added.append(tensor.numel())
            comm.all_reduce(tensor)

        gradients = numbers(rows, columns, seed=comm.rank), numbers(small, seed=comm.rank)
        low_rank = PowerSGD(rank, add, comm.size)
        low_rank.average([(torch.empty_like(gradient), gradient) for gradient in gradients])
        return added

    assert run(RANKS, work, timeout_s=60) == [[rows * rank + small, columns * rank]] * RANKS


@pytest.mark.parametrize("name", [*HOOKS, "powersgd1", "powersgd32"])
def test_hooks_have_names(name: str) -> None:
    assert callable(hook_by_name(name))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fp15", "did you mean ddp:fp16"),
        ("powersgd", "did you mean ddp:powersgd4"),
        ("powersgd0", "did you mean ddp:powersgd4"),
        ("powersgd\u0664", "did you mean ddp:powersgd4"),
        ("", "--against ddp:fp16"),
        ("zero", "powersgdN, where N is a rank"),
    ],
)
def test_an_unknown_hook_is_refused(name: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        hook_by_name(name)
