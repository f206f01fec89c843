"""Two models whose loss goes through one another: the same rows and steps as in one process."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from one_process import cluster_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.comm.threads import ThreadComm, run
from shoal.front.session_start import using

ROWS = torch.arange(24 * 4, dtype=torch.float64).reshape(24, 4).sin()
NOISE = torch.arange(24 * 4, dtype=torch.float64).reshape(24, 4).cos()


Loops = Sequence[Callable[["Gan"], None]]


def squared(judged: Tensor, _: Tensor) -> Tensor:
    return judged.square().mean()


class Gan:
    """A critic and a generator on one rank. Somebody has looked at a batch before."""

    def __init__(self, models: nn.ModuleList, way: str, **how: Any) -> None:
        self.critic, self.generator = models
        self.loader, self.other = self.sharded(5), self.sharded(6)
        self.by_critic = torch.optim.RMSprop(self.critic.parameters(), 0.01)
        self.by_generator = torch.optim.SGD(self.generator.parameters(), 0.05, momentum=0.9)
        x, z = next(iter(self.loader))
        how = {"pins": {"0" if way == "column" else "*": way}} | how
        count = how.pop("count", None)
        self.means = shoal.parallelize(
            self.critic, squared, self.by_critic, sample=(x, z), count=count, **how
        )[1]
        assert all(p.grad is None for p in self.critic.parameters())
        shoal.parallelize(self.generator, self.fools, self.by_generator, sample=(z, z), **how)
        assert all(p.grad is None for p in self.critic.parameters()), "measuring leaves no trace"
        assert all(p.requires_grad for p in self.critic.parameters())

    def sharded(self, seed: int, rows: int = 4) -> Any:
        source = torch.Generator().manual_seed(seed)  # these ranks share torch's
        loader = DataLoader(TensorDataset(ROWS, NOISE), rows, shuffle=True, generator=source)
        return shoal.shard(loader, batch="global")

    def fools(self, fake: Tensor, z: Tensor) -> Tensor:
        return self.means(self.critic(fake) - 1, z)

    def judge(self, x: Tensor, z: Tensor) -> None:
        self.by_critic.zero_grad()
        (self.critic(self.generator(z).detach()).mean() - self.critic(x).mean()).backward()
        self.by_critic.step()
        with torch.no_grad():
            for p in self.critic.parameters():
                p.clamp_(-0.5, 0.5)

    def make(self, z: Tensor) -> None:
        self.by_generator.zero_grad()
        self.fools(self.generator(z), z).backward()
        self.by_generator.step()


def as_in_the_guide(gan: Gan) -> None:
    for _ in range(2):
        for x, z in gan.loader:
            gan.judge(x, z)
            gan.critic.requires_grad_(False)
            gan.make(z)
            gan.critic.requires_grad_(True)


def looks(gan: Gan) -> None:
    for _ in range(2):
        next(iter(gan.loader))
        for number, (x, z) in enumerate(gan.loader):
            if number in (0, 3):
                next(iter(gan.loader)), list(gan.other)
            gan.judge(x, z)
            gan.make(z)
            assert gan.loader.state_dict()["position"] in ([4 * number + 4], [])


def forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def critic_steps(gan: Gan) -> None:
    batches = forever(gan.loader)
    for _ in range(4):
        for x, z in itertools.islice(batches, 3):
            gan.judge(x, z)
        gan.make(next(batches)[1])


def cycled(gan: Gan) -> None:
    for x, z in itertools.islice(itertools.cycle(gan.loader), 8):
        gan.judge(x, z)
        gan.make(z)


def one_batch_of_each_pass(gan: Gan) -> None:
    for _ in range(5):
        gan.judge(*next(iter(gan.loader)))
        gan.make(next(iter(gan.loader))[1])


def accumulated(gan: Gan) -> None:
    for number in range(6):
        x, _ = next(iter(gan.loader))
        kept = gan.by_critic.accumulate() if number % 2 == 0 else contextlib.nullcontext()
        with kept:
            gan.critic(x).square().mean().backward()
        if number % 2:
            gan.by_critic.step()
            gan.by_critic.zero_grad()


def zipped(gan: Gan) -> None:
    for _ in range(2):
        for (x, _), (_, z) in zip(gan.loader, gan.other, strict=True):
            gan.judge(x, z)
            gan.make(z)


def broken_off(gan: Gan) -> None:
    for _ in range(3):
        for number, (x, z) in enumerate(gan.loader):
            if number == 2:
                break
            gan.judge(x, z)
            gan.make(z)


def counted(gan: Gan) -> None:
    for _ in range(2):
        batches = iter(gan.loader)
        for _ in range(len(gan.loader)):
            gan.judge(*next(batches))


def one_loss(gan: Gan) -> None:
    for _ in range(2):
        for x, z in gan.loader:
            optimizers = (gan.by_critic, gan.by_generator)
            for optimizer in optimizers:
                optimizer.zero_grad()
            (gan.critic(gan.generator(z)) - x[:, :1]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()


def gradients_of_inputs(gan: Gan) -> None:
    for _ in range(2):
        x, _ = next(iter(gan.loader))
        gan.critic(x.requires_grad_()).sum().backward()  # pictures for a log
        gan.by_critic.zero_grad()
        for x, z in gan.loader:
            gan.judge(x, z)


def gradients_by_hand(gan: Gan) -> None:
    for _ in range(2):
        for x, _ in gan.loader:
            step = shoal.mean(x.mean(), weight=len(x))
            for p in gan.critic.parameters():
                p.grad = torch.full_like(p, float(step))
            gan.by_critic.step()


def skipped_steps(gan: Gan) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    batches = gan.sharded(7, rows=24)  # an epoch of one step, which may be skipped
    for number in range(4):
        for x, _ in batches:
            gan.by_critic.zero_grad()
            loss = gan.critic(x).square().mean() * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(gan.by_critic)
            scaler.update()


LOOPS = [
    as_in_the_guide,
    looks,
    critic_steps,
    cycled,
    one_batch_of_each_pass,
    accumulated,
    zipped,
    broken_off,
    counted,
    one_loss,
    gradients_of_inputs,
    gradients_by_hand,
    skipped_steps,
]


def trained(ranks: int, loops: Loops, way: str, **how: Any) -> list[Any]:
    """Weights, and where the loader is, behind each of some loops on each of so many ranks."""
    torch.manual_seed(1)
    critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    models = nn.ModuleList([critic, generator]).double()
    copies = [copy.deepcopy(models) for _ in range(ranks)]

    def work(comm: ThreadComm) -> Any:
        with using(comm, cluster_of(ranks)):
            gan, found = Gan(copies[comm.rank], way, **how), []
            for loop in loops:
                loop(gan)
                at = gan.loader.state_dict()
                weights = copy.deepcopy(copies[comm.rank].state_dict())
                found.append((loop.__name__, weights, (at["epoch"], at["position"])))
        return found

    return run(ranks, work, timeout_s=40)


def assert_alike(loops: Loops, way: str, **how: Any) -> None:
    (alone,) = trained(1, loops, way, **how)
    for rank in trained(2, loops, way, **how):
        for (loop, weights, at), (_, expected, place) in zip(rank, alone, strict=True):
            assert at == place, loop
            off = max(float((weights[n] - expected[n]).abs().max()) for n in expected)
            assert off <= 1e-10, loop


def test_loops_read_the_rows_of_one_process() -> None:
    assert_alike(LOOPS, "replicate")


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sliced", "factor", "column"])
def test_loops_under_other_plans(way: str) -> None:
    assert_alike([as_in_the_guide, looks, critic_steps, accumulated, one_loss], way)


def generator_first(gan: Gan) -> None:
    for x, z in gan.loader:
        gan.critic.requires_grad_(False)  # before any backward of its own
        gan.by_generator.zero_grad()
        (gan.fools(gan.generator(z), z) + gan.fools(gan.generator(2 * z), z)).backward()
        gan.by_generator.step()
        gan.critic.requires_grad_(True)
        gan.by_critic.zero_grad()
        gan.means(gan.critic(x), x).backward()
        gan.by_critic.step()


FROZEN = [("replicate", None), ("sliced", lambda output, _: len(output)), ("factor", None)]


@pytest.mark.parametrize("way, count", [*FROZEN, ("column", FROZEN[1][1])])
def test_a_critic_that_is_frozen_first(way: str, count: Any) -> None:
    assert_alike([generator_first], way, **({} if count is None else {"count": count}))


@pytest.mark.parametrize("way", ["replicate", "sliced"])
def test_measuring_counts_no_step_of_a_period(way: str) -> None:
    assert_alike([as_in_the_guide], way, update_every={"*": 2})
