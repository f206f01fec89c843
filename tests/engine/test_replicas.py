"""Replicas: a flipped bit is found, named and healed. Without a majority all ranks stop."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.core.errors import RanksDiffer, UsageError, WorldError
from shoal.core.facts import Cluster, Link, Topology
from shoal.engine.replicas import Odd, digests_of, judged
from shoal.front.session_start import using
from shoal_tools.testing.planned_faults import flip

ROWS = torch.arange(24 * 6, dtype=torch.float32).reshape(24, 6).sin()
EVERY = 4


class Script:
    """A training script on one rank, in float32."""

    def __init__(self, rank: int, way: str, every: int = EVERY) -> None:
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 9), nn.Linear(9, 3))
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.batch = ROWS[rank * 4 : rank * 4 + 4], torch.arange(4) % 3
        self.loss_fn = nn.CrossEntropyLoss()
        shoal.parallelize(
            self.model,
            self.loss_fn,
            self.optimizer,
            sample=self.batch,
            pins={"0": way, "2": way, "3": "replicate" if way == "factor" else way},
            check_every=every,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.loss_fn(self.model(self.batch[0]), self.batch[1]).backward()
            self.optimizer.step()

    def held(self) -> list[Tensor]:
        """Weights and the optimizer's state, copied."""
        found = []
        for weight in self.model.parameters():
            found += [weight, *self.optimizer.state[weight].values()]
        return [tensor.detach().clone() for tensor in found]


def on_ranks(ranks: int, script: Callable[[ThreadComm], Any], processors: Any = ()) -> list[Any]:
    hosts = tuple(f"h{rank}" for rank in range(ranks))
    topology = Topology(hosts, processors=processors)

    def work(comm: ThreadComm) -> Any:
        comm.topology = topology
        with using(comm, Cluster(topology, Link(1e-4, 1e8), 1.0)):
            return script(comm)

    return run(ranks, work, timeout_s=20, hosts=hosts)


@pytest.mark.parametrize("bit", [0, 22, 31])
@pytest.mark.parametrize("what", ["weight", "state"])
@pytest.mark.parametrize("way", ["replicate", "factor"])
def test_a_flipped_bit_is_found_named_and_healed_on_three_ranks(
    way: str, what: str, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    def script(comm: ThreadComm) -> tuple[list[Tensor], list[Tensor]]:
        script = Script(comm.rank, way)
        script.steps(2 * EVERY - 1)  # or an update may round it away
        if comm.rank == 1:
            weight = script.model[2].weight
            flip(weight if what == "weight" else script.optimizer.state[weight]["exp_avg"], 7, bit)
        before = script.held()
        script.steps(1)
        return before, script.held()

    ended = on_ranks(3, script)
    assert not all(map(torch.equal, ended[0][0], ended[1][0]))
    for _, after in ended[1:]:
        assert all(map(torch.equal, ended[0][1], after))
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said and all("rank 1 (host h1) had other bits than most ranks in" in s for s in said)
    assert all("2.weight" in s for s in said)


def test_no_check_without_one_and_none_where_nothing_differs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def script(comm: ThreadComm) -> list[Tensor]:
        script = Script(comm.rank, "replicate", every=0)
        script.steps(1)
        if comm.rank == 1:
            flip(script.model[2].weight, 7, 20)
        script.steps(2 * EVERY)
        Script(comm.rank, "replicate", every=1).steps(2 * EVERY)
        return script.held()

    first, second, _ = on_ranks(3, script)
    assert not all(map(torch.equal, first, second))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_with_two_ranks_the_job_stops_and_says_what_to_load() -> None:
    def script(comm: ThreadComm) -> None:
        script = Script(comm.rank, "replicate")
        if comm.rank == 0:
            flip(script.model[2].weight, 7, 20)
        script.steps(EVERY - 1)
        try:
            script.steps(1)
        except WorldError as error:
            told.append(str(error))
        else:
            raise AssertionError("nothing was found")

    told: list[str] = []
    on_ranks(2, script)
    assert len(told) == 2
    for text in told:
        assert "ranks 0, 1 have come to differ in" in text and "2.weight" in text
        assert "no majority says which is right" in text and "shoal.load(" in text


def test_a_rank_that_differs_at_every_check_ends_the_job() -> None:
    def script(comm: ThreadComm) -> None:
        script = Script(comm.rank, "replicate", every=1)
        for _ in range(5):
            if comm.rank == 2:
                flip(script.model[0].weight, 3, 10)
            script.steps(1)

    with pytest.raises(WorldError, match="rank 2 differs from the other ranks at 3 checks"):
        on_ranks(3, script)


def test_ranks_that_round_otherwise_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    def script(comm: ThreadComm) -> list[Tensor]:
        script = Script(comm.rank, "replicate", every=1)
        script.steps(1)
        if comm.rank == 1:
            flip(script.model[0].weight, 3, 10)
        script.steps(2)
        return script.held()

    with pytest.warns(UserWarning, match="processors round unlike one another"):
        first, second = on_ranks(2, script, processors=("avx2", "avx512"))
    assert not all(map(torch.equal, first, second))


def test_state_that_one_rank_alone_keeps_is_refused() -> None:
    def script(comm: ThreadComm) -> None:
        script = Script(comm.rank, "replicate", every=2)
        script.steps(1)
        if comm.rank == 1:
            script.optimizer.state[script.model[0].weight]["more"] = torch.zeros(3)
        script.steps(2)

    with pytest.raises(RanksDiffer, match=r"does not keep what rank 1 keeps: 0.weight \(more of"):
        on_ranks(3, script)


def test_an_owners_piece_whose_norm_jumps_is_named(caplog: pytest.LogCaptureFixture) -> None:
    def script(comm: ThreadComm) -> None:
        script = Script(comm.rank, "sliced")
        script.steps(EVERY)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
        comm.gather_objects(None, "until both have looked")
        with torch.no_grad():
            script.model[2].weight.mul_(1e6)
        script.steps(EVERY)

    on_ranks(2, script)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert {text.split("shape ")[1].split(", which this rank owns")[0] for text in said} == {
        "(9, 8)"
    }
    assert all("flipped bit, or training diverges" in text for text in said)


TENSORS = {
    "float32": torch.randn(37),
    "float64, one": torch.randn((), dtype=torch.float64),
    "bfloat16": torch.randn(13).bfloat16(),
    "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "every other": torch.randn(9, 6)[:, ::2],
    "not at a word": torch.randn(12)[1:],
    "bool": torch.tensor([True, False, True]),
    "complex": torch.randn(3, dtype=torch.complex64),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_digest_sees_every_bit(name: str) -> None:
    tensor = TENSORS[name]
    (before,) = digests_of([tensor]).tolist()
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    for byte in range(len(flat)):
        for bit in range(1 if tensor.dtype is torch.bool else 8):
            changed = flat.clone()
            changed[byte] ^= 1 << bit
            other = torch.empty_like(tensor)
            other.copy_(changed.view(tensor.dtype).view(tensor.shape))
            assert digests_of([other]).tolist() != [before], (byte, bit)


def test_the_majority_of_those_that_round_alike() -> None:
    names = ["a", "b"]

    def judge(*rows: tuple[int, int], processors: tuple[str, ...] = ()) -> Any:
        return judged(names, torch.tensor(rows), processors)

    assert judge((1, 2), (1, 2)) == ([], {})
    assert judge((1, 2), (1, 2), (1, 3)) == ([Odd("b", 0, (2,))], {})
    assert judge((4, 2), (1, 2), (1, 3)) == ([Odd("a", 1, (0,)), Odd("b", 0, (2,))], {})
    assert judge((1, 2), (1, 3)) == ([], {"b": [0, 1]})
    assert judge((1, 2), (1, 2), (1, 3), (1, 3)) == ([], {"b": [0, 1, 2, 3]})
    unlike = judge((1, 2), (1, 2), (1, 3), (5, 3), processors=("x", "x", "y", "z"))
    assert unlike == ([], {})


def test_the_wish_is_checked() -> None:
    with pytest.raises(UsageError, match="check_every is a whole number"):
        on_ranks(2, lambda comm: Script(comm.rank, "replicate", every=-1))
