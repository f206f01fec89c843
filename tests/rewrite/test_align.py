"""Every rank comes to have rank 0's bits; what is alike is not sent, the rest once a link."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer
from shoal.rewrite import align as aligning
from shoal.rewrite.align import align, of_first, take
from shoal_tools.testing.byte_counts import TracedComm

RANKS = 3
KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


class Parts(nn.Module):
    """A buffer of every kind, one that is turned, and a parameter that is alike everywhere."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        for number, dtype in enumerate(KINDS):
            values = torch.randn(3, 5, generator=draw)
            self.register_buffer(f"of_kind_{number}", (values * 9).to(dtype))
        self.register_buffer("turned", torch.randn(4, 3, generator=draw).t())
        self.register_buffer("number", torch.tensor(seed))
        self.register_buffer("none", torch.zeros(0, 2))
        self.special = nn.Parameter(torch.tensor([-0.0, float("nan"), float("inf"), 1e-45 * seed]))
        self.alike = nn.Parameter(torch.ones(50))


def bits(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


@pytest.mark.parametrize("piece", [8, 1 << 20])
def test_every_rank_has_rank_0s_bits(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(aligning, "_PIECE", piece)
    models = [Parts(seed) for seed in range(RANKS)]
    expected = {name: bits(tensor) for name, tensor in Parts(0).state_dict().items()}
    addresses = [[id(p) for p in model.parameters()] for model in models]

    run(RANKS, lambda comm: align(models[comm.rank], comm))

    for model, parameters in zip(models, addresses, strict=True):
        assert {name: bits(tensor) for name, tensor in model.state_dict().items()} == expected
        assert [id(p) for p in model.parameters()] == parameters
        assert not model.get_buffer("turned").is_contiguous()


def test_what_differs_goes_once_over_each_link_and_what_is_alike_stays() -> None:
    models = [nn.ParameterDict({"a": torch.full((1000,), 1.0), "b": torch.ones(10)}) for _ in "012"]
    with torch.no_grad():
        models[1]["a"][7] = 2.0

    def sent(comm: ThreadComm) -> tuple[int, int]:
        before = TracedComm(comm)
        align(models[comm.rank], before)
        once = before.counts.bytes_sent
        align(models[comm.rank], before)
        return once, before.counts.bytes_sent - once

    assert run(RANKS, sent) == [(4000, 0), (4000, 0), (0, 0)]


def test_a_model_stays_as_it_is_until_it_takes_the_values() -> None:
    """They come while a plan is made, which may be refused."""
    models = [Parts(seed) for seed in range(RANKS)]
    before = [Parts(seed).state_dict() for seed in range(RANKS)]
    values = run(RANKS, lambda comm: of_first(models[comm.rank], comm))
    assert values[0] == {}
    for model, own, received in zip(models, before, values, strict=True):
        assert {name: bits(t) for name, t in model.state_dict().items()} == {
            name: bits(t) for name, t in own.items()
        }
        take(model, received)
    one, other = (models[rank].state_dict() for rank in (0, 2))
    assert {n: bits(t) for n, t in one.items()} == {n: bits(t) for n, t in other.items()}


def test_ranks_of_one_host_follow_one_another() -> None:
    """So that each link between hosts carries it once, however ranks are dealt to hosts."""
    models = [nn.ParameterDict({"a": torch.full((8,), float(rank))}) for rank in range(4)]
    hosts = ["one", "other", "one", "other"]

    def to(comm: ThreadComm) -> list[int]:
        sent_to, send = [], comm.send

        def noted(tensor: Tensor, rank: int) -> object:
            sent_to.append(rank)
            return send(tensor, rank)

        comm.send = noted  # type: ignore[method-assign,assignment]
        align(models[comm.rank], comm)
        return sent_to

    assert run(4, to, hosts=hosts) == [[2], [3], [1], []]


def test_sparse_tensors_that_differ_are_refused() -> None:
    def work(comm: ThreadComm) -> None:
        model = nn.Module()
        model.register_buffer("some", torch.eye(3).mul(comm.rank + 1.0).to_sparse())
        with pytest.raises(RanksDiffer, match="some is sparse and differs between ranks"):
            align(model, comm)

    run(2, work)
